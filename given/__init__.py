"""What is given to a run (machine, folder, model): checked, or evened out, before it begins."""
