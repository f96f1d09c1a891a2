"""What becomes of a job when an attempt ends: the policy of docs/architecture.md, case by case."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jobs.attempt import Finished, Heartbeat, Noted, TrainResult
from jobs.disk.files import append_line
from jobs.disk.rundir import RunDir, create
from jobs.errors import Conflict, Superseded
from jobs.events import (
    Adopted,
    AnyFact,
    AttemptEnded,
    AttemptStarted,
    JobCancelled,
    JobCancelRequested,
    JobPaused,
    JobPauseRequested,
    JobQueued,
    JobResumed,
    JobSubmitted,
    JobSucceeded,
    TaskStarted,
    TaskSubmitted,
    TaskWaiting,
)
from jobs.reasons import RESTART_DELAYS_S, Reason
from jobs.spec import parse_spec
from jobs.state import Requested, Stage
from jobs.trainer_facts import CheckpointSaved, DeviceWaiting, EvaluationFinished, Fault, ModelLoaded
from tests.support.samples import STARTED, checked, facts_of, metric_row, prepared
from worker.ending import ending
from worker.supervise import stage_outcome

SPEC = parse_spec({"data": {"train": "rows.jsonl"}})

REQUESTS: dict[str, AnyFact] = {"pause": JobPauseRequested(), "cancel": JobCancelRequested()}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A job whose first attempt is running."""
    first = JobSubmitted(name="n", model="m", spec_sha256=SPEC.sha256(), max_restarts=2)
    run, _ = create(tmp_path, "job-1", SPEC, first)
    run.append([checked(), prepared(9), JobQueued(), STARTED.model_copy(update={"engine": "cluster"})])
    return run


def end(run: RunDir, reason: str, **more: object) -> list[AnyFact]:
    """End the open attempt; the facts that were written."""
    found = Finished.model_validate({"at": 1.0, "reason": reason, **more})
    _, new = run.append(lambda record: ending(run, record, record.attempt, found))
    return [event.fact for event in new]


def types(facts: list[AnyFact]) -> list[str]:
    return [fact.type for fact in facts]


def test_what_is_lost_is_counted_from_all_that_is_known_of_the_trainer(run: RunDir) -> None:
    # It is killed 70 steps after its checkpoint. Its last heartbeat is of step 568, its last row of metrics of 570.
    for line in (
        Noted(at=1.0, fact=CheckpointSaved(step=500, path="checkpoints/step-00000500", bytes=1, seconds=1.0)),
        Heartbeat(at=2.0, phase="step", step=568),
    ):
        append_line(run.attempt_file(1), line)
    append_line(run.metrics_file, metric_row(570))
    *_, ended, _ = end(run, "worker_lost", step=0)
    assert isinstance(ended, AttemptEnded)
    assert (ended.step, ended.checkpoint_step, ended.steps_lost) == (570, 500, 70)
    assert ended.where == "at step 570 (the newest checkpoint is that of step 500: 70 steps are lost)"
    # The next one dies while it loads: the row of the one before is not its own.
    run.append([STARTED])
    *_, ended, _ = end(run, "crash")
    assert isinstance(ended, AttemptEnded)
    assert (ended.step, ended.checkpoint_step, ended.where) == (0, 500, "at step 0")


@pytest.mark.parametrize(
    ("step", "checkpoint_step", "reason", "where"),
    [
        (9, 0, "crash", "at step 9 (there is no checkpoint yet: 9 steps are lost)"),
        (9, 8, "crash", "at step 9 (the newest checkpoint is that of step 8: 1 step is lost)"),
        (9, 9, "interrupted", "at step 9"),
        (9, 8, "done", "at step 9"),
        (9, None, "crash", "at step 9"),
    ],
)
def test_where_an_attempt_ended_is_said_in_words(
    step: int, checkpoint_step: int | None, reason: Reason, where: str
) -> None:
    assert AttemptEnded(reason=reason, step=step, checkpoint_step=checkpoint_step).where == where


@pytest.mark.parametrize("reason", ["disk_full", "import_failed"])
def test_what_a_person_can_mend_pauses_the_job_at_once_and_says_how_to_resume_it(run: RunDir, reason: Reason) -> None:
    *_, paused = end(run, reason, error={"code": "x", "message": "it is not there", "hint": "install it"})
    assert isinstance(paused, JobPaused) and paused.error is not None
    assert paused.error.hint == "install it; then `longhaul resume job-1`"


