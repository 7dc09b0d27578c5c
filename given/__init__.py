"""What a run is given, a machine, a folder, a model: is it usable, and what is special about it?"""
