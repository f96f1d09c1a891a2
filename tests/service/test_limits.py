"""How often one may ask, and what is said then."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from service.edge import limits
from service.edge.limits import Buckets, address
from tests.service.running import Service, running
from tests.support.machine import Clock

KEY = "k" * 40
RATE = 3.0


@pytest.fixture
def limited(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Service, Clock]]:
    """A service of 3 requests a second, and its clock."""
    clock = Clock()
    monkeypatch.setattr(limits.Buckets.__init__, "__kwdefaults__", {"now": clock})
    with running(redis_url, tmp_path, api_key=KEY, rate_limit=RATE) as service:
        yield service, clock


def test_a_bucket_holds_two_seconds_worth_and_fills_again() -> None:
    clock = Clock()
    buckets = Buckets(5.0, now=clock)
    assert [buckets.take("a") for _ in range(10)] == [0.0] * 10
    assert buckets.take("a") == pytest.approx(0.2)
    assert buckets.take("b") == 0.0, "each has its own"
    clock.now += 0.2
    assert buckets.take("a") == pytest.approx(0.0)
    assert buckets.take("a") > 0
    clock.now += 3600
    assert [buckets.take("a") > 0 for _ in range(11)] == [False] * 10 + [True]


def test_the_table_is_bounded_and_forgets_who_was_silent_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST", 100)
    clock = Clock()
    buckets = Buckets(1.0, now=clock)
    for number in range(1000):
        clock.now += 0.001
        buckets.take("regular")
        buckets.take(f"passer-by {number}")
        assert len(buckets._levels) <= 100
    assert buckets.take("regular") > 0, "he was never forgotten"


def test_addresses_of_one_household_count_as_one() -> None:
    assert address({"client": ("10.0.0.1", 5)}) == "10.0.0.1"
    assert address({"client": ("2001:db8:1:2:3:4:5:6", 5)}) == address({"client": ("2001:db8:1:2:ffff::1", 5)})
    assert address({"client": None}) == "unknown"


def test_too_many_requests_of_a_key_are_429_with_the_time_to_wait(limited: tuple[Service, Clock]) -> None:
    service, clock = limited
    answers = [service.get("/jobs") for _ in range(8)]
    assert [each.status_code for each in answers] == [200] * 6 + [429] * 2
    said = answers[-1]
    assert said.headers["Retry-After"] == "1"
    assert said.json() == {
        "error": {
            "type": "rate_limit_error",
            "code": "rate_limited",
            "message": "more than 3 requests a second from one key",
            "param": None,
            "hint": "wait 1 s",
        }
    }
    for _ in range(20):
        assert service.get("/health/live").status_code == service.get("/health/ready").status_code == 200
    clock.now += int(said.headers["Retry-After"])
    assert service.get("/jobs").status_code == 200


def test_who_guesses_keys_is_slowed_down_and_keeps_nobody_else_out(limited: tuple[Service, Clock]) -> None:
    service, clock = limited
    guesses = [requests.get(f"{service.url}/jobs", headers={"Authorization": f"Bearer {n}"}) for n in range(25)]
    assert [each.status_code for each in guesses] == [401] * 20 + [429] * 5
    assert guesses[-1].headers["Retry-After"] == "1"
    assert service.get("/jobs").status_code == 200, "the right key, from the same address"
    clock.now += 0.1
    assert requests.get(f"{service.url}/jobs").status_code == 401


def test_nobody_chooses_the_address_that_he_is_counted_for(redis_url: str, tmp_path: Path) -> None:
    with running(
        redis_url,
        tmp_path,
        rate_limit=0.001,  # one, and the next in 1,000 s
    ) as service:
        given = [service.get("/jobs", headers={"X-Forwarded-For": f"10.0.0.{n}"}).status_code for n in range(3)]
        assert given == [200, 429, 429]
