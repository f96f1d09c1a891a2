"""A page of which everything is noted that must not happen."""

from __future__ import annotations

from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, ConsoleMessage, Page, Request

CONTROLS = """() => [...document.querySelectorAll("main :is(a, button, input, select, summary, textarea), nav a")]
  .filter((each) => each.checkVisibility({ visibilityProperty: true }) && each.type !== "file")
  .map((each) => each.textContent.trim() || each.id || each.outerHTML)"""
BEYOND = """async () => {
  await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));  // charts are sized in a frame
  const wide = innerWidth, found = [];
  const all = document.documentElement.scrollWidth;
  if (all > wide) found.push(`the page is ${all} px wide`);
  for (const each of document.querySelectorAll("main :is(a, button, input, select, summary, textarea, td), nav a")) {
    if (!each.checkVisibility({ visibilityProperty: true }) || each.type === "file") continue;
    const { left, right } = each.getBoundingClientRect(), scroller = each.closest(".scroll");
    const scrolls = scroller && !scroller.querySelector(".labelled");
    if ((left >= 0 && right <= wide) || (scrolls && getComputedStyle(scroller).backgroundImage !== "none")) continue;
    found.push(`${each.outerHTML.slice(0, 120)} is from ${left} to ${right} px`);
  }
  for (const table of document.querySelectorAll("table:has(thead)")) {
    const names = [...table.querySelectorAll("thead th")].map((each) => each.textContent.trim());
    for (const cell of table.querySelectorAll("tbody td:nth-child(n + 2)")) {
      const label = getComputedStyle(cell, "::before").content.slice(1, -1);
      const name = names[cell.cellIndex], called = label && name.startsWith(label);
      const isNamed = cell.dataset.label || (table.matches(".labelled") && name && !cell.matches(".control"));
      if (cell.textContent.trim() && isNamed && !called) found.push(`a cell of ${name} is called ${label}`);
    }
  }
  return found;
}"""
"""What is off the screen without a sign that there is more, and cells without the names of their columns."""


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

    def on_a_phone(self) -> list[str]:
        """What is hidden, off the screen without a sign, or without the name of its column in a window of 390 px."""
        size = self.page.viewport_size
        assert size is not None
        there: list[str] = self.page.evaluate(CONTROLS)
        self.page.set_viewport_size({"width": 390, "height": 800})
        here: list[str] = self.page.evaluate(CONTROLS)
        beyond: list[str] = self.page.evaluate(BEYOND)
        self.page.set_viewport_size(size)
        return [f"hidden: {each}" for each in there if each not in here] + beyond

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
