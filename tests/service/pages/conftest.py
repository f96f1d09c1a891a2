"""Debian's chromium, driven by Playwright; and a service with a job in every state."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

from tests.service.pages.watched import WatchedPage
from tests.service.running import Service, running
from tests.service.seeded import seed

CHROMIUM = shutil.which("chromium")
QUIET = [
    "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync",
]  # fmt: skip
"""It asks no host of its maker."""


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """One for all tests of a process."""
    if CHROMIUM is None:
        pytest.skip("there is no chromium on PATH (Debian: apt install chromium)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET, chromium_sandbox=False)
        yield browser
        browser.close()


@pytest.fixture
def seeded(redis_url: str, tmp_path: Path) -> Iterator[tuple[Service, dict[str, str]]]:
    """A service, and ids of jobs by state."""
    with running(redis_url, tmp_path) as service:
        yield service, seed(service)


@pytest.fixture
def watched(browser: Browser) -> Iterator[WatchedPage]:
    """A page that fails the test for an error in its console, a request to elsewhere, or a broken policy."""
    with WatchedPage(browser) as watched:
        yield watched
        assert watched.faults == []