@pytest.mark.parametrize("reason", ["interrupted", "worker_lost", "device_busy", "oom_in_optimizer"])
def test_what_is_nobodys_fault_is_not_counted(run: RunDir, reason: Reason) -> None:
    for _ in range(4):
        assert types(end(run, reason)) == ["attempt.ended", "job.queued"]
        run.append([STARTED])
    assert run.record().restarts == 0


def test_an_engine_that_takes_no_task_is_asked_ever_more_seldom_and_nothing_is_counted(run: RunDir) -> None:
    fault = Fault.of(Reason.NOT_SUBMITTED, ": sbatch: Invalid account")
    delays = []
    for _ in range(9):
        ended, queued, waiting = end(run, "not_submitted", error=fault.model_dump())
        assert isinstance(ended, AttemptEnded) and ended.error == fault
        assert isinstance(queued, JobQueued) and isinstance(waiting, TaskWaiting)
        delays.append(queued.not_before_s)
        record = run.record()
        assert record.waiting_reason == f"it waits on the engine cluster: {fault.message}" and record.restarts == 0
        run.append([STARTED.model_copy(update={"engine": "cluster"})])
    assert delays == [30, 60, 120, 240, 480, 960, 1920, 3600, 3600]
    run.append([JobPauseRequested()])
    end(run, "interrupted")
    run.append([JobResumed(), STARTED.model_copy(update={"engine": "cluster"})])
    assert [fact.not_before_s for fact in end(run, "not_submitted") if isinstance(fact, JobQueued)] == [30]


def test_a_host_whose_memory_others_have_is_asked_ever_more_seldom_and_nothing_is_counted(run: RunDir) -> None:
    end(run, "interrupted")
    run.append([STARTED])
    delays = []
    for _ in range(6):
        ended, queued, waiting = end(run, "host_memory_in_use")
        assert isinstance(ended, AttemptEnded) and isinstance(queued, JobQueued)
        assert (
            isinstance(waiting, DeviceWaiting)
            and waiting.memory_of_host
            and run.record().waiting_reason == waiting.message
        )
        delays.append(queued.not_before_s)
        run.append([STARTED])
        assert run.record().waiting_reason is None
    assert delays == [60, 120, 240, 300, 300, 300] and run.record().restarts == 0


@pytest.mark.parametrize("reason", ["interrupted", "worker_lost"])
def test_what_an_engine_takes_away_again_and_again_is_handed_over_ever_more_seldom(run: RunDir, reason: str) -> None:
    started = STARTED.model_copy(update={"engine": "cluster"})
    saved = CheckpointSaved(step=3, path="checkpoints/step-00000003", bytes=1, seconds=1.0)
    delays = []
    for attempt in range(7):
        if attempt == 3:
            run.append([saved], attempt=run.record().attempt)
        queued = end(run, reason)[1]
        assert isinstance(queued, JobQueued)
        delays.append(queued.not_before_s)
        if attempt == 1:
            assert "(2 attempts in a row made no progress)" in (run.record().waiting_reason or "")
        run.append([started])
    assert delays == [0, 30, 60, 0, 0, 30, 60] and run.record().restarts == 0


def test_the_time_in_an_engines_queue_is_no_training(run: RunDir) -> None:
    assert run.record().attempt_started_at is None
    assert run.record().training_s == 0
    end(run, "not_submitted")
    assert run.record().training_s == 0
    run.append([STARTED.model_copy(update={"engine": "cluster"})])
    run.append([TaskStarted(task="7", node="node-1"), TaskWaiting(task="7", message="SUSPENDED")])
    begun = run.record().attempt_started_at
    run.append([TaskStarted(task="7", node="node-1")])
    assert begun is not None and run.record().attempt_started_at == begun
    result = {"model": "model", "loss": None, "first_loss": None, "step": 9}
    finished = Finished.model_validate({"at": begun + 5, "reason": "done", "step": 9, "result": result})
    last = ending(run, run.record(), 2, finished)[-1]
    assert isinstance(last, JobSucceeded) and last.seconds == 5


def test_a_job_that_runs_tells_why_its_task_waits(run: RunDir) -> None:
    run.append([TaskSubmitted(engine="cluster", task="7")])
    record = run.record()
    assert (record.task, record.waiting_reason) == ("7", "it waits in the queue of the engine cluster, as task 7")
    run.append([TaskWaiting(task="7", message="PENDING (Priority)")])
    assert run.record().waiting_reason == "it waits on the engine cluster: PENDING (Priority)"
    run.append([TaskStarted(task="7", node="node-1")])
    assert run.record().waiting_reason is None
    end(run, "interrupted")
    with pytest.raises(Conflict):
        run.append([TaskStarted(task="7", node="node-1")])


