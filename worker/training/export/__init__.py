"""A finished model in the format of another program, verified by that program."""
