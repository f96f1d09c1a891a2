"""The loss curve is a picture, whatever the numbers."""

from __future__ import annotations

import math
import threading
from pathlib import Path

import pytest

from jobs.events import JobFailed
from jobs.trainer_facts import Fault
from tests.sinks import story
from worker.feed import SinkFeed
from worker.sinks.curve import CurveSink, draw, settled

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    ("training", "validation"),
    [
        ([(1, 2.0)], {}),
        ([], {0: 2.0}),
        ([(step, math.exp(-step / 1e4)) for step in range(1, 50_001)], {0: 1.2, 25_000: 0.4, 50_000: 0.5}),
        ([(1, math.nan), (2, math.inf), (3, 1.0)], {0: math.nan}),
    ],
)
def test_draw(training: list[tuple[int, float]], validation: dict[int, float]) -> None:
    picture = draw("chef $100 $x^$", training, validation)
    assert picture.startswith(PNG)
    assert int.from_bytes(picture[16:20], "big") == 1000
    assert len(picture) < 200_000


def test_the_first_steps_do_not_take_the_scale() -> None:
    """1,000 steps that fall from 9 to 1 within the first twenty: the rest uses the height."""
    fallen = [(step, max(1.0, 9.0 - step) + 0.1 * (1 - step / 1000)) for step in range(1, 1001)]
    low, high = settled(fallen) or (0.0, 0.0)
    assert 0.98 < low < 1.0 and 1.095 < high < 1.12
    assert settled([(step, 5.0 - step / 250) for step in range(1, 1001)]) is None, "no step takes more than its share"
    assert settled([(1, 2.0)]) is None and settled([]) is None


def test_each_later_attempt_is_marked() -> None:
    points = [(step, 2.0 - step / 100) for step in range(1, 101)]
    assert len({draw("chef", points, {}), draw("chef", points, {}, [40]), draw("chef", points, {}, [40, 80])}) == 3


def test_drawing_from_two_threads() -> None:
    pictures: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: pictures.append(draw("chef", [(1, 2.0), (9, 1.0)], {0: 2.0}))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(pictures)) == 1


def test_a_job_with_nothing_to_show_leaves_no_picture(tmp_path: Path) -> None:
    run = story.submit(tmp_path)
    run.append([JobFailed(error=Fault(code="no_such_file", message="no"))])
    feed = SinkFeed(CurveSink(), run)
    feed.turn()
    assert feed.closed
    assert not (run.path / "loss.png").exists()
