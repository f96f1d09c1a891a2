"""Debian's chromium, driven by Playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
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


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """One for all tests of a process."""
    if CHROMIUM is None:
        pytest.skip("there is no chromium on PATH (Debian: apt install chromium)")
    from playwright.sync_api import sync_playwright  # where tests run that need no browser, it is not installed

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET, chromium_sandbox=False)
        yield browser
        browser.close()
