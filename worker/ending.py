"""How an attempt ends: the last facts of its trainer, `attempt.ended`, and what follows by policy.

One function for the supervisor that saw the end and for reconcile that found it.
"""

from __future__ import annotations

from jobs.attempt import Finished, Heartbeat, Noted, TrainResult
from jobs.disk.rundir import RunDir, last_metrics
from jobs.errors import Superseded
from jobs.events import (
    AnyFact,
    AttemptEnded,
    JobCancelled,
    JobFailed,
    JobPaused,
    JobQueued,
    JobSucceeded,
    JobUnprepared,
    TaskWaiting,
)
from jobs.reasons import BUSY_DELAY_S, MOST_BUSY_DELAY_S, MOST_DELAY_S, RESTART_DELAYS_S, NextAttempt, Reason
from jobs.record import JobRecord
from jobs.state import Requested, Status
from jobs.trainer_facts import CheckpointSaved, DeviceWaiting, Fault

_TO_BE_MENDED = (Reason.DISK_FULL, Reason.IMPORT_FAILED)
"""Once somebody has done what the hint says, the job can be resumed."""


def ending(run: RunDir, record: JobRecord, attempt: int, found: Finished) -> list[AnyFact]:
    """The facts that close `attempt`, decided on the record as it stands under the lock.

    `found` is what the caller knows of the end; the last line of the attempt file, if the trainer wrote one, takes
    precedence. Raises Superseded when the attempt is no longer the open one.
    """
    if record.attempt != attempt or record.status is not Status.RUNNING:
        raise Superseded(attempt, record.attempt)
    lines = run.attempt_lines(attempt)
    last = next((line for line in reversed(lines) if isinstance(line, Finished)), found)
    left: list[AnyFact] = [line.fact for line in lines if isinstance(line, Noted)][record.noted :]
    if not record.attempt_open:  # attempt.ended is in the file, what follows from it was lost
        return outcome(record, last.model_copy(update={"reason": record.last_reason or last.reason}))
    progress = max([record.progress_step, *(fact.step for fact in left if isinstance(fact, CheckpointSaved))])
    told = (line.step for line in lines if isinstance(line, Heartbeat))
    step = max([last.step, found.step, *told, _logged(run, attempt)])
    ended = AttemptEnded(reason=last.reason, step=step, checkpoint_step=progress, error=last.error)
    return [*left, ended, *outcome(record.model_copy(update={"progress_step": progress}), last)]


def _logged(run: RunDir, attempt: int) -> int:
    """The last step in metrics.jsonl, where that is of this attempt; else 0. The next attempt cuts it off there."""
    try:
        row = last_metrics(run.metrics_file)
    except OSError:  # the end of an attempt is told whatever its files are like
        return 0
    return row.step if row is not None and row.attempt == attempt else 0


def outcome(record: JobRecord, end: Finished) -> list[AnyFact]:
    """What becomes of the job: a completion that came first beats a request, a request beats the policy."""
    if end.reason.completes:
        return [succeeded(record, end)]
    if record.requested is Requested.CANCEL:
        return [JobCancelled(checkpoint=record.checkpoint)]
    fault = end.error or Fault.of(end.reason)
    if end.reason.next_attempt is NextAttempt.WHEN_RESUMED:
        return [JobPaused(error=resumable(record, fault) if end.reason in _TO_BE_MENDED else fault)]
    if record.requested is Requested.PAUSE:
        return [JobPaused()]
    match end.reason.next_attempt:
        case NextAttempt.AT_ONCE:  # after `oom_in_optimizer` it begins one fallback lower, and says when there is none
            if record.engine is not None and end.reason in (Reason.INTERRUPTED, Reason.WORKER_LOST):
                return again_later(record, fault, at_once=1)
            return [JobQueued()]
        case NextAttempt.AFTER_PREPARE:  # for a second time without a model loaded: only a person can help
            return [JobPaused(error=fault)] if record.unprepared else [JobUnprepared(message=fault.message)]
        case NextAttempt.DELAYED:
            return [JobQueued(not_before_s=BUSY_DELAY_S)]
        case NextAttempt.LATER:
            return again_later(record, fault, at_once=0)
        case NextAttempt.WITH_GPU:  # the worker ends, too: the job waits for one that has a GPU
            return [JobQueued(), DeviceWaiting(message=fault.message)]
        case NextAttempt.BACKOFF:
            count = 1 if record.progress_step > record.restart_step else record.restarts + 1
            if count <= record.max_restarts:
                return [JobQueued(not_before_s=RESTART_DELAYS_S[min(count, len(RESTART_DELAYS_S)) - 1])]
            tries = f"{record.max_restarts} {'restart' if record.max_restarts == 1 else 'restarts'} without progress"
            return [JobFailed(error=fault.model_copy(update={"message": f"{fault.message} (given up after {tries})"}))]
        case NextAttempt.NEVER:
            return [JobFailed(error=fault)]


def again_later(record: JobRecord, fault: Fault, at_once: int) -> list[AnyFact]:
    """The next attempt: at once so many times in a row without progress, then after ever longer waits."""
    before = 0 if record.progress_step > record.in_vain_step else record.in_vain
    if before < at_once:
        return [JobQueued()]
    most = MOST_DELAY_S if record.engine is not None else MOST_BUSY_DELAY_S
    delay = min(BUSY_DELAY_S * 2 ** min(before - at_once, 7), most)
    tries = f" ({before + 1} attempts in a row made no progress)" if at_once else ""
    if record.engine is None:
        return [JobQueued(not_before_s=delay), DeviceWaiting(message=fault.message, memory_of_host=True)]
    return [JobQueued(not_before_s=delay), TaskWaiting(task=None, message=f"{fault.message}{tries}")]


def unfinished(run: RunDir, record: JobRecord, fault: Fault) -> JobFailed | JobPaused:
    """What becomes of a job whose check or prepare cannot be done: one that has trained already keeps what it did."""
    if not run.has_trained(record):
        return JobFailed(error=fault)
    return JobPaused(error=resumable(record, fault))


def resumable(record: JobRecord, fault: Fault) -> Fault:
    """The fault, its hint ending with the command that resumes the job."""
    again = f"`longhaul resume {record.id}`"
    return fault.model_copy(update={"hint": f"{fault.hint}; then {again}" if fault.hint else again})


def stage_lost(run: RunDir, record: JobRecord, times: int) -> JobFailed | JobPaused:
    """The end of a job whose check or prepare was killed so often; with what its supervisor knew of the last time."""
    lines = run.attempt_lines(record.stage.value)
    message = f"stage {record.stage.value} was lost {times} times"
    if lines and isinstance(last := lines[-1], Finished) and last.error is not None:
        message = f"{message}, the last time for this reason: {last.error.message}"
        return unfinished(run, record, last.error.model_copy(update={"message": message}))
    lost = Fault.of(Reason.WORKER_LOST)
    return unfinished(run, record, lost.model_copy(update={"message": f"{message}: {lost.message}"}))


def succeeded(record: JobRecord, end: Finished) -> JobSucceeded:
    """The completion, from what the trainer's last line says."""
    result = end.result
    if not isinstance(result, TrainResult):  # its last line is gone
        model = "model" if record.kind == "train" else None
        result = TrainResult(model=model, loss=None, first_loss=None, step=end.step)
    return JobSucceeded(
        **dict(result),
        reason=end.reason,
        seconds=round(record.training_s + max(0.0, end.at - (record.attempt_started_at or end.at)), 3),
    )
