"""The commands: NAME_arguments.py declares the arguments of a command, NAME.py runs it."""
