"""The service, over HTTP."""
