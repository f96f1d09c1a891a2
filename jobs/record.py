"""JobRecord: what a job's events add up to. `apply` is the one function that moves a job.

The record in Redis is a projection of this; it can be made again from events.jsonl at any time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict

from jobs.errors import Conflict, Damaged, Superseded
from jobs.events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointSaved,
    DeviceWaiting,
    EvaluationFinished,
    Event,
    Fault,
    JobCancelled,
    JobChecked,
    JobFailed,
    JobPaused,
    JobPrepared,
    JobPrioritised,
    JobQueued,
    JobRequested,
    JobResumed,
    JobSubmitted,
    JobSucceeded,
    JobValidated,
    Reason,
)
from jobs.state import Request, Stage, Status, move


class JobRecord(BaseModel):
    """The sum of a job's events. Times are Unix seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    number: int = 0
    """Number of the last event: the record's version."""
    status: Status = Status.VALIDATING
    stage: Stage = Stage.CHECK
    request: Request = Request.NONE
    attempt: int = 0
    attempt_open: bool = False
    """attempt.started without attempt.ended."""
    last_reason: Reason | None = None
    noted: int = 0
    """Facts of the current attempt's trainer that are already among the events."""
    restarts: int = 0
    """Counted restarts since the last progress (design §7)."""
    progress_step: int = 0
    """Step of the newest checkpoint saved so far, or gone on from: progress."""
    adopted_step: int = 0
    """Steps that another job did (`resume_from`)."""
    restart_step: int = 0
    """`progress_step` at the last counted restart."""
    not_before: float = 0.0
    waiting: str | None = None
    """Why the queued job cannot start though its turn has come: what train workers say of their cards."""
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
    submitted_at: float = 0.0
    queued_at: float | None = None
    started_at: float | None = None
    attempt_started_at: float | None = None
    finished_at: float | None = None
    training_s: float = 0.0
    """Time in attempts that have ended."""
    steps: int | None = None
    """Steps of the whole run, once prepared."""
    plan: dict[str, Any] = {}
    data: dict[str, Any] = {}
    first_loss: float | None = None
    best_loss: float | None = None
    checkpoint: str | None = None
    """Newest checkpoint, relative to the run directory."""
    result_model: str | None = None
    result_step: int | None = None
    result_loss: float | None = None
    error: Fault | None = None


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
            change |= {"stage": Stage.PREPARE, "plan": fact.plan}
        case JobPrepared():
            _require(record.status is Status.VALIDATING, record, event)
            change |= {"stage": Stage.TRAIN, "data": fact.data, "steps": fact.steps}
            if fact.adopted is not None:
                change |= {"checkpoint": fact.adopted.path, "progress_step": fact.adopted.step}
                change |= {"adopted_step": fact.adopted.step}
            counted = {"time": fact.time, "memory": fact.memory}
            plan = record.plan | {key: value for key, value in counted.items() if value is not None}
            if fact.memory is not None:  # chosen again, for the rows that there are
                chosen = ("micro_batch", "recompute_layers", "optimizer")
                again = {key: fact.memory[key] for key in chosen if key in fact.memory}
                plan["resolved"] = plan.get("resolved", {}) | again
            change |= {"plan": plan}
        case JobQueued():
            change |= _moved(record, Status.QUEUED)
            change |= {
                "not_before": event.at + fact.not_before_s if fact.not_before_s else 0.0,
                "queued_at": event.at,
            }
            if record.last_reason in COUNTED_REASONS:
                progressed = record.progress_step > record.restart_step
                change |= {
                    "restarts": 1 if progressed else record.restarts + 1,
                    "restart_step": record.progress_step,
                }
        case JobRequested():
            _require(record.status is Status.RUNNING, record, event)
            change |= {"request": Request(fact.request)}
        case JobPrioritised():
            _require(not record.status.terminal, record, event)
            change |= {"priority": fact.priority}
        case AttemptStarted():
            if event.attempt != record.attempt + 1:
                raise Superseded(event.attempt, record.attempt)
            change |= _moved(record, Status.RUNNING)
            change |= {"attempt": event.attempt, "attempt_open": True, "noted": 0, "last_reason": None}
            change |= {"attempt_started_at": event.at, "started_at": record.started_at or event.at}
        case AttemptEnded():
            _require(record.attempt_open, record, event)
            spent = event.at - (record.attempt_started_at or event.at)
            change |= {
                "attempt_open": False,
                "last_reason": fact.reason,
                "training_s": record.training_s + max(0.0, spent),
            }
        case EvaluationFinished():
            losses = [loss for loss in (record.best_loss, fact.loss) if loss is not None]
            change |= {"best_loss": min(losses)}
            if record.first_loss is None:
                change |= {"first_loss": fact.loss}
        case DeviceWaiting() if record.status is Status.QUEUED:  # there is no trainer: reconcile says it
            return record.model_copy(update=change | {"waiting": fact.message})
        case CheckpointSaved():
            change |= {"checkpoint": fact.path, "progress_step": max(record.progress_step, fact.step)}
        case JobPaused():
            change |= _moved(record, Status.PAUSED)
        case JobResumed():
            change |= _moved(record, Status.QUEUED) | {"not_before": 0.0, "queued_at": event.at}
        case JobValidated():
            change |= _moved(record, Status.VALIDATED) | {"finished_at": event.at}
        case JobSucceeded():
            change |= _moved(record, Status.SUCCEEDED) | {"finished_at": event.at}
            change |= {"result_model": fact.model, "result_step": fact.step, "result_loss": fact.loss}
        case JobFailed():
            change |= _moved(record, Status.FAILED) | {"finished_at": event.at, "error": fact.error}
        case JobCancelled():
            change |= _moved(record, Status.CANCELLED) | {"finished_at": event.at}
        case _:
            assert fact.by_trainer, f"{fact.type} has no case"
    if fact.by_trainer:
        _require(record.attempt_open, record, event)
        change["noted"] = record.noted + 1
    return record.model_copy(update=change)


COUNTED_REASONS = frozenset({"crash", "silent", "host_out_of_memory"})
"""Reasons whose restarts are counted against `max_restarts`."""


def _require(condition: bool, record: JobRecord, event: Event) -> None:
    if not condition:
        raise Conflict(f"{event.type} cannot follow: job {record.id} is {record.status}, attempt {record.attempt}")


def _moved(record: JobRecord, target: Status) -> dict[str, Any]:
    return {"status": move(record.status, target), "request": Request.NONE, "waiting": None}
