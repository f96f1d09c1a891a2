"""SIGTERM to every process, twice, too early and too late."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from jobs.attempt import Finished
from jobs.disk.rundir import RunDir
from jobs.redis.connection import connect
from jobs.redis.store import Store
from jobs.state import Status
from jobs.trainer_facts import ModelLoaded
from tests.faults.conftest import (
    MakeJob,
    Undisturbed,
    assert_as_if_nothing_had_happened,
    finished,
    losses,
    small_job,
)
from tests.support.processes import (
    alive,
    continue_once_asked,
    evaluating,
    freeze,
    horse_of,
    phase,
    saving,
    stepping,
    thaw,
    trainers,
)
from tests.support.samples import facts_of, reasons
from tests.support.shared_stack import succeeds
from tests.support.stack import ROOT, Stack
from worker.training.checkpoints.checkpoint import verify

OVERFITS = {
    "data": {"train": "rows.jsonl", "validation": "unseen.jsonl", "max_input_tokens": 48, "max_target_tokens": 32},
    "training": {"epochs": 2, "batch_size": 8, "learning_rate": 0.01, "lr_scheduler": "constant"},
}
"""No validation target has a word of the training's: their loss only rises, and the best model is the first saved."""


def test_a_worker_is_stopped_twice_in_the_middle_of_a_background_save(
    stack: Stack, undisturbed: Undisturbed, queued: MakeJob
) -> None:
    # SIGTERM to the train worker, and once more (impatience), while its trainer writes the checkpoint of step 8, with
    # another job waiting. Must hold: the trainer completes that save and makes its last; the worker ends with 0; the
    # job is queued at its old place, before the other; started again, it resumes from where it stopped.
    run, behind = queued(), queued()
    trainer = freeze(stack, run, saving(8))
    worker = stack.processes.pop("train")
    for _ in range(2):
        worker.send_signal(signal.SIGTERM)
    continue_once_asked(stack, trainer)
    assert worker.wait(300) == 0
    record = run.record()
    assert (record.status, record.last_reason) == (Status.QUEUED, "interrupted")
    saved = {folder.name: verify(folder).step for folder in run.checkpoints.iterdir()}
    assert "step-00000008" in saved and record.progress_step == max(saved.values()) >= 8
    store = Store(connect(stack.redis.url))
    stack.wait_for(lambda: store.get(run.id).position == 0 or None, "its old place")
    assert store.get(behind.id).position == 1
    stack.start("train")
    for each in (run, behind):
        assert_as_if_nothing_had_happened(stack, each, undisturbed)
    assert reasons(run) == ["interrupted", "done"]
    assert [loaded.resumed_step for loaded in facts_of(run, ModelLoaded)] == [None, record.progress_step]


def test_the_trainer_publish_and_the_service_are_stopped(
    stack: Stack, undisturbed: Undisturbed, queued: MakeJob
) -> None:
    # SIGTERM to publish and to the service in the middle of a run, then to the trainer alone. Must hold: each ends in
    # good order; the job is queued and continues by itself; the sinks that were away hear everything.
    run = queued()
    trainer = freeze(stack, run, stepping(5, 14))
    assert stack.stop("publish") == 0
    assert stack.stop("service") in (0, -signal.SIGTERM)  # uvicorn closes everything, then ends by the signal it got
    assert "Application shutdown complete" in (stack.home / "service.log").read_text().splitlines()[-2]
    os.kill(trainer, signal.SIGTERM)
    thaw(trainer)
    stack.start("publish", "service")
    assert_as_if_nothing_had_happened(stack, run, undisturbed)
    assert reasons(run) == ["interrupted", "done"]
    cursor = run.sinks / "log.json"
    stack.wait_for(lambda: '"closed":"job.succeeded"' in cursor.read_text() or None, "the log sink's last event")


def test_a_job_is_paused_in_an_evaluation(stack: Stack, undisturbed: Undisturbed, queued: MakeJob) -> None:
    # POST pause in the middle of the evaluation of step 8, whose weights are the best of the run. Must hold: resumed,
    # it makes that evaluation first, and delivers that very step, as the same job does when nobody pauses it.
    twin, run = (stack.submit(small_job(**OVERFITS)) for _ in range(2))
    succeeds(stack, twin)
    assert twin.record().result_step == 8, losses(twin)
    # It stands before the samples are generated: between here and the end of the evaluation it looks for a request.
    trainer = freeze(stack, run, lambda run: evaluating(8)(run) and phase(run) == "evaluate")
    assert stack.post(run, "pause").json()["requested"] == "pause"
    continue_once_asked(stack, trainer)
    stack.wait_for(lambda: run.record().status is Status.PAUSED or None, "the pause")
    assert 8 not in losses(run) and run.record().progress_step == 8
    paused = run.record().number
    assert stack.post(run, "resume").status_code == 200
    assert_as_if_nothing_had_happened(stack, run, Undisturbed.of(twin))
    assert run.record().result_step == 8 and run.record().result_loss == twin.record().result_loss
    types = [event.type for event in run.events(after=paused) if event.type.startswith(("evaluation", "checkpoint"))]
    assert types[:2] == ["evaluation.finished", "checkpoint.saved"]


@pytest.mark.parametrize("stage", ["check", "prepare"])
def test_a_worker_is_stopped_while_a_job_is_validated(stack: Stack, stage: str) -> None:
    # SIGTERM to the check or prepare worker while its process is at work. Must hold: it ends with 0, the process is
    # gone, the job is still being validated, and continues as soon as the worker is back.
    run = stack.submit(small_job(name=stage))
    process = freeze(stack, run, lambda run: run.attempt_file(stage).exists() and not ended(run, stage))
    worker = stack.processes.pop(stage)
    horse = horse_of(worker.pid)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(300) == 0
    assert trainers(run) == [] and not any(map(alive, (process, horse)))
    record = run.record()
    assert (record.status, record.stage.value) == (Status.VALIDATING, stage)
    stack.start(stage)
    stack.wait_for_event(run, "job.queued")
    assert stack.post(run, "cancel").status_code == 200
    stack.wait_for_event(run, "job.cancelled")


def ended(run: RunDir, stage: str) -> bool:
    """Whether the process of that stage has said its last line."""
    return any(isinstance(line, Finished) for line in run.attempt_lines(stage))


def test_a_second_trainer_started_by_hand_leaves_the_first_alone(
    stack: Stack, undisturbed: Undisturbed, queued: MakeJob
) -> None:
    # `python -m worker.training train RUN_DIR` by hand, while the job runs. Must hold: it ends with 75 and says
    # job_busy; it writes into none of the first one's files; the run is as if nothing had happened.
    run = queued()
    trainer = freeze(stack, run, stepping(5, 15))
    before = run.attempt_file(1).read_bytes()
    by_hand = subprocess.run(
        [sys.executable, "-m", "worker.training", "train", str(run.path)],
        cwd=ROOT, env=stack.environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert by_hand.returncode == 75 and "job_busy" in by_hand.stderr
    assert run.attempt_file(1).read_bytes() == before and not finished(run, 1)
    assert trainers(run) == [trainer]
    thaw(trainer)
    assert_as_if_nothing_had_happened(stack, run, undisturbed)
    assert reasons(run) == ["done"]
