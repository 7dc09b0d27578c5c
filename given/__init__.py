"""Checks of what a run is given (machine, folder, model), and code for what is special in it."""
