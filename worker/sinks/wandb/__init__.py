"""Weights & Biases: one child process per open run."""
