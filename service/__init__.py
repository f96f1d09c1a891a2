"""HTTP in, jobs out."""
