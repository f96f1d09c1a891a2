"""Listeners to events."""