def test_a_lost_gpu_is_not_counted_and_the_queued_job_says_why_it_waits(run: RunDir) -> None:
    fault = Fault(code="gpu_lost", message="the GPU was lost: nvidia-smi says no", hint="run nvidia-smi on the host")
    for _ in range(4):
        assert types(end(run, "gpu_lost", error=fault.model_dump())) == [
            "attempt.ended",
            "job.queued",
            "device.waiting",
        ]
        record = run.record()
        assert (record.waiting_reason, record.restarts, record.not_before) == (fault.message, 0, 0)
        run.append([STARTED])
    assert run.record().waiting_reason is None


def test_what_is_not_prepared_any_more_is_prepared_again_once(run: RunDir) -> None:
    """What an attempt has loaded since starts over, and so does whoever resumes it."""
    fault = Fault(code="not_prepared", message="model: the prepared model /models/1 has no readable config.json")
    again: list[AnyFact] = [prepared(9), JobQueued()]
    loaded = ModelLoaded(parameters=1, parameter_bytes=2, dtype="bfloat16", device="cpu", seconds=1.0, peak_ratio=1.0)
    for before in ([], [loaded]):
        run.append(before, attempt=run.record().attempt)
        assert types(end(run, "not_prepared", error=fault.model_dump())) == ["attempt.ended", "job.unprepared"]
        record = run.record()
        assert (record.status.value, record.stage.value, record.restarts) == ("validating", "prepare", 0)
        run.append([*again, STARTED])
    for _ in range(2):
        assert types(end(run, "not_prepared", error=fault.model_dump())) == ["attempt.ended", "job.paused"]
        assert run.record().error == fault
        run.append([JobResumed(), STARTED])
        assert types(end(run, "not_prepared", error=fault.model_dump())) == ["attempt.ended", "job.unprepared"]
        run.append([*again, STARTED])


def test_a_job_that_has_trained_is_paused_when_it_cannot_be_prepared_again(run: RunDir) -> None:
    end(run, "not_prepared")
    fault = Fault(code="dataset_missing", message="there is no uploaded data set", hint="upload it")
    finished = Finished(at=1.0, reason="bad_data", error=fault)
    record, _ = run.append(lambda now: stage_outcome(run, now, Stage.PREPARE, finished))
    assert (record.status.value, record.stage.value) == ("paused", "train")
    assert record.error == fault.model_copy(update={"hint": "upload it; then `longhaul resume job-1`"})
    assert run.append([JobResumed()])[0].status.value == "queued"


@pytest.mark.parametrize("stage", [Stage.CHECK, Stage.PREPARE])
def test_a_job_whose_attempts_a_repair_has_cut_off_has_trained(run: RunDir, stage: Stage) -> None:
    append_line(run.attempt_file(1), Finished(at=1.0, reason="interrupted"))
    lines = run.events_file.read_bytes().splitlines(keepends=True)
    run.events_file.write_bytes(b"".join(lines[: 1 if stage is Stage.CHECK else 2]))
    finished = Finished(at=2.0, reason="bad_data", error=Fault(code="no_such_file", message="it is gone"))
    assert run.record().stage is stage
    record, _ = run.append(lambda now: stage_outcome(run, now, stage, finished))
    assert (record.status.value, record.stage.value) == ("paused", "train")
    assert run.append([JobResumed(), STARTED])[0].status.value == "running"


def test_memory_that_ran_out_in_the_optimizer_is_tried_one_rung_lower_at_once(run: RunDir) -> None:
    """Until the trainer says that there is none: the reason is another one then, and final."""
    fault = Fault(code="oom_in_optimizer", message="memory ran out in the optimizer at step 3")
    facts = end(run, "oom_in_optimizer", error=fault.model_dump(), step=2)
    assert types(facts) == ["attempt.ended", "job.queued"]
    assert isinstance(facts[0], AttemptEnded) and (facts[0].reason, facts[0].error) == ("oom_in_optimizer", fault)
    assert isinstance(facts[1], JobQueued) and facts[1].not_before_s == 0
    run.append([STARTED])
    assert types(end(run, "out_of_memory")) == ["attempt.ended", "job.failed"]


