"""Side-by-side measurements against peers, one file each, JSON on the last line."""
