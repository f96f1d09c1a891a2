"""The machine as a trainer sees it: its GPU, who else is there, memory in use, and what it looks like to run out."""
