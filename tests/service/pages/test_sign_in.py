"""A browser signs in with a key: what its session may do, and what it may not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests
from playwright.sync_api import Browser

from jobs.events import JobPriorityChanged
from jobs.process.secrets import new_key
from service.edge.keys import Keys
from service.edge.sessions import CSRF_HEADER, LASTS_S, SECRET, Sessions, cookie_name
from tests.service.pages.watched import WatchedPage
from tests.service.running import Service, running
from tests.service.seeded import seed
from tests.support.stack import ROOT

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
    return requests.post(service.url + "/sign-in", data=form, headers=headers, allow_redirects=False, timeout=60)


def csrf_token(service: Service, cookie: dict[str, str]) -> str:
    """As the page holds it."""
    page = requests.get(service.url + "/", headers=HTML, cookies=cookie, timeout=60).text
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
    cookie = dict(sign_in(guarded).cookies)
    right = {CSRF_HEADER: csrf_token(guarded, cookie)}
    url = f"{guarded.url}/jobs/{job}/cancel"
    elsewhere = [right | {"Origin": "http://evil.example"}, right | {"Sec-Fetch-Site": "cross-site"}]
    for wrong in ({}, {CSRF_HEADER: "0" * 64}, *elsewhere):
        assert requests.post(url, cookies=cookie, headers=wrong, timeout=60).json()["error"]["code"] == "foreign_origin"
    assert requests.post(url, headers=right, timeout=60).status_code == 401
    assert guarded.get(f"/jobs/{job}").json()["status"] == "validating"
    assert requests.post(url, cookies=cookie, headers=right | {"Origin": guarded.url}, timeout=60).status_code == 200
    # A wrong key is not made right by a cookie beside it.
    bearer = {"Authorization": "Bearer lh_wrong"}
    assert requests.get(guarded.url + "/jobs", cookies=cookie, headers=bearer, timeout=60).status_code == 401


@pytest.mark.parametrize("target", ["//evil.example", "/\\evil.example", "https://evil.example", "javascript:alert(1)"])
def test_signing_in_leads_nowhere_else(guarded: Service, target: str) -> None:
    form = {"key": KEY, "next": target}
    answer = requests.post(guarded.url + "/sign-in", data=form, allow_redirects=False, timeout=60)
    assert answer.headers["Location"] == "/"


def test_programs_are_refused_as_ever_and_only_pages_lead_to_the_form(guarded: Service) -> None:
    assert requests.get(guarded.url + "/jobs", timeout=60).status_code == 401
    answer = requests.get(guarded.url + "/jobs?status=paused", headers=HTML, allow_redirects=False, timeout=60)
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
    (tmp_path / "uploads" / SECRET).write_bytes(b"")
    with pytest.raises(OSError, match="32 bytes are expected, not 0: remove it"):  # else anybody could sign a cookie
        sessions(Keys(None, tmp_path / "keys")).name_of(cookie)


def test_services_on_two_ports_of_a_host_have_cookies_of_their_own(guarded: Service) -> None:
    (name,) = sign_in(guarded).cookies.keys()
    assert name == f"longhaul_session_{guarded.settings.port}" == cookie_name(guarded.url.removeprefix("http://"))
    assert [cookie_name(host) for host in ("box", "box:1", "[::1]", "[::1]:2", "")] == [
        "longhaul_session", "longhaul_session_1", "longhaul_session", "longhaul_session_2", "longhaul_session",
    ]  # fmt: skip


def test_behind_a_proxy_the_address_that_people_see_is_the_own_one(guarded: Service) -> None:
    # As docs/security.md has Caddy and nginx send it.
    seen = {"Host": "box.example.org", "Origin": "https://box.example.org", "X-Forwarded-Proto": "https"}
    answer = sign_in(guarded, **seen)
    assert answer.status_code == 303 and answer.headers["Set-Cookie"].startswith("longhaul_session=")
    docs = (ROOT / "docs" / "security.md").read_text()
    assert "proxy_set_header Host $http_host;" in docs and "proxy_set_header X-Forwarded-Proto $scheme;" in docs
    cookie, job = dict(answer.cookies), guarded.submit()
    url = f"{guarded.url}/jobs/{job}?tab=reproduce"
    page = requests.get(url, cookies=cookie, headers=seen | HTML, timeout=60).text
    assert f"curl -X POST https://box.example.org/jobs/{job}/clone" in page
    assert '-H "Authorization: Bearer $LONGHAUL_API_KEY"' in page


def test_at_a_path_of_a_proxy_nothing_of_a_page_leads_out_of_it(
    browser: Browser, redis_url: str, tmp_path: Path
) -> None:
    """The service takes requests with the path, as here, and without it, as from a proxy that cuts it off."""
    with (
        running(redis_url, tmp_path, api_key=KEY, public_url="https://box.example.org/longhaul") as service,
        WatchedPage(browser) as watched,
    ):
        jobs = seed(service)
        job = jobs["running"]
        page, outside = watched.page, f"{service.url}/longhaul"
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"{outside}/jobs/{job}?tab=events")
        page.get_by_label("API key").fill(KEY)
        page.keyboard.press("Enter")
        page.locator("h1 .state.running").wait_for()
        assert page.url == f"{outside}/jobs/{job}?tab=events"
        with page.expect_response("**/metrics*"):
            page.goto(f"{outside}/jobs/{job}")
        tabs = [f"/jobs/{job}?tab={tab}" for tab in ("log", "files", "plan", "reproduce")]
        for path in (
            "/",
            "/new",
            "/sweeps",
            "/datasets",
            "/workers",
            "/no/such/page",
            f"/compare?jobs={','.join([*jobs.values()][:2])}",
            *tabs,
        ):
            watched.expected = ["404"] if "such" in path else []
            page.goto(outside + path)
            links = page.evaluate(
                """[..."href src action data-url data-undo data-next data-events".split(" ")].flatMap((name) =>
                [...document.querySelectorAll(`[${name}]`)].map((each) => each.getAttribute(name)))"""
            )
            led = [each for each in links if each.startswith("/") and not each.startswith("/longhaul/")]
            assert led == [] and len(links) > 10, path
            if path.endswith("reproduce"):
                assert f"https://box.example.org/longhaul/jobs/{job}/clone" in page.content()
        page.get_by_role("button", name="Cancel").click()
        with page.expect_response(f"{outside}/jobs/{job}/cancel") as answered:
            page.get_by_role("button", name="Yes").click()
        assert answered.value.ok
        page.get_by_role("button", name="Sign out").click()
        page.get_by_label("API key").wait_for()
        assert ([url for url in asked if not url.startswith(f"{outside}/")], watched.faults) == ([], [])
        said = sign_in(service)
        assert said.headers["Location"] == "/longhaul/workers" and "Path=/longhaul;" in said.headers["Set-Cookie"]
        assert service.get("/openapi.json").json()["servers"] == [{"url": "/longhaul"}]


def test_keys_of_any_text_are_wrong_or_right_and_never_an_error(redis_url: str, tmp_path: Path) -> None:
    with running(redis_url, tmp_path, api_key="schlüssel 🔑") as service:
        assert sign_in(service, key="schlüssel 🔑").status_code == 303
        for wrong in ("schlüssel", "\0", "%ff"):
            assert sign_in(service, key=wrong).status_code == 401
        raw = {"Content-Type": "application/x-www-form-urlencoded"}
        for body in (b"key=%ff%fe", b"key=\xff\xfe", b"next=%ff&key=a", b"\xff", b""):
            answer = requests.post(service.url + "/sign-in", data=body, headers=raw, timeout=60)
            assert answer.status_code == 401, body


def test_what_strangers_send_keeps_nobody_from_signing_in(redis_url: str, tmp_path: Path) -> None:
    with running(redis_url, tmp_path, api_key=KEY, rate_limit=300) as limited, ThreadPoolExecutor(30) as pool:
        refused = list(pool.map(lambda _: requests.get(limited.url + "/jobs", timeout=60).status_code, range(90)))
        assert set(refused) == {401, 429}
        led = requests.get(limited.url + "/", headers=HTML, allow_redirects=False, timeout=60)
        assert (led.status_code, led.headers["Location"]) == (303, "/sign-in?next=%2F")
        assert sign_in(limited, key="lh_mistyped").status_code == 401
        assert sign_in(limited).status_code == 303


def test_a_stream_ends_with_the_key_that_opened_it(redis_url: str, tmp_path: Path) -> None:
    keys, (key, line) = tmp_path / "keys", new_key("ada")
    keys.write_text(line + "\n")
    with running(redis_url, tmp_path, api_key=KEY, api_keys_file=keys) as service:
        job = service.submit()
        url, mine = (
            f"{service.url}/jobs/{job}/events",
            {"Authorization": f"Bearer {key}", "Accept": "text/event-stream"},
        )
        with requests.get(url, headers=mine, stream=True, timeout=60) as stream:
            lines = stream.iter_lines()
            assert next(each for each in lines if each.startswith(b"data:"))
            keys.write_text("# nobody\n")
            service.append(job, JobPriorityChanged(priority=7))
            assert not [each for each in lines if b"priority_changed" in each]  # and it has ended
        assert requests.get(url, headers=mine, timeout=60).status_code == 401


def test_who_follows_a_link_from_another_site_is_still_signed_in(browser: Browser, guarded: Service) -> None:
    job = guarded.submit(name="behind the door")
    with WatchedPage(browser) as watched:
        page = watched.page
        page.goto(f"{guarded.url}/sign-in")
        page.get_by_label("API key").fill(KEY)
        page.keyboard.press("Enter")
        page.get_by_role("heading", name="Jobs").wait_for()
        target = f"{guarded.url}/jobs/{job}?tab=events"
        page.goto(f"data:text/html,<a href='{target}'>job</a>")
        page.get_by_role("link", name="job").click()
        page.get_by_role("heading", name="behind the door").wait_for()
        assert page.url == target
        assert watched.faults == []


def test_without_a_key_links_lead_to_pages_and_other_sites_get_nothing(service: Service) -> None:
    job = service.submit()
    visit = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    url = f"/jobs/{job}"
    assert service.get(url, headers=visit | HTML).headers["Content-Type"].startswith("text/html")
    framed = {"Sec-Fetch-Dest": "iframe"}
    for refused in (visit, visit | HTML | framed, visit | HTML | {"Host": "evil.example"}):
        assert service.get(url, headers=refused).json()["error"]["code"] == "foreign_origin"


def test_without_a_key_there_is_nothing_to_sign_in_to(service: Service) -> None:
    answer = service.get("/sign-in", allow_redirects=False)
    assert (answer.status_code, answer.headers["Location"]) == (303, "/")
