"""JobRecord: what a job's events add up to. `apply` is the one function that moves a job.

The record in Redis is a projection of this; it can be made again from events.jsonl at any time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from jobs.dataset_report import PreparedSummary
from jobs.errors import Conflict, Damaged, InvalidTransition, Superseded
from jobs.events import (
    AnyFact,
    AttemptEnded,
    AttemptStarted,
    Event,
    JobCancelled,
    JobCancelRequested,
    JobChecked,
    JobFailed,
    JobPaused,
    JobPauseRequested,
    JobPauseWithdrawn,
    JobPrepared,
    JobPriorityChanged,
    JobQueued,
    JobRepaired,
    JobResumed,
    JobSubmitted,
    JobSucceeded,
    JobUnprepared,
    JobValidated,
    ModelRemoved,
    TaskStarted,
    TaskSubmitted,
    TaskWaiting,
)
from jobs.frozen import Empty
from jobs.metrics import MetricRow
from jobs.plan import CheckSummary, StepLimit
from jobs.reasons import NextAttempt, Reason
from jobs.state import Requested, Stage, Status, transition
from jobs.trainer_facts import CheckpointSaved, DeviceWaiting, EvaluationFinished, Fault, ModelLoaded, StepsCorrected
from jobs.verdict import ConfidenceInterval, Verdict


class JobRecord(BaseModel):
    """The sum of a job's events. Times are Unix seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    number: int = 0
    """Number of the last event: the record's version."""
    status: Status = Status.VALIDATING
    stage: Stage = Stage.CHECK
    requested: Requested = Requested.NONE
    attempt: int = 0
    attempt_open: bool = False
    """attempt.started without attempt.ended."""
    scratch_attempt: int = 0
    """The attempt that begins at step 0 because the job was resumed from scratch; 0: there is none."""
    last_reason: Reason | None = None
    noted: int = 0
    """Facts of the current attempt's trainer that are already among the events."""
    restarts: int = 0
    """Counted restarts since the last progress (docs/reference/errors.md)."""
    progress_step: int = 0
    """Step of the newest checkpoint saved so far, or gone on from: progress."""
    adopted_step: int = 0
    """Steps that another job did (`resume_from`)."""
    restart_step: int = 0
    """`progress_step` at the last counted restart."""
    unprepared: bool = False
    """It went back to *prepare*, and no attempt has loaded a model since: a second time would not help."""
    not_before: float = 0.0
    waiting_reason: str | None = None
    """Why the queued job cannot start though its turn has come, from `device.waiting`; or why it waits on its engine,
    from `task.waiting`."""
    kind: Literal["train", "evaluate"] = "train"
    name: str = "job"
    model: str = ""
    spec_sha256: str = ""
    priority: int = 0
    max_restarts: int = 5
    metadata: dict[str, str] = {}
    dry_run: bool = False
    idempotency_key: str | None = None
    body_sha256: str | None = None
    discord: bool = True
    wandb: bool = True
    cloned_from: str | None = None
    sweep: str | None = None
    submitted_at: float = 0.0
    queued_at: float | None = None
    started_at: float | None = None
    attempt_started_at: float | None = None
    """Of the newest attempt; of one on an engine, when its task started. Null: that waits there."""
    gpu: str | None = None
    """UUID of the GPU of the newest attempt; null: a CPU."""
    box: str | None = None
    """Name of the box of the newest attempt."""
    engine: str | None = None
    """On which the newest attempt trains; null: on the worker's own machine."""
    task: str | None = None
    """The engine's id of that attempt; null: it has none (yet)."""
    in_vain: int = 0
    """Attempts in a row that made no progress: on an engine, or of those that had to wait for others."""
    in_vain_step: int = 0
    """`progress_step` after the last of these attempts."""
    finished_at: float | None = None
    training_s: float = 0.0
    """Time in attempts that have ended."""
    steps: int | None = None
    """Steps of the whole run, once prepared."""
    limited_by: StepLimit | None = None
    """What decides their number; as they."""
    plan: CheckSummary | Empty = Empty()
    data: PreparedSummary | Empty = Empty()
    first_loss: float | None = None
    best_loss: float | None = None
    checkpoint: str | None = None
    """Newest checkpoint, relative to the run directory."""
    result_model: str | None = None
    result_step: int | None = None
    result_loss: float | None = None
    result_chosen_by: str | None = None
    """The metric by which the result is the best; null: it is the last step's."""
    result_better_step: int | None = None
    """The step that was better by it, and whose checkpoint is missing."""
    result_kept_from: str | None = None
    """The job (`resume_from`) that trained the result; null: this one has."""
    result_metrics: dict[str, float] = {}
    """Other metrics of the result."""
    result_intervals: dict[str, ConfidenceInterval] = {}
    """Of its loss and metrics, as far as they have one."""
    verdict: Verdict | None = None
    """Whether the result is better than the model before training."""
    error: Fault | None = None
    """Why it failed, or why it is paused although no user asked for that."""


