"""The client, against the real service."""
