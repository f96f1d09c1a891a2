"""Sweeps: a job template, a space of settings, and the trials that were made of them (ADR 14)."""