def cancellation(record: JobRecord) -> list[AnyFact]:
    """What cancels a job that has not ended: at once, or where it runs, by its trainer, which is asked once."""
    if record.status is not Status.RUNNING:
        return [JobCancelled(checkpoint=record.checkpoint)]
    return [] if record.requested is Requested.CANCEL else [JobCancelRequested()]


def fold(job: str, events: Iterable[Event]) -> JobRecord:
    """The record that these events, in order, add up to."""
    record = JobRecord(id=job)
    for event in events:
        record = apply(record, event)
    return record


def apply(record: JobRecord, event: Event) -> JobRecord:
    """The record after one more event. Raises Conflict when it may not follow, Damaged for a gap."""
    if event.number != record.number + 1:
        raise Damaged(f"job {record.id}: event {event.number} follows event {record.number}")
    fact = event.fact
    if event.attempt < record.attempt and (fact.by_trainer or isinstance(fact, AttemptEnded)):
        raise Superseded(event.attempt, record.attempt)
    change: dict[str, Any] = {"number": event.number}
    match fact:
        case JobSubmitted():
            _require(event.number == 1, record, event)
            change |= {"submitted_at": event.at, **fact.model_dump(exclude={"type"})}
        case JobChecked():
            _require(record.status is Status.VALIDATING, record, event)
            change |= {"stage": Stage.CHECK if record.dry_run else Stage.PREPARE, "plan": fact.plan}
        case JobPrepared():
            _require(record.status is Status.VALIDATING, record, event)
            change |= {"data": fact.data, "steps": fact.steps, "limited_by": fact.limited_by}
            if fact.adopted is not None and not record.attempt:  # prepared again, it has trained on since
                change |= {"checkpoint": fact.adopted.path, "progress_step": fact.adopted.step}
                change |= {"adopted_step": fact.adopted.step}
                change |= {"first_loss": fact.adopted.first_loss, "best_loss": fact.adopted.best_loss}
            if isinstance(record.plan, CheckSummary):
                change |= {"plan": record.plan.prepared(fact.time, fact.memory)}
        case JobUnprepared():
            change |= _transition(record, Status.VALIDATING) | {"stage": Stage.PREPARE, "unprepared": True}
        case JobQueued():
            change |= _transition(record, Status.QUEUED)
            change |= {
                "stage": Stage.TRAIN,  # not before: a stage whose last event was lost is done again
                "not_before": event.at + fact.not_before_s if fact.not_before_s else 0.0,
                "queued_at": event.at,
            }
            if record.last_reason is not None and record.last_reason.counted:
                progressed = record.progress_step > record.restart_step
                change |= {
                    "restarts": 1 if progressed else record.restarts + 1,
                    "restart_step": record.progress_step,
                }
            last = record.last_reason
            if last is not None and (record.engine is not None or last.next_attempt is NextAttempt.LATER):
                progressed = record.progress_step > record.in_vain_step
                change |= {
                    "in_vain": 0 if progressed else record.in_vain + 1,
                    "in_vain_step": record.progress_step,
                }
        case JobPauseRequested() | JobCancelRequested() | JobPauseWithdrawn():
            _require(record.status is Status.RUNNING, record, event)
            change |= {"requested": fact.requested}
        case JobPriorityChanged():
            _require(not record.status.terminal, record, event)
            change |= {"priority": fact.priority}
        case AttemptStarted() as fact:
            if event.attempt != record.attempt + 1:
                raise Superseded(event.attempt, record.attempt)
            change |= _transition(record, Status.RUNNING)
            change |= {"attempt": event.attempt, "attempt_open": True, "noted": 0, "last_reason": None}
            change |= {"engine": fact.engine, "task": None}
            change |= {"gpu": fact.gpu, "box": fact.box}
            begun = None if fact.engine is not None else event.at
            change |= {"attempt_started_at": begun, "started_at": record.started_at or event.at}
        case TaskSubmitted():
            _require(record.attempt_open, record, event)
            waits = f"it waits in the queue of the engine {fact.engine}, as task {fact.task}"
            change |= {"engine": fact.engine, "task": fact.task, "waiting_reason": waits}
        case TaskWaiting():
            _require(record.attempt_open or record.status is Status.QUEUED, record, event)
            change |= {"waiting_reason": f"it waits on the engine {record.engine}: {fact.message}"}
        case TaskStarted():
            _require(record.attempt_open, record, event)
            change |= {"waiting_reason": None, "attempt_started_at": record.attempt_started_at or event.at}
        case AttemptEnded():
            _require(record.attempt_open, record, event)
            spent = event.at - (record.attempt_started_at or event.at)
            change |= {
                "attempt_open": False,
                "last_reason": fact.reason,
                "training_s": record.training_s + max(0.0, spent),
            }
            if fact.reason is Reason.EARLY_STOPPED:
                change |= {"steps": fact.step, "limited_by": "early_stopping"}
        case EvaluationFinished() if record.kind == "train":
            losses = [loss for loss in (record.best_loss, fact.loss) if loss is not None]
            change |= {"best_loss": min(losses)}
            if fact.step == 0:
                change |= {"first_loss": fact.loss}
        case DeviceWaiting() if record.status is Status.QUEUED:  # from the attempt that lost the GPU, or from reconcile
            return record.model_copy(update=change | {"waiting_reason": fact.message})
        case ModelLoaded(resumed_step=None):
            change |= {"unprepared": False}
        case ModelLoaded(resumed_step=int(step)):  # newer ones are damaged, or this one was never reported
            change |= {"checkpoint": f"checkpoints/step-{step:08d}", "progress_step": max(record.progress_step, step)}
            change |= {"unprepared": False}
        case StepsCorrected():
            change |= {"steps": fact.steps, "limited_by": fact.limited_by}
        case CheckpointSaved():
            change |= {"checkpoint": fact.path, "progress_step": max(record.progress_step, fact.step)}
        case JobPaused():
            # With an error: one that has trained, as its directory knows where a repair has cut the attempts off.
            if record.status is Status.VALIDATING and not record.attempt and fact.error is None:
                raise InvalidTransition(record.status, Status.PAUSED)
            # Prepared once, it waits to train: an attempt finds out again what is still missing.
            change |= _transition(record, Status.PAUSED) | {"error": fact.error, "stage": Stage.TRAIN}
        case JobResumed():
            change |= _transition(record, Status.QUEUED) | {"not_before": 0.0, "queued_at": event.at}
            change |= {"unprepared": False, "in_vain": 0}
            if fact.from_scratch:
                change |= {"scratch_attempt": record.attempt + 1}
            elif record.attempt < record.scratch_attempt:  # nothing is removed yet: taken back
                change |= {"scratch_attempt": 0}
        case JobRepaired():
            _require(not record.status.terminal, record, event)
            if event.attempt > record.attempt:  # its start was cut off: it may still be running
                change |= {"attempt": event.attempt, "attempt_open": record.status is Status.RUNNING}
                change |= {"noted": 0, "last_reason": None}
        case JobValidated():
            change |= _transition(record, Status.VALIDATED) | {"finished_at": event.at}
        case JobSucceeded():
            change |= _transition(record, Status.SUCCEEDED) | {"finished_at": event.at}
            change |= {"result_model": fact.model, "result_step": fact.step, "result_loss": fact.loss}
            change |= {"result_chosen_by": fact.chosen_by, "result_metrics": fact.metrics}
            change |= {
                "result_better_step": fact.better_step,
                "result_kept_from": fact.kept_from,
                "result_intervals": fact.intervals,
                "verdict": fact.verdict,
            }
        case JobFailed():
            change |= _transition(record, Status.FAILED) | {"finished_at": event.at, "error": fact.error}
        case JobCancelled():
            change |= _transition(record, Status.CANCELLED) | {"finished_at": event.at}
        case ModelRemoved():
            _require(record.status.terminal, record, event)
            change |= {"result_model": None, "checkpoint": None}
        case _:
            assert fact.by_trainer, f"{fact.type} has no case"
    if record.attempt < record.scratch_attempt <= change.get("attempt", 0):
        change |= {"checkpoint": None, "first_loss": None, "best_loss": None}
        change |= {"progress_step": 0, "adopted_step": 0, "restart_step": 0, "restarts": 0}
        change |= {"in_vain_step": 0}
    if fact.by_trainer:
        _require(record.attempt_open, record, event)
        change["noted"] = record.noted + 1
    return record.model_copy(update=change)


