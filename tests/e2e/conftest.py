"""A browser for tests of pages on the whole of Longhaul."""

from __future__ import annotations

from tests.service.pages.conftest import browser

__all__ = ["browser"]
