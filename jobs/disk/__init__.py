"""What a job leaves on disk: the run directory, its files and events, and how they go or are repaired."""
