"""The machine as a trainer sees it: its card, who else is there, memory in use, and what it looks like to run out."""
