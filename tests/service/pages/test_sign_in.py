"""A browser signs in with a key: what its session may do, and what it may not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests
from playwright.sync_api import Browser

from jobs.process.keys import new_key
from service.edge.keys import Keys
from service.edge.sessions import COOKIE, CSRF_HEADER, LASTS_S, SECRET, Sessions
from tests.service.pages.watched import WatchedPage
from tests.service.running import Service, running

KEY = "lh_of-this-test"
HTML = {"Accept": "text/html"}


@pytest.fixture
def guarded(redis_url: str, tmp_path: Path) -> Iterator[Service]:
    """A service that asks for a key."""
    with running(redis_url, tmp_path, api_key=KEY) as service:
        yield service


def sign_in(service: Service, key: str = KEY, **headers: str) -> requests.Response:
    """The form, as a browser sends it."""
    form = {"key": key, "next": "/workers"}
    return requests.post(service.url + "/sign-in", data=form, headers=headers, allow_redirects=False, timeout=20)


def csrf_token(service: Service, cookie: dict[str, str]) -> str:
    """As the page holds it."""
    page = requests.get(service.url + "/", headers=HTML, cookies=cookie, timeout=20).text
    found = re.search(r'name="csrf-token" content="([0-9a-f]+)"', page)
    assert found is not None
    return found[1]


def test_a_page_asks_for_the_key_once_and_leads_on(browser: Browser, guarded: Service) -> None:
    job = guarded.submit(name="behind the door")
    with WatchedPage(browser) as watched:
        watched.expected = ["401"]
        page = watched.page
        page.goto(f"{guarded.url}/jobs/{job}?tab=events")
        page.get_by_label("API key").fill("lh_wrong")
        page.keyboard.press("Enter")
        page.get_by_text("This is not a key of this service.").wait_for()
        page.get_by_label("API key").fill(KEY)
        page.keyboard.press("Enter")
        page.get_by_role("heading", name="behind the door").wait_for()
        assert page.url == f"{guarded.url}/jobs/{job}?tab=events"
        page.get_by_role("button", name="Cancel").click()
        page.get_by_role("button", name="Yes").click()
        page.locator("h1 .state.cancelled").wait_for()
        page.get_by_role("button", name="Sign out").click()
        page.get_by_label("API key").wait_for()
        assert watched.faults == []
    assert guarded.get(f"/jobs/{job}").json()["status"] == "cancelled"


def test_the_cookie_is_for_this_service_alone_and_says_no_key(guarded: Service) -> None:
    answer = sign_in(guarded)
    said = answer.headers["Set-Cookie"]
    assert answer.status_code == 303 and answer.headers["Location"] == "/workers"
    assert "HttpOnly" in said and "SameSite=strict" in said and f"Max-Age={LASTS_S}" in said and KEY not in said
    assert "Secure" not in said
    assert "Secure" in sign_in(guarded, **{"X-Forwarded-Proto": "https"}).headers["Set-Cookie"]
    assert (guarded.settings.uploads / SECRET).stat().st_mode & 0o777 == 0o600
    assert sign_in(guarded, key="").status_code == 401


def test_a_change_needs_the_token_of_the_session_and_a_page_of_this_service(guarded: Service) -> None:
    job = guarded.submit()
    cookie = {COOKIE: sign_in(guarded).cookies[COOKIE]}
    right = {CSRF_HEADER: csrf_token(guarded, cookie)}
    url = f"{guarded.url}/jobs/{job}/cancel"
    elsewhere = [right | {"Origin": "http://evil.example"}, right | {"Sec-Fetch-Site": "cross-site"}]
    for wrong in ({}, {CSRF_HEADER: "0" * 64}, *elsewhere):
        assert requests.post(url, cookies=cookie, headers=wrong, timeout=20).json()["error"]["code"] == "foreign_origin"
    assert requests.post(url, headers=right, timeout=20).status_code == 401
    assert guarded.get(f"/jobs/{job}").json()["status"] == "validating"
    assert requests.post(url, cookies=cookie, headers=right | {"Origin": guarded.url}, timeout=20).status_code == 200
    # A wrong key is not made right by a cookie beside it.
    bearer = {"Authorization": "Bearer lh_wrong"}
    assert requests.get(guarded.url + "/jobs", cookies=cookie, headers=bearer, timeout=20).status_code == 401


@pytest.mark.parametrize("target", ["//evil.example", "/\\evil.example", "https://evil.example", "javascript:alert(1)"])
def test_signing_in_leads_nowhere_else(guarded: Service, target: str) -> None:
    form = {"key": KEY, "next": target}
    answer = requests.post(guarded.url + "/sign-in", data=form, allow_redirects=False, timeout=20)
    assert answer.headers["Location"] == "/"


def test_programs_are_refused_as_ever_and_only_pages_lead_to_the_form(guarded: Service) -> None:
    assert requests.get(guarded.url + "/jobs", timeout=20).status_code == 401
    answer = requests.get(guarded.url + "/jobs?status=paused", headers=HTML, allow_redirects=False, timeout=20)
    assert (answer.status_code, answer.headers["Location"]) == (303, "/sign-in?next=%2Fjobs%3Fstatus%3Dpaused")
    assert sign_in(guarded, Origin="http://evil.example").status_code == 403


def test_guesses_are_slowed_down(redis_url: str, tmp_path: Path) -> None:
    with running(redis_url, tmp_path, api_key=KEY, rate_limit=300) as limited, ThreadPoolExecutor(30) as pool:
        # Many at once: one after the other they may be slow enough to be let pass.
        answers = list(pool.map(lambda number: sign_in(limited, key=f"lh_{number}").status_code, range(90)))
    assert set(answers) == {401, 429}


def test_a_session_outlives_a_restart_and_ends_with_its_key_or_its_time(tmp_path: Path) -> None:
    _, line = new_key("ada")
    (tmp_path / "keys").write_text(line + "\n")
    now = [1e9]

    def sessions(keys: Keys) -> Sessions:
        return Sessions(keys, tmp_path / "uploads", now=lambda: now[0])

    cookie = sessions(Keys(None, tmp_path / "keys")).open("ada")
    again = sessions(Keys("another", tmp_path / "keys"))
    assert again.name_of(cookie) == "ada" and len(again.csrf_token(cookie)) == 64
    for broken in ("", ".", cookie[:-1], cookie.replace(".", ""), "é" + cookie, cookie[4:], cookie + "0"):
        assert again.name_of(broken) is None and again.csrf_token(broken) == ""
    now[0] += LASTS_S
    assert again.name_of(cookie) is None
    now[0] -= LASTS_S
    (tmp_path / "keys").write_text(new_key("ada")[1] + "\n")
    assert sessions(Keys("another", tmp_path / "keys")).name_of(cookie) is None
    (tmp_path / "uploads" / SECRET).write_bytes(b"0" * 32)
    assert sessions(Keys(None, tmp_path / "keys")).name_of(cookie) is None


def test_without_a_key_there_is_nothing_to_sign_in_to(service: Service) -> None:
    answer = service.get("/sign-in", allow_redirects=False)
    assert (answer.status_code, answer.headers["Location"]) == (303, "/")