def _require(condition: bool, record: JobRecord, event: Event) -> None:
    if not condition:
        raise Conflict(f"{event.type} cannot follow: job {record.id} is {record.status}, attempt {record.attempt}")


def _transition(record: JobRecord, target: Status) -> dict[str, Any]:
    return {
        "status": transition(record.status, target),
        "requested": Requested.NONE,
        "waiting_reason": None,
        "error": None,
    }


# -- how long it still needs ---------------------------------------------------------------------------------
# By its own pace once that was measured, before by its plan. So does `redis/queries.py`.


def present(record: JobRecord, latest: MetricRow | None) -> MetricRow | None:
    """The newest row of metrics, if the attempt that runs wrote it: an earlier one may have come further."""
    return latest if latest is not None and record.attempt_open and latest.attempt == record.attempt else None


def left_s(record: JobRecord, latest: MetricRow | None) -> float | None:
    """Seconds from the newest row of the open attempt on, without one from the newest checkpoint on. None: unknown."""
    if (row := present(record, latest)) is not None:
        return row.eta_s
    if latest is not None and record.steps is not None:
        measured = latest.step < record.steps
        pace = latest.eta_s / (record.steps - latest.step) if measured else latest.step_s
        return pace * (record.steps - record.progress_step)
    time = record.plan.time if isinstance(record.plan, CheckSummary) else None
    hours = time.hours_expected if time else None
    own = record.steps - record.adopted_step if record.steps else 0
    left = 1 - (record.progress_step - record.adopted_step) / own if own > 0 else 1
    return None if hours is None else 3600.0 * hours * left
