"""kill -9 and damage in the middle of a run: the job ends with the weights of an undisturbed one, bit for bit (CPU)."""

from __future__ import annotations

import os
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import pytest
import requests

from jobs.disk.files import append_line
from jobs.events import Event, JobCancelRequested, JobPauseRequested
from jobs.state import Status
from jobs.trainer_facts import ModelLoaded
from tests.faults.conftest import (
    MakeJob,
    Undisturbed,
    assert_as_if_nothing_had_happened,
    finished,
    runs_again,
    small_job,
)
from tests.support.processes import (
    asked_at,
    end_within,
    evaluating,
    freeze,
    horse_of,
    loading,
    of_stack,
    saving,
    stepping,
    worker_of,
)
from tests.support.samples import facts_of, reasons
from tests.support.stack import ROLES, Stack

GONE_S = 60.0
"""Who dies with a parent is gone long before, however busy the machine; who does not, stays."""


def test_trainer_publish_and_service_killed_at_once(stack: Stack, undisturbed: Undisturbed) -> None:
    # Killed: trainer, publish and service after the checkpoint of step 4. Must hold: killed, one more attempt, no gap.
    run = stack.submit(small_job())
    trainer = freeze(stack, run, stepping(5, 15))
    os.kill(trainer, signal.SIGKILL)
    stack.kill("publish")
    stack.kill("service")
    stack.start("service", "publish")
    assert_as_if_nothing_had_happened(stack, run, undisturbed)
    assert reasons(run) == ["killed", "done"]


def test_a_trainer_killed_at_every_point_of_its_life(stack: Stack, undisturbed: Undisturbed, queued: MakeJob) -> None:
    # Killed: the trainer, while it loads; between steps; with a checkpoint half written; in an evaluation.
    # Must hold: each time the next attempt follows at once, from the newest checkpoint that is complete: the last that
    # was due (every 4 steps), or the one before, where the disk is slow and the last is still being written.
    run = queued()
    moments = (loading, stepping(5, 7), saving(12), evaluating(16))
    due = (None, 4, 8, 12)
    saved: int | None = None
    for attempt, (moment, step) in enumerate(zip(moments, due, strict=True), start=1):
        trainer = freeze(stack, run, moment)
        before, saved = saved, max((int(file.name[5:]) for file in run.checkpoints.glob("step-*")), default=None)
        assert saved in (step, before)
        assert not finished(run, attempt)
        os.kill(trainer, signal.SIGKILL)
        runs_again(stack, run, attempt + 1)
        loaded = [e.fact for e in run.events() if isinstance(e.fact, ModelLoaded) and e.attempt == attempt + 1]
        assert [fact.resumed_step for fact in loaded] == [saved]
    assert_as_if_nothing_had_happened(stack, run, undisturbed)
    assert reasons(run) == ["killed"] * 4 + ["done"]


def test_horse_parent_both_and_a_grace_period_too_short(
    stack: Stack, undisturbed: Undisturbed, queued: MakeJob
) -> None:
    # Killed at once, of four train workers: the horse; RQ's parent; both; and the fourth gets SIGTERM and, before its
    # trainer can save, SIGKILL. Must hold: nobody of theirs is left; once the workers are back, reconcile gives each
    # job to one of them.
    workers = ["train", "train-2", "train-3", "train-4"]
    stack.start(*workers[1:])
    runs = [queued() for _ in workers]
    with ThreadPoolExecutor() as pool:  # at once: while one is waited for, another could pass its moment
        trainers = list(pool.map(lambda run: freeze(stack, run, stepping(5, 15)), runs))
    parents = [worker_of(run) for run in runs]
    names = {stack.processes[worker].pid: worker for worker in workers}
    assert sorted(names[pid] for pid in parents) == sorted(workers)
    horses = [horse_of(pid) for pid in parents]

    def kill() -> None:
        for pid in (horses[0], parents[1], horses[2], parents[2]):
            os.kill(pid, signal.SIGKILL)
        os.kill(parents[3], signal.SIGTERM)
        os.kill(parents[3], signal.SIGKILL)

    end_within(GONE_S, [*trainers, *horses, *parents[1:]], kill)
    gone = [names[pid] for pid in parents[1:]]
    for worker in gone:
        stack.processes.pop(worker).wait()
    stack.start(*gone)
    for run in runs:
        assert_as_if_nothing_had_happened(stack, run, undisturbed)
        assert reasons(run) == ["worker_lost", "done"]
    for worker in workers[1:]:
        assert stack.stop(worker) == 0