@pytest.mark.parametrize("reason", ["crash", "stalled", "host_out_of_memory"])
def test_crashes_are_retried_with_growing_delays_then_given_up(run: RunDir, reason: Reason) -> None:
    for count in (1, 2):
        facts = end(run, reason)
        assert isinstance(facts[-1], JobQueued) and facts[-1].not_before_s == RESTART_DELAYS_S[count - 1]
        run.append([STARTED])
    assert types(end(run, reason)) == ["attempt.ended", "job.failed"]
    error = run.record().error
    assert error is not None and error.code == reason and "2 restarts without progress" in error.message


@pytest.mark.parametrize("reason", ["rejected", "bad_data", "non_finite", "out_of_memory"])
def test_what_would_fail_again_fails_at_once_with_cause_and_hint(run: RunDir, reason: Reason) -> None:
    fault = Fault(code="some_guard", message="what, the value", hint="what to do")
    assert types(end(run, reason, error=fault.model_dump())) == ["attempt.ended", "job.failed"]
    assert run.record().error == fault


def test_a_full_disk_pauses_the_job_until_somebody_has_made_room(run: RunDir) -> None:
    fault = Fault(code="disk_full", message="what, the value", hint="make room")
    assert types(end(run, "disk_full", error=fault.model_dump())) == ["attempt.ended", "job.paused"]
    error = run.record().error
    assert error is not None and error.hint == f"make room; then `longhaul resume {run.id}`"
    assert run.append([JobResumed(), STARTED])[0].status.value == "running"


@pytest.mark.parametrize(("request_", "outcome"), [("pause", "job.paused"), ("cancel", "job.cancelled")])
@pytest.mark.parametrize("reason", ["interrupted", "crash", "worker_lost", "oom_in_optimizer"])
def test_whoever_ends_an_attempt_obeys_the_request(run: RunDir, request_: str, outcome: str, reason: Reason) -> None:
    run.append([REQUESTS[request_]])
    assert types(end(run, reason)) == ["attempt.ended", outcome]
    assert run.record().requested is Requested.NONE


@pytest.mark.parametrize(("request_", "outcome"), [(None, "paused"), ("pause", "paused"), ("cancel", "cancelled")])
def test_without_a_valid_checkpoint_the_job_is_paused_and_its_record_says_why(
    run: RunDir, request_: str | None, outcome: str
) -> None:
    if request_:
        run.append([REQUESTS[request_]])
    fault = Fault(code="no_valid_checkpoint", message="what, the value", hint="what to do")
    assert types(end(run, "no_valid_checkpoint", error=fault.model_dump())) == ["attempt.ended", f"job.{outcome}"]
    record = run.record()
    assert (record.status, record.restarts) == (outcome, 0)
    if outcome == "paused":
        assert record.error == fault
        assert run.append([JobResumed()])[0].error is None
        run.append([JobPaused(error=fault)])
        assert run.append([JobCancelled()])[0].error is None, "what the hint says can no longer be done"


def test_a_job_resumed_from_scratch_has_nothing_of_before(run: RunDir) -> None:
    evaluated = [EvaluationFinished(step=0, loss=4.0, rows=1, seconds=1.0, best=True)]
    run.append([*evaluated, CheckpointSaved(step=4, path="checkpoints/step-00000004", bytes=1, seconds=0.1)], attempt=1)
    assert types(end(run, "crash")) == ["attempt.ended", "job.queued"]
    run.append([JobPaused(), JobResumed()])
    record = run.record()
    assert (record.scratch_attempt, record.progress_step, record.restarts, record.first_loss) == (0, 4, 1, 4.0)
    run.append([JobPaused(), JobResumed(from_scratch=True)])
    record = run.record()
    assert (record.scratch_attempt, record.checkpoint, record.first_loss) == (2, "checkpoints/step-00000004", 4.0)
    run.append([AttemptStarted(worker="w", device="cpu")], attempt=2)
    record = run.record()
    assert (record.scratch_attempt, record.checkpoint, record.progress_step, record.restarts) == (2, None, 0, 0)
    assert (record.first_loss, record.best_loss, record.status) == (None, None, "running")


