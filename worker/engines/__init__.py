"""Engines of others, which train jobs of ours (ADR 19)."""
