"""kill -9 and damage in the middle of a run: the job ends with the weights of an undisturbed one, bit for bit (CPU)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from jobs.rundir import RunDir
from jobs.state import Status
from tests.faults.conftest import (
    Undisturbed,
    assert_as_if_nothing_had_happened,
    finished,
    reasons,
    runs_again,
    small_job,
)
from tests.processes import (
    end_within,
    evaluating,
    freeze,
    loading,
    of_stack,
    parent_of,
    saving,
    stepping,
)
from tests.stack import ROLES, Stack

GONE_S = 5.0
"""Within which nobody may be left of those whose parent was killed."""
MakeJob = Callable[..., RunDir]


def test_trainer_publish_and_service_killed_at_once(stack: Stack, undisturbed: Undisturbed) -> None:
    # Killed: trainer, publish and service after the checkpoint of step 4. Must hold: crash, one more attempt, no gap.
    run = stack.submit(small_job())
    trainer = freeze(stack, run, stepping(5, 15))
    os.kill(trainer, signal.SIGKILL)
    stack.kill("publish")
    stack.kill("service")
    stack.start("service", "publish")
    assert_as_if_nothing_had_happened(stack, run, undisturbed)
    assert reasons(run) == ["crash", "done"]


def test_a_trainer_killed_at_every_point_of_its_life(stack: Stack, undisturbed: Undisturbed, queued: MakeJob) -> None:
    # Killed: the trainer, while it loads; between steps; with a checkpoint half written; in an evaluation.
    # Must hold: each time the next attempt follows at once, and repeats no more than one save interval (4 steps).
    run = queued()
    moments = (loading, stepping(5, 7), saving(12), evaluating(16))
    resumed = (None, 4, 8, 12)
    for attempt, (moment, step) in enumerate(zip(moments, resumed, strict=True), start=1):
        trainer = freeze(stack, run, moment)
        assert not finished(run, attempt)
        killed_at = time.time()
        took = end_within(GONE_S, [trainer], lambda pid=trainer: os.kill(pid, signal.SIGKILL))
        again = runs_again(stack, run, attempt + 1, killed_at)
        print(
            f"trainer killed ({getattr(moment, '__qualname__', moment)}): gone {took:.2f} s, again {again:.1f} s later"
        )
        loaded = [e.fact for e in run.events() if e.type == "model.loaded" and e.attempt == attempt + 1]
        assert [fact.resumed_step for fact in loaded] == [step]
    assert_as_if_nothing_had_happened(stack, run, undisturbed)
    assert reasons(run) == ["crash"] * 4 + ["done"]


def test_horse_parent_both_and_a_grace_period_too_short(
    stack: Stack, undisturbed: Undisturbed, queued: MakeJob
) -> None:
    # Killed at once, of four train workers: the horse; RQ's parent; both; and the fourth gets SIGTERM and, before its
    # trainer can save, SIGKILL. Must hold: no process of theirs left after 5 s; once the workers are back, reconcile
    # gives each job to one of them within 90 s.
    workers = ["train", "train-2", "train-3", "train-4"]
    stack.start(*workers[1:])
    runs = [queued() for _ in workers]
    names = {stack.processes[worker].pid: worker for worker in workers}
    trainer_of = {run.id: freeze(stack, run, stepping(5, 15)) for run in runs}
    horse_of = {job: parent_of(trainer) for job, trainer in trainer_of.items()}
    parent_of_job = {job: parent_of(horse) for job, horse in horse_of.items()}
    assert sorted(names[pid] for pid in parent_of_job.values()) == sorted(workers)
    horse_lost, parent_lost, both_lost, stopped = (run.id for run in runs)

    def kill() -> None:
        os.kill(horse_of[horse_lost], signal.SIGKILL)
        os.kill(parent_of_job[parent_lost], signal.SIGKILL)
        os.kill(horse_of[both_lost], signal.SIGKILL)
        os.kill(parent_of_job[both_lost], signal.SIGKILL)
        os.kill(parent_of_job[stopped], signal.SIGTERM)
        os.kill(parent_of_job[stopped], signal.SIGKILL)

    victims = [*trainer_of.values(), *horse_of.values()]
    victims += [pid for job, pid in parent_of_job.items() if job != horse_lost]
    took = end_within(GONE_S, victims, kill)
    gone = [names[parent_of_job[job]] for job in (parent_lost, both_lost, stopped)]
    for worker in gone:
        stack.processes.pop(worker).wait()
    stack.start(*gone)
    back_at = time.time()
    for what, run in zip(("horse", "parent", "both", "SIGTERM and SIGKILL"), runs, strict=True):
        print(f"{what}: gone after {took:.2f} s, again {runs_again(stack, run, 2, back_at):.1f} s after the workers")
    for run in runs:
        assert_as_if_nothing_had_happened(stack, run, undisturbed)
        assert reasons(run) == ["lost", "done"]
    for worker in workers[1:]:
        assert stack.stop(worker) == 0


def test_everything_killed_at_once(stack: Stack, undisturbed: Undisturbed, queued: MakeJob) -> None:
    # Killed: every process of every role and Redis, in the middle of a run, with another job waiting (a power cut).
    # Must hold: nobody left after 5 s; started again, unaided, the job runs on within 90 s, then the one that waited.
    run = queued()
    freeze(stack, run, stepping(5, 15))
    behind = queued()
    family = of_stack(stack)
    assert len(family) >= len(ROLES) + 2, "every role, a horse and a trainer"

    def kill() -> None:
        stack.redis.stop()
        for process in stack.processes.values():
            process.kill()

    took = end_within(GONE_S, family, kill)
    for process in stack.processes.values():
        process.wait()
    assert of_stack(stack) == []
    assert run.record().status is Status.RUNNING
    back_at = time.time()
    stack.redis.start()
    stack.start(*ROLES)
    again = runs_again(stack, run, 2, back_at)
    print(f"everything: gone after {took:.2f} s, running again {again:.1f} s after the start")
    for each in (run, behind):
        assert_as_if_nothing_had_happened(stack, each, undisturbed)
    assert reasons(run) == ["lost", "done"] and reasons(behind) == ["done"]


def test_newest_checkpoint_damaged_while_paused(stack: Stack, undisturbed: Undisturbed, queued: MakeJob) -> None:
    # Damaged: one bit of the newest checkpoint, while the job rests. Must hold: it is rejected, the one before is used.
    run = queued()
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