def test_what_another_job_did_is_told_once_and_counts_until_a_start_from_scratch(tmp_path: Path) -> None:
    run, _ = create(tmp_path, "job-1", SPEC, JobSubmitted(name="n", model="m", spec_sha256=SPEC.sha256()))
    adopted = Adopted(
        source="job-0/step-00000080", step=80, path="checkpoints/step-00000080", first_loss=4.0, best_loss=2.0
    )
    ready: list[AnyFact] = [checked(), prepared(100, adopted=adopted), JobQueued()]
    later = EvaluationFinished(step=90, loss=1.5, rows=1, seconds=1.0, best=True)
    saved = CheckpointSaved(step=90, path="checkpoints/step-00000090", bytes=1, seconds=0.1)

    def known() -> tuple[object, ...]:
        record = run.record()
        return record.adopted_step, record.first_loss, record.best_loss, record.progress_step, record.checkpoint

    run.append(ready)
    assert known() == (80, 4.0, 2.0, 80, adopted.path)
    run.append([STARTED, later, saved], attempt=1)
    assert known() == (80, 4.0, 1.5, 90, saved.path)
    end(run, "not_prepared")
    run.append(ready[1:])
    assert known() == (80, 4.0, 1.5, 90, saved.path), "it has trained on since"
    run.append([JobPaused(), JobResumed(from_scratch=True), STARTED])
    assert known() == (0, None, None, 0, None)


def test_from_scratch_can_be_taken_back_until_it_begins(run: RunDir) -> None:
    end(run, "interrupted")
    record, _ = run.append([JobPaused(), JobResumed(from_scratch=True), JobPaused(), JobResumed()])
    assert record.scratch_attempt == 0
    run.append([JobPaused(), JobResumed(from_scratch=True)])
    run.append([AttemptStarted(worker="w", device="cpu")], attempt=2)
    run.append([AttemptEnded(reason="interrupted"), JobPaused(), JobResumed()], attempt=2)
    assert run.record().scratch_attempt == 2, "what was saved before attempt 2 may be half removed"


def test_the_checkpoint_is_the_one_that_the_newest_attempt_resumed_from(run: RunDir) -> None:
    """A newer one was damaged; or its save was complete when the trainer was killed, and nobody had heard of it."""
    run.append([CheckpointSaved(step=4, path="checkpoints/step-00000004", bytes=1, seconds=0.1)], attempt=1)
    for resumed, progress in ((2, 4), (8, 8)):
        loaded = ModelLoaded(
            parameters=1, parameter_bytes=2, dtype="x", device="cpu", seconds=1.0, peak_ratio=1.0, resumed_step=resumed
        )
        record, _ = run.append([loaded])
        assert (record.checkpoint, record.progress_step) == (f"checkpoints/step-{resumed:08d}", progress)


def test_a_completion_that_came_first_beats_the_request(run: RunDir) -> None:
    run.append([JobCancelRequested()])
    facts = end(run, "done", step=9, result=TrainResult(model="model", loss=1.5, first_loss=4.0, step=8))
    assert types(facts) == ["attempt.ended", "job.succeeded"]
    record = run.record()
    assert (record.result_loss, record.result_step, record.result_model) == (1.5, 8, "model")


def test_what_the_trainer_said_is_not_lost_and_not_doubled(run: RunDir) -> None:
    facts = [CheckpointSaved(step=step, path=f"c{step}", bytes=1, seconds=0.1) for step in (1, 2, 3)]
    for fact in facts:
        append_line(run.attempt_file(1), Noted(at=1.0, fact=fact))
    run.append(facts[:1], attempt=1)
    append_line(run.attempt_file(1), Finished(at=2.0, reason="interrupted", step=3))
    # the caller only knows that the process is gone; the attempt file knows why
    assert types(end(run, "crash")) == ["checkpoint.saved", "checkpoint.saved", "attempt.ended", "job.queued"]
    assert [saved.step for saved in facts_of(run, CheckpointSaved)] == [1, 2, 3]


def test_an_ending_torn_in_two_is_completed(run: RunDir) -> None:
    end(run, "worker_lost")
    lines = run.events_file.read_bytes().splitlines(keepends=True)
    assert json.loads(lines[-1])["fact"]["type"] == "job.queued"
    run.events_file.write_bytes(b"".join(lines[:-1]) + lines[-1][:10])
    assert types(end(run, "worker_lost")) == ["job.queued"]


def test_nobody_ends_an_attempt_twice(run: RunDir) -> None:
    end(run, "worker_lost")
    with pytest.raises(Superseded):
        run.append(lambda record: ending(run, record, 1, Finished(at=1.0, reason="crash")))