def test_everything_killed_at_once(stack: Stack, undisturbed: Undisturbed, queued: MakeJob) -> None:
    # Killed: every process of every role and Redis, in the middle of a run, with another job waiting (a power cut).
    # Must hold: nobody is left; started again, unaided, the job runs on, then the one that waited.
    run = queued()
    freeze(stack, run, stepping(5, 15))
    behind = queued()
    family = of_stack(stack)
    assert len(family) >= len(ROLES) + 2, "every role, a horse and a trainer"

    def kill() -> None:
        stack.redis.stop()
        for process in stack.processes.values():
            process.kill()

    end_within(GONE_S, family, kill)
    for process in stack.processes.values():
        process.wait()
    assert of_stack(stack) == []
    assert run.record().status is Status.RUNNING
    stack.redis.start()
    stack.start(*ROLES)
    for each in (run, behind):
        assert_as_if_nothing_had_happened(stack, each, undisturbed)
    assert reasons(run) == ["worker_lost", "done"] and reasons(behind) == ["done"]


def damage(folder: Path) -> None:
    """One bit of its weights."""
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)


@pytest.mark.parametrize(("request_", "end"), [("cancel", "job.cancelled"), ("pause", "job.paused")])
def test_the_service_killed_between_an_event_and_its_answer(
    stack: Stack, request_: Literal["cancel", "pause"], end: str
) -> None:
    # Killed: the service, when the event is on disk and nobody has heard of it. Must hold: it takes effect.
    run = stack.submit(small_job(training={"epochs": 1000, "batch_size": 8, "learning_rate": 0.003}))
    stack.wait_for_event(run, "model.loaded")
    stack.kill("service")
    with run.locked() as events:
        asked = JobCancelRequested() if request_ == "cancel" else JobPauseRequested()
        append_line(run.events_file, Event(number=len(events) + 1, job=run.id, at=time.time(), attempt=1, fact=asked))
    stack.wait_for_event(run, end)
    assert reasons(run) == ["interrupted"]
    stack.start("service")
    assert stack.shown(run)["status"] == end.removeprefix("job.")


def test_every_checkpoint_damaged_while_paused(
    stack: Stack, undisturbed: Undisturbed, queued: MakeJob, tmp_path: Path
) -> None:
    # Damaged: one bit of each checkpoint, while the job rests after step 9. Must hold: it does not begin again at step
    # 0, but is paused, and says why, each time it is resumed; one of them is brought back: it resumes from that one.
    # Then the same once more, and the user has it begin from scratch: it begins at step 0, and with its trainer killed
    # after a checkpoint it resumes from that; metrics hold each step once.
    run = queued()
    asked_at(stack, run, "pause", stepping(9, 15))
    backup = shutil.copytree(run.checkpoints / "step-00000004", tmp_path / "backup")
    folders = sorted(run.checkpoints.glob("step-*"))
    assert len(folders) == 3
    for folder in folders:
        damage(folder)
    for _ in range(2):
        number = stack.post(run, "resume").json()["event_number"]
        stack.wait_for_event(run, "job.paused", after=number)
        shown = stack.shown(run)
        assert (shown["status"], shown["restarts"], shown["error"]["code"]) == ("paused", 0, "no_valid_checkpoint")
        assert all(f"{folder.name}: model.safetensors is damaged" in shown["error"]["message"] for folder in folders)
        assert sorted(run.checkpoints.iterdir()) == folders
    shutil.rmtree(folders[0])
    shutil.copytree(backup, folders[0])
    stack.post(run, "resume")
    asked_at(stack, run, "pause", stepping(9, 15))
    assert [loaded.resumed_step for loaded in facts_of(run, ModelLoaded)] == [None, 4]
    for folder in run.checkpoints.glob("step-*"):
        damage(folder)
    answer = requests.post(f"{stack.url}/jobs/{run.id}/resume", json={"from_scratch": True}, timeout=60).json()
    assert answer["status"] == "queued"
    stack.wait_for_event(run, "checkpoint.saved", after=answer["event_number"])
    trainer = freeze(stack, run, stepping(5, 15))
    os.kill(trainer, signal.SIGKILL)
    assert_as_if_nothing_had_happened(stack, run, undisturbed)
    *before, last = [loaded.resumed_step for loaded in facts_of(run, ModelLoaded)]
    assert before == [None, 4, None] and last in (4, 8, 12)
    assert reasons(run) == ["interrupted", *["no_valid_checkpoint"] * 2, "interrupted", "killed", "done"]


def test_newest_checkpoint_damaged_while_paused(stack: Stack, undisturbed: Undisturbed, queued: MakeJob) -> None:
    # Damaged: one bit of the newest checkpoint, while the job rests. Must hold: it is rejected, the one before is used.
    run = queued()
    asked_at(stack, run, "pause", stepping(5, 15))
    damage(max(run.checkpoints.glob("step-*")))
    stack.post(run, "resume")
    assert_as_if_nothing_had_happened(stack, run, undisturbed)
    assert [event.type for event in run.events()].count("checkpoint.rejected") == 1
