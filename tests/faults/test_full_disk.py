"""The disk fills up. Whole lines or none; what could not be written is said by its name, not as a crash."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import requests

from jobs.attempt import Heartbeat
from jobs.disk.files import append_line
from jobs.events import JobFailed
from tests.support.machine import longest_file
from tests.support.samples import read_lines
from tests.support.shared_stack import shared_stack, stop
from tests.support.stack import Stack, tiny_job


def test_a_line_for_which_there_is_no_room_is_not_lost_in_silence(tmp_path: Path) -> None:
    # The disk is full in the middle of a line. Must hold: the writer is told, and the file ends with a whole line.
    file = tmp_path / "lines.jsonl"
    append_line(file, Heartbeat(at=1.0, phase="step", step=1))
    with longest_file(file.stat().st_size + 10), pytest.raises(OSError):
        append_line(file, Heartbeat(at=2.0, phase="step", step=2))
    append_line(file, Heartbeat(at=3.0, phase="step", step=3))
    assert [row.step for row in read_lines(file, Heartbeat)] == [1, 3]


@dataclass(frozen=True)
class SmallDisk:
    """A tmpfs mounted at `folder`, and what fills it."""

    folder: Path

    def mount(self, *words: str) -> bool:
        """Whether that could be done."""
        command = ["mount", *words, os.fspath(self.folder)]
        return os.geteuid() == 0 and subprocess.run(command, capture_output=True, check=False).returncode == 0

    def fill(self) -> None:
        """To the last byte."""
        with open(self.folder / ".filler", "ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 16))

    def free(self) -> None:
        """As before."""
        self.mount("-o", "remount,rw")
        (self.folder / ".filler").unlink(missing_ok=True)


@pytest.fixture(scope="module")
def _stack_and_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, SmallDisk]]:
    home = tmp_path_factory.mktemp("full")
    disk = SmallDisk(home / "home" / "runs")
    disk.folder.mkdir(parents=True)
    if not disk.mount("-t", "tmpfs", "-o", "size=64m", "tmpfs"):
        pytest.skip("a small disk of its own needs root (mount)")
    try:
        with shared_stack(home) as stack:
            yield stack, disk
    finally:
        subprocess.run(["umount", "-l", os.fspath(disk.folder)], check=True)


@pytest.fixture
def disk(_stack_and_disk: tuple[Stack, SmallDisk]) -> SmallDisk:
    """With room."""
    _stack_and_disk[1].free()
    return _stack_and_disk[1]


@pytest.fixture
def stack(_stack_and_disk: tuple[Stack, SmallDisk], disk: SmallDisk) -> Stack:
    """Its runs are on the small disk; the service runs."""
    _stack_and_disk[0].start_if_gone("service")
    return _stack_and_disk[0]


def ready(stack: Stack) -> tuple[int, str | None]:
    """Status of GET /health/ready, and what it names."""
    answer = requests.get(f"{stack.url}/health/ready", timeout=60)
    return answer.status_code, answer.json().get("error", {}).get("param")


def test_a_post_to_a_full_disk_is_refused_and_can_be_repeated(stack: Stack, disk: SmallDisk) -> None:
    # Must hold: 503 that names the disk, no half directory; the same Idempotency-Key makes the job once there is room.
    before = sorted(stack.runs.glob("*job-*"))
    disk.fill()
    key = {"Idempotency-Key": "full"}
    answer = requests.post(f"{stack.url}/jobs", json=tiny_job(), headers=key, timeout=60)
    assert ready(stack) == (503, "runs"), "as POST answers"
    assert sorted(stack.runs.glob("*job-*")) == before
    disk.free()
    assert ready(stack) == (200, None)
    run = stack.submit(tiny_job(), **key)
    assert next(event.type for event in run.events()) == "job.submitted"
    assert stack.post(run, "cancel").status_code == 200
    assert (answer.status_code, "disk" in answer.text or "space" in answer.text) == (503, True), answer.text


def test_a_disk_that_turned_read_only_is_no_full_one(stack: Stack, disk: SmallDisk) -> None:
    # As after an I/O error. Must hold: what is ready, and what a POST is told, agree, and the hint is the right one.
    stop(stack, "check", "prepare", "train", "publish")  # some hold a file open for writing
    assert disk.mount("-o", "remount,ro")
    answer = requests.post(f"{stack.url}/jobs", json=tiny_job(), timeout=60)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_permitted")
    assert ready(stack) == (503, "runs")


def test_a_disk_that_is_full_during_prepare_is_named(stack: Stack, disk: SmallDisk) -> None:
    # Filled after check. Must hold: the job fails with disk_full, not with a crash.
    stack.start_if_gone("check", "publish")
    stop(stack, "prepare")
    run = stack.submit(tiny_job())
    stack.wait_for_event(run, "job.checked")
    disk.fill()
    stack.start("prepare")
    failed = stack.wait_for_event(run, "job.failed", "job.prepared").fact
    assert isinstance(failed, JobFailed)
    assert failed.error.code == "disk_full", failed.error


def test_a_cancel_on_a_full_disk_is_obeyed_or_refused(stack: Stack, disk: SmallDisk) -> None:
    # Filled while the job trains. Must hold: what the answer says is what is on disk, and with room it is cancelled.
    stack.start_if_gone("check", "prepare", "train", "publish")
    run = stack.submit(tiny_job(training={"epochs": 1000, "batch_size": 8, "learning_rate": 0.003}))
    stack.wait_for_event(run, "model.loaded")
    disk.fill()
    answer = stack.post(run, "cancel")
    noted = "job.cancel_requested" in [event.type for event in run.events()]
    assert (answer.status_code, noted) in ((200, True), (503, False)), answer.text
    disk.free()
    assert stack.post(run, "cancel").status_code == 200
    stack.wait_for_event(run, "job.cancelled")
