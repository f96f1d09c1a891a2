"""Debian's chromium, driven by Playwright."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

CHROMIUM = shutil.which("chromium")
QUIET = [
    "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync",
]  # fmt: skip
"""It asks no host of its maker."""


class Chromium:
    """One for all tests of a process: started by the first that asks for it, stopped when the session ends.

    Playwright's sync API leaves an event loop half-way through its work, which counts as the running one of this thread
    between calls. So it is put away after each test: others run loops of their own.
    """

    _started: Chromium | None = None

    def __init__(self) -> None:
        from playwright.sync_api import sync_playwright  # where tests run that need no browser, it is not installed

        self._playwright = sync_playwright().start()
        self._loop = asyncio.get_running_loop()
        self._browser = self._playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET, chromium_sandbox=False)
        asyncio._set_running_loop(None)

    @classmethod
    def of(cls, session: pytest.Session) -> Chromium:
        """That of this session; skips the test where there is no chromium."""
        if CHROMIUM is None:
            pytest.skip("there is no chromium on PATH (Debian: apt install chromium)")
        if cls._started is None:
            cls._started = cls()
            session.addfinalizer(cls._started._stop)
        return cls._started

    @contextmanager
    def driven(self) -> Iterator[Browser]:
        """For as long as it is used."""
        asyncio._set_running_loop(self._loop)
        try:
            yield self._browser
        finally:
            asyncio._set_running_loop(None)

    def _stop(self) -> None:
        with self.driven():
            self._browser.close()
            self._playwright.stop()
        Chromium._started = None


@pytest.fixture
def browser(request: pytest.FixtureRequest) -> Iterator[Browser]:
    """That of the session."""
    with Chromium.of(request.session).driven() as browser:
        yield browser
