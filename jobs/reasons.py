"""Why an attempt ended, and everything that follows from it: one row for each reason.

What words, counts, retries or reports the end of an attempt reads it here. On disk and in the API a reason is its
code, a plain string.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from jobs.text.units import format_duration

Severity = Literal["info", "warning", "error"]
"""`info`: nothing is wrong. `warning`: the job continues. `error`: sinks alert, even if it is tried again."""


BUSY_DELAY_S = 30.0
"""Wait before looking again at a GPU that another trainer holds."""
MOST_DELAY_S, MOST_BUSY_DELAY_S = 3600.0, 300.0
"""The longest wait before a task is handed to an engine again; before an attempt whose memory others have."""
RESTART_DELAYS_S = (0.0, 10.0, 60.0, 300.0, 300.0)
"""Before the first, second … restart without progress; from the fifth on the last."""


class NextAttempt(StrEnum):
    """When the next attempt of a job starts (`worker/ending.py`)."""

    NEVER = "never"
    """The job has succeeded or failed."""
    AT_ONCE = "at once"
    DELAYED = f"after {format_duration(BUSY_DELAY_S)}"
    WITH_GPU = "when a worker has a usable GPU"
    BACKOFF = f"after {', '.join(map(format_duration, RESTART_DELAYS_S))}"
    """Counted: at most `max_restarts` times without progress."""
    LATER = (
        f"after {format_duration(BUSY_DELAY_S)}, each time twice as long, at most "
        f"{format_duration(MOST_BUSY_DELAY_S)}; on an engine at most {format_duration(MOST_DELAY_S)}"
    )
    AFTER_PREPARE = "after *prepare*"
    """Which makes model and data again; if no model was loaded since the last time, the job pauses."""
    WHEN_RESUMED = "when resumed"
    """The job pauses."""


_NEXT = NextAttempt
_HOST_MEMORY = (
    "give the host (or the worker's container, if it has a limit) more memory, or end other programs that use it"
)
_LOG = "the trainer's log has the details: `longhaul logs ID`"
_KILLED = (
    "find out what sent the signal: `journalctl -k` tells of the kernel, `journalctl -u systemd-oomd` of systemd-oomd; "
    "else it was `kill -9` of a person or a program"
)
_NO_GPU = (
    "run nvidia-smi on the host. Usual causes: the GPU fell off the bus (`journalctl -k | grep Xid` shows 79), "
    "a driver upgrade, a suspend, or systemctl daemon-reload, which takes the GPU from running containers"
)


class Reason(StrEnum):
    """Why an attempt ended."""

    headline: str
    """For chat messages."""
    sentence: str
    """For the API, the command line and the log: lower case, no full stop."""
    next_attempt: NextAttempt
    """What follows, unless the user has asked for a pause or a cancel."""
    severity: Severity
    """Of the end of the attempt; the job may continue."""
    exit_code: int
    """Of the trainer; 1 where it cannot know. Counts only where it could not write its last line."""
    hint: str | None
    """What to do; None where there is nothing to do or where it depends on the case."""

    def __new__(
        cls, code: str, headline: str, sentence: str, next_attempt: NextAttempt, severity: Severity,
        exit_code: int = 1, hint: str | None = None,
    ) -> Reason:  # fmt: skip
        """A member with its row."""
        reason = str.__new__(cls, code)
        reason._value_ = code
        reason.headline, reason.sentence, reason.hint = headline, sentence, hint
        reason.next_attempt, reason.severity, reason.exit_code = next_attempt, severity, exit_code
        return reason

    # code, headline, sentence, next attempt, severity, exit code, hint
    # fmt: off
    # Where two share an exit code, the first is what the exit code alone means.
    DONE = "done", "Training is done", "the trainer has finished", _NEXT.NEVER, "info", 0
    EARLY_STOPPED = ("early_stopped", "Training has ended early",
                     "the evaluations have not become better for as long as the job waits for that", _NEXT.NEVER,
                     "info", 0)
    INTERRUPTED = "interrupted", "Stopped on request", "the trainer was asked to stop", _NEXT.AT_ONCE, "info", 75
    DEVICE_BUSY = "device_busy", "The GPU is taken", "another trainer holds the GPU", _NEXT.DELAYED, "warning", 75
    OUT_OF_MEMORY = "out_of_memory", "Out of memory", "memory ran out", _NEXT.NEVER, "error", 76
    OOM_IN_OPTIMIZER = ("oom_in_optimizer", "Out of memory in the optimizer",
                        "memory ran out while the weights were updated", _NEXT.AT_ONCE, "error", 76)
    REJECTED = "rejected", "Rejected", "the job was rejected", _NEXT.NEVER, "error", 77
    BAD_DATA = "bad_data", "The data cannot be used", "the data cannot be used", _NEXT.NEVER, "error", 77
    NON_FINITE = ("non_finite", "Loss or gradient is not finite", "the loss or the gradient is not a finite number",
                  _NEXT.NEVER, "error", 78)
    DISK_FULL = ("disk_full", "The disk is full", "the disk is full", _NEXT.WHEN_RESUMED, "error", 82,
                 "make room")
    NO_VALID_CHECKPOINT = ("no_valid_checkpoint", "No valid checkpoint is left",
                           "none of the job's checkpoints verifies", _NEXT.WHEN_RESUMED, "error", 79)
    BASE_CHANGED = ("base_changed", "The base model has changed",
                    "weights of the model that are not trained have changed in memory", _NEXT.NEVER, "error", 83,
                    "look for faulty memory (of a GPU: `nvidia-smi -q -d ECC`), then: longhaul clone ID --resume")
    CRASH = "crash", "The trainer crashed", "the trainer crashed", _NEXT.BACKOFF, "error", 1, _LOG
    KILLED = ("killed", "The trainer was killed", "something other than Longhaul killed the trainer", _NEXT.BACKOFF,
              "error", 1, _KILLED)
    IMPORT_FAILED = ("import_failed", "A library cannot be imported", "a library cannot be imported",
                     _NEXT.WHEN_RESUMED, "error", 1, "install it: `make setup`, or build the images anew")
    STALLED = ("stalled", "The trainer stalled and was stopped",
               "the trainer made no progress for too long and was stopped", _NEXT.BACKOFF, "error", 1, _LOG)
    WORKER_LOST = ("worker_lost", "The worker was lost", "the worker was lost", _NEXT.AT_ONCE, "warning", 1,
                   "look at the worker's log")
    HOST_OUT_OF_MEMORY = ("host_out_of_memory", "The host ran out of memory",
                          "the host's memory ran out and the kernel ended the trainer", _NEXT.BACKOFF, "error", 1,
                          _HOST_MEMORY)
    NOT_SUBMITTED = ("not_submitted", "The engine took no task", "the engine did not take the task", _NEXT.LATER,
                     "warning", 1, "if it does not pass: check the engine's section in LONGHAUL_ENGINES")
    NOT_STARTED = ("not_started", "The engine ended the task before it started",
                   "the engine ended the task before it started", _NEXT.LATER, "warning", 1,
                   "if it happens again: ask those who run the engine why it ends the task")
    HOST_MEMORY_IN_USE = ("host_memory_in_use", "The host's memory is taken",
                          "others have memory of the host that the job needs", _NEXT.LATER, "warning", 84,
                          "nothing: it starts when they are done; or end what else uses the memory of that host")
    GPU_LOST = "gpu_lost", "The GPU was lost", "the GPU was lost", _NEXT.WITH_GPU, "warning", 80, _NO_GPU
    NOT_PREPARED = ("not_prepared", "The prepared model or data is gone",
                    "the prepared model or data is gone or damaged", _NEXT.AFTER_PREPARE, "warning", 81)
    # fmt: on

    @property
    def completes(self) -> bool:
        """Whether the work of the process is complete."""
        return self in (Reason.DONE, Reason.EARLY_STOPPED)

    @property
    def counted(self) -> bool:
        """Whether the next attempt counts against `max_restarts`."""
        return self.next_attempt is NextAttempt.BACKOFF

    @classmethod
    def of_exit_code(cls, code: int) -> Reason | None:
        """The reason of a trainer that left only its exit code; None: it did not choose to end."""
        return next((reason for reason in cls if reason.exit_code == code and code > 1), None)
