"""A page of which everything is noted that must not happen."""

from __future__ import annotations

from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, ConsoleMessage, Page, Request


class WatchedPage:
    """`page`, and `faults`: errors in the console, exceptions, requests to another origin, broken policies."""

    def __init__(self, browser: Browser, **options: Any) -> None:
        self.faults: list[str] = []
        self.expected: list[str] = []
        """Parts of faults that a test brings about."""
        self._context = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | options))
        self.page: Page = self._context.new_page()
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self._note(f"exception: {error}"))
        self.page.on("request", self._asked)

    def violations(self, *rules: str) -> list[str]:
        """What keeps somebody from using the page as it is now, `rule: element`; by these rules of axe only, if any are
        named.
        """
        options = {"resultTypes": ["violations"]} | ({"runOnly": [*rules]} if rules else {})
        result = Axe().run(self.page, options=options).response
        assert result["passes"], "axe looked at nothing"
        return [f"{each['id']}: {each['nodes'][0]['html'][:160]}" for each in result["violations"]]

    def _said(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):  # a broken policy is one
            self._note(f"{message.type}: {message.text}")

    def _asked(self, request: Request) -> None:
        here = urlsplit(self.page.url).netloc
        if here and urlsplit(request.url).netloc not in ("", here):
            self._note(f"asked {request.url}")

    def _note(self, fault: str) -> None:
        if not any(part in fault for part in self.expected):
            self.faults.append(fault)

    def __enter__(self) -> WatchedPage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._context.close()
