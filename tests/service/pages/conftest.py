"""A service with a job in every state, and a page that is watched."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.service.pages.watched import WatchedPage
from tests.service.running import Service
from tests.service.seeded import seed


@pytest.fixture
def seeded(service: Service) -> tuple[Service, dict[str, str]]:
    """A service, and ids of jobs by state."""
    return service, seed(service)


@pytest.fixture
def watched(browser: Browser) -> Iterator[WatchedPage]:
    """A page that fails the test for an error in its console, a request to elsewhere, or a broken policy."""
    with WatchedPage(browser) as watched:
        yield watched
        assert watched.faults == []
