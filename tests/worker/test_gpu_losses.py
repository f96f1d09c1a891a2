"""A worker that loses its GPU again and again leaves it alone for longer and longer."""

from __future__ import annotations

from pathlib import Path

from worker.gpu import STEADY_S, WAITS_S, GpuLosses

NOON = 1_800_014_400.0
"""12:00:00 UTC of some day."""


def test_from_the_third_end_in_a_row_the_next_worker_waits(tmp_path: Path) -> None:
    now = NOON

    def worker() -> GpuLosses:
        return GpuLosses(tmp_path, lambda: now)

    for ends, wait_s in enumerate((*WAITS_S, WAITS_S[-1]), 1):
        worker().add("GPU-a")
        said = worker().pause("GPU-a")
        assert (said is not None) == (wait_s > 0)
        assert said is None or (f"lost {ends} times in a row" in said and said.endswith(" UTC"))
        assert worker().pause("GPU-b") is None
        now += wait_s
        assert worker().pause("GPU-a") is None


def test_a_worker_that_had_it_for_long_begins_a_new_count(tmp_path: Path) -> None:
    now = NOON
    for _ in range(4):
        GpuLosses(tmp_path, lambda: now).add("GPU-a")
    worker = GpuLosses(tmp_path, lambda: now)
    assert worker.pause("GPU-a") == (
        "the GPU was lost 4 times in a row; it is there again, and no job is taken until 12:02:00 UTC"
    )
    now += WAITS_S[3]
    assert worker.pause("GPU-a") is None
    now += STEADY_S + 1
    worker.add("GPU-a")
    assert GpuLosses(tmp_path, lambda: now).pause("GPU-a") is None


def test_what_cannot_be_read_keeps_nobody_waiting(tmp_path: Path) -> None:
    for _ in range(4):
        GpuLosses(tmp_path, lambda: NOON).add("GPU-a")
    assert GpuLosses(tmp_path, lambda: NOON - 1).pause("GPU-a") is None  # a clock that was set back
    [file] = (tmp_path / ".locks").glob("*.lost")
    file.write_text("{")
    assert GpuLosses(tmp_path, lambda: NOON).pause("GPU-a") is None
