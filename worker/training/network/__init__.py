"""The model in memory: loaded once, guarded, and written out."""
