"""`docs/openapi.json` and the pages of `docs/reference/`, written from the code."""
