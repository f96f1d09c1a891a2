"""Two jobs side by side: the cause first, curves in one picture, and the way there from the table."""

from __future__ import annotations

import pytest
from playwright.sync_api import Browser, expect

from tests.service.pages.showcase import furnish
from tests.service.pages.watched import WatchedPage
from tests.service.running import Service


@pytest.mark.parametrize(("theme", "width"), [("light", 1280), ("dark", 390)])
def test_from_the_table_to_why_one_fits_and_the_other_does_not(
    browser: Browser, service: Service, theme: str, width: int
) -> None:
    jobs = furnish(service, rows=50)
    with WatchedPage(browser, color_scheme=theme, viewport={"width": width, "height": 900}) as watched:
        page = watched.page
        page.goto(service.url)
        for name in ("support-chat-long", "support-chat"):
            page.get_by_label(f"Compare {name}", exact=True).check()
        page.get_by_role("button", name="Compare").click()
        cause = page.locator(".cause")
        expect(cause).to_contain_text("data.max_tokens is 2,048, not 512")
        expect(cause).to_contain_text("the adapters are float32, not bfloat16")
        assert cause.locator("dt").count() == 2
        assert page.locator("svg .measured, .legend .measured").count() == 0, "the legend names what is drawn"
        page.get_by_role("link", name="support-chat-long").click()
        expect(page.locator(".notice.bad")).to_contain_text("The smallest setting needs 27.4 GiB")
        page.goto(f"{service.url}/compare?jobs={jobs['recipes-xl']},{jobs['tickets']}")
        expect(page.locator("#overlay")).to_have_attribute("data-drawn", "109")
        page.get_by_label("x axis").select_option("tokens")
        expect(page.locator("#overlay canvas")).to_be_visible()
        wider = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wider == 0
        assert watched.violations() == []
        assert watched.faults == []


def test_what_cannot_be_compared_is_said(service: Service, watched: WatchedPage) -> None:
    watched.expected = ["422"]
    watched.page.goto(f"{service.url}/compare?jobs={service.submit()}")
    expect(watched.page.get_by_role("heading")).to_contain_text("2 to 10 can be compared")
