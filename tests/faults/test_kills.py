"""kill -9 and damage in the middle of a run: the job ends with the weights of an undisturbed one, bit for bit (CPU)."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.rundir import RunDir
from jobs.state import Status
from tests.conftest import ROWS
from tests.stack import Stack, tiny_job


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    home = tmp_path_factory.mktemp("kills")
    lines = ROWS.read_text().splitlines(keepends=True)
    (home / "rows.jsonl").write_text("".join(lines[:64]))
    (home / "held_out.jsonl").write_text("".join(lines[64:76]))
    with Stack(home / "home", data=home) as stack:
        stack.start("service", "check", "prepare", "train", "publish")
        yield stack


@pytest.fixture(scope="module")
def undisturbed(stack: Stack) -> bytes:
    """The final weights of this job when nothing happens to it."""
    run = stack.submit(job())
    assert stack.wait_for_event(run, "job.succeeded", "job.failed").type == "job.succeeded"
    return (run.model / "model.safetensors").read_bytes()


def job() -> dict[str, object]:
    return tiny_job(log={"every_steps": 1}, checkpoint={"every_steps": 4, "keep": 3})


def trainers(run: RunDir) -> list[int]:
    """Pids of the trainer processes of a run."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"worker.training" in words and os.fsencode(run.path) in words:
                found.append(int(folder.name))
    return found


def assert_as_if_nothing_had_happened(stack: Stack, run: RunDir, undisturbed: bytes) -> None:
    ended = stack.wait_for_event(run, "job.succeeded", "job.failed")
    assert ended.type == "job.succeeded"
    assert [event.number for event in run.events()] == list(range(1, ended.number + 1))
    assert [row.step for row in run.metrics()] == list(range(1, 17))
    assert (run.model / "model.safetensors").read_bytes() == undisturbed
    assert trainers(run) == []


def test_trainer_publish_and_service_killed_at_once(stack: Stack, undisturbed: bytes) -> None:
    # Killed: trainer, publish and service after the checkpoint of step 4. Must hold: crash, one more attempt, no gap.
    run = stack.submit(job())
    stack.wait_for_event(run, "checkpoint.saved")
    [trainer] = trainers(run)
    os.kill(trainer, signal.SIGKILL)
    stack.kill("publish")
    stack.kill("service")
    stack.start("service", "publish")
    assert_as_if_nothing_had_happened(stack, run, undisturbed)
    reasons = [getattr(event.fact, "reason", None) for event in run.events() if event.type == "attempt.ended"]
    assert reasons == ["crash", "done"]


def test_newest_checkpoint_damaged_while_paused(stack: Stack, undisturbed: bytes) -> None:
    # Damaged: one bit of the newest checkpoint, while the job rests. Must hold: it is rejected, the one before is used.
    run = stack.submit(job())
    stack.wait_for_event(run, "checkpoint.saved")
    stack.post(run, "pause")
    stack.wait_for(lambda: run.record().status is Status.PAUSED or None, "the pause")
    weights = max(run.checkpoints.glob("step-*")) / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    stack.post(run, "resume")
    assert_as_if_nothing_had_happened(stack, run, undisturbed)
    assert [event.type for event in run.events()].count("checkpoint.rejected") == 1
