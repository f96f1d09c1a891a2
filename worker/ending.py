"""How an attempt ends: what its trainer still had to say, `attempt.ended`, and what policy makes of it (design §7).

One function for the supervisor that saw the end and for reconcile that found it.
"""

from __future__ import annotations

from jobs.attempt import Finished, Noted
from jobs.errors import Superseded
from jobs.events import (
    AnyFact,
    AttemptEnded,
    Fault,
    JobCancelled,
    JobFailed,
    JobPaused,
    JobQueued,
    JobSucceeded,
    Reason,
)
from jobs.record import COUNTED_REASONS, JobRecord
from jobs.rundir import RunDir
from jobs.state import Request, Status

RESTART_DELAYS_S = (0.0, 10.0, 60.0, 300.0, 300.0)
BUSY_DELAY_S = 30.0
"""Wait before looking again at a card that another trainer holds."""


def ending(run: RunDir, record: JobRecord, attempt: int, found: Finished) -> list[AnyFact]:
    """The facts that close `attempt`, decided on the record as it stands under the lock.

    `found` is what the caller knows of the end; the last line of the attempt file, if the trainer wrote one, is
    believed before it. Raises Superseded when the attempt is no longer the open one.
    """
    if record.attempt != attempt or record.status is not Status.RUNNING:
        raise Superseded(attempt, record.attempt)
    lines = run.attempt_lines(attempt)
    said = next((line for line in reversed(lines) if isinstance(line, Finished)), found)
    left: list[AnyFact] = [line.fact for line in lines if isinstance(line, Noted)][record.noted :]
    if not record.attempt_open:  # attempt.ended is in the file, what follows from it was lost
        return outcome(record, said.model_copy(update={"reason": record.last_reason or said.reason}))
    ended = AttemptEnded(reason=said.reason, step=max(said.step, found.step), error=said.error)
    return [*left, ended, *outcome(record, said)]


def outcome(record: JobRecord, end: Finished) -> list[AnyFact]:
    """What becomes of the job: a completion that came first beats a request, a request beats the policy."""
    if end.reason == "done":
        return [succeeded(record, end)]
    if record.request is Request.CANCEL:
        return [JobCancelled(checkpoint=record.checkpoint)]
    if record.request is Request.PAUSE:
        return [JobPaused()]
    # The next attempt begins one rung lower than those that ended by `oom_in_optimizer`, and says when there is none.
    if end.reason in ("interrupted", "lost", "oom_in_optimizer"):
        return [JobQueued()]
    if end.reason == "device_busy":
        return [JobQueued(not_before_s=BUSY_DELAY_S)]
    fault = end.error or Fault(code=end.reason, message=MEANING[end.reason])
    if end.reason in COUNTED_REASONS:
        count = 1 if record.progress_step > record.restart_step else record.restarts + 1
        if count <= record.max_restarts:
            return [JobQueued(not_before_s=RESTART_DELAYS_S[min(count, len(RESTART_DELAYS_S)) - 1])]
        tries = f"{record.max_restarts} {'restart' if record.max_restarts == 1 else 'restarts'} without progress"
        return [JobFailed(error=fault.model_copy(update={"message": f"{fault.message} (given up after {tries})"}))]
    return [JobFailed(error=fault)]


def stage_lost(run: RunDir, record: JobRecord, times: int) -> JobFailed:
    """The end of a job whose check or prepare was killed so often; with what its supervisor knew of the last time."""
    lines = run.attempt_lines(record.stage.value)
    message = f"stage {record.stage.value} was lost {times} times"
    if lines and isinstance(last := lines[-1], Finished) and last.error is not None:
        message = f"{message}, the last time for this reason: {last.error.message}"
        return JobFailed(error=last.error.model_copy(update={"message": message}))
    return JobFailed(error=Fault(code="lost", message=f"{message}: {MEANING['lost']}", hint="look at the worker's log"))


def succeeded(record: JobRecord, end: Finished) -> JobSucceeded:
    """The completion, from what the trainer's last line says."""
    return JobSucceeded(
        model=end.result.get("model", "model"),
        step=end.result.get("step", end.step),
        loss=end.result.get("loss"),
        first_loss=end.result.get("first_loss"),
        seconds=round(record.training_s + max(0.0, end.at - (record.attempt_started_at or end.at)), 3),
    )


MEANING: dict[Reason, str] = {
    "done": "the trainer finished",
    "interrupted": "the trainer was asked to stop",
    "device_busy": "another trainer holds the card",
    "out_of_memory": "the card's memory ran out inside a step",
    "oom_in_optimizer": "the card's memory ran out inside the optimizer's step",
    "refused": "the job was refused",
    "bad_data": "the data cannot be used",
    "non_finite": "the loss or the gradient is not a number",
    "disk_full": "the disk is full",
    "crash": "the trainer process ended without saying why",
    "silent": "the trainer made no progress for too long",
    "lost": "the worker went away",
    "host_out_of_memory": "the host's memory ran out and the kernel ended the trainer",
}
EXIT_REASONS: dict[int, Reason] = {75: "interrupted", 76: "out_of_memory", 77: "refused", 78: "non_finite"}
"""Exit codes are a fallback for a trainer that could not write its last line."""
