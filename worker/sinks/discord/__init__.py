"""Discord: one message per attempt, edited in place, and new ones for what a person should notice."""
