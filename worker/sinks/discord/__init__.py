"""Discord: one progress message per job, edited in place, and new ones for what a person should notice."""
