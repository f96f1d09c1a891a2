"""`doctor`: whether this machine and its GPU are fit for long jobs, examined with the trainer's own code.

`command.py` runs each group of checks in a process of its own, so that none can spoil another; `finding.py` lists them.
"""
