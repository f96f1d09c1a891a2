"""Every page in every state: nothing fails, nothing is loaded from elsewhere, everybody can use it."""

from __future__ import annotations

import asyncio

import pytest

from service.routes.pages import TABS
from tests.service.pages.watched import WatchedPage
from tests.service.running import Service
from tests.service.seeded import seed_sweep
from tests.support.browser import Chromium

STATES = (
    "validating", "prepared", "queued", "waiting", "paused", "running", "stopping", "failed", "cancelled", "succeeded",
    "validated",
)  # fmt: skip
PAGES = ["/", "/?status=paused", "/?text=nothing-is-called-so", "/datasets", "/workers"]


def test_data_sets_name_their_jobs_and_what_is_lost_with_them(service: Service) -> None:
    for name in ("used.jsonl", "unused.jsonl"):
        service.request("PUT", f"/datasets/{name}", data=b'{"input": "a", "target": "b"}\n')
    job = service.submit(name="baker", data={"train": "dataset:used.jsonl"})
    shown = service.get("/datasets", headers={"Accept": "text/html"}).text
    assert f'href="/jobs/{job}">baker: validating</a>' in shown
    assert shown.count("they cannot be cloned or prepared again then") == 1


def test_between_tests_of_pages_others_run_event_loops_of_their_own(request: pytest.FixtureRequest) -> None:
    chromium = Chromium.of(request.session)
    for text in ("one", "two"):
        with chromium.driven() as browser, WatchedPage(browser) as watched:
            watched.page.set_content(f"<p>{text}</p>")
            assert watched.page.locator("p").inner_text() == text
        assert asyncio.run(asyncio.sleep(0, text)) == text


def test_every_page_is_sound_and_usable_in_both_themes(
    watched: WatchedPage, seeded: tuple[Service, dict[str, str]]
) -> None:
    (service, jobs), page = seeded, watched.page
    sweep = seed_sweep(service, ended=True)
    paths = PAGES + [f"/jobs/{jobs[state]}" for state in STATES if state != "succeeded"]
    paths += [f"/jobs/{jobs['succeeded']}?tab={tab}" for tab in TABS]
    found: dict[str, list[str]] = {}
    for path in paths:
        page.emulate_media(color_scheme="light")
        answer = page.goto(service.url + path)
        assert answer is not None and answer.status == 200, path
        if page.locator("#charts").count():
            page.locator("#charts[data-drawn]").wait_for()
            assert "--" not in page.locator("#charts").inner_text(), "legends show the last values"
        assert page.locator("main > .figures > div").count() <= 6, "all others are behind More figures"
        violations = watched.violations()
        page.emulate_media(color_scheme="dark")  # what does not depend on colours is the same in both themes
        if violations := violations + watched.violations("color-contrast") + watched.on_a_phone():
            found[path] = violations
    compared = f"/compare?jobs={jobs['succeeded']},{jobs['running']}"
    for path in ("/new", compared, "/sweeps", f"/sweeps/{sweep}", f"/jobs/{jobs['succeeded']}/report"):
        page.goto(service.url + path)  # tests of their own look at all else of these
        if missing := watched.on_a_phone():
            found[path] = missing
    assert found == {}
