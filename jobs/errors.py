"""Every error Longhaul raises on purpose, in one tree.

    LonghaulError
    ├── UserError (ValueError)      what was asked cannot be done as written; says the dotted key and the value
    ├── NotFound                    no such job, dataset or file
    ├── Conflict                    the state of the job (or of the key) does not allow it
    │   ├── IllegalMove             a job cannot go from one state to the other
    │   └── Superseded              an attempt wrote after its successor had started
    ├── Damaged                     a run directory that cannot be read
    ├── StoreUnavailable            Redis does not answer
    └── StageError                  ends a trainer process, with the typed reason of the contract (design §7)
        ├── Refused                 configuration or guard: never repaired, never retried
        ├── BadData
        ├── NonFinite
        ├── DiskFull
        ├── DeviceBusy
        ├── OutOfMemory
        └── OutOfMemoryInOptimizer

The message says what, the value, and the way out. `hint` is the way out alone, for records and chat messages.
"""

from __future__ import annotations

from typing import ClassVar


class LonghaulError(Exception):
    """Root of the tree. `code` is stable and machine-readable; `str(error)` is for people."""

    code: ClassVar[str] = "error"


class UserError(LonghaulError, ValueError):
    """What was asked cannot be done. `param` is the dotted key in the job file, or None."""

    code = "invalid_value"

    def __init__(self, message: str, *, param: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.hint = hint


class NotFound(LonghaulError):
    """There is no such thing."""

    code = "not_found"


class Conflict(LonghaulError):
    """The present state does not allow it."""

    code = "conflict"


class IllegalMove(Conflict):
    """A job cannot go from state `source` to state `target`."""

    code = "illegal_move"

    def __init__(self, source: str, target: str) -> None:
        super().__init__(f"a job that is {source} cannot become {target}")
        self.source = source
        self.target = target


class Superseded(Conflict):
    """Attempt `attempt` wrote although attempt `current` had started."""

    code = "superseded"

    def __init__(self, attempt: int, current: int) -> None:
        super().__init__(f"attempt {attempt} is over: attempt {current} has started")
        self.attempt = attempt
        self.current = current


class Damaged(LonghaulError):
    """A file of a run directory has a line that nobody could have written: somebody edited it, or the disk failed."""

    code = "damaged"


class StoreUnavailable(LonghaulError):
    """Redis does not answer."""

    code = "store_unavailable"


class StageError(LonghaulError):
    """Ends a trainer process. `reason` and `exit_code` are those of the trainer contract (design §7).

    `code` is finer than `reason`: it names the guard or the defect, and is what users search for.
    """

    reason: ClassVar[str] = "crash"
    exit_code: ClassVar[int] = 1

    def __init__(
        self, message: str, *, code: str | None = None, hint: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.detail_code = code or self.reason
        self.hint = hint
        self.param = param


class Refused(StageError):
    """The configuration or a guard refuses; nothing is repaired."""

    reason = "refused"
    exit_code = 77


class BadData(StageError):
    """The data cannot be used."""

    reason = "bad_data"
    exit_code = 77


class NonFinite(StageError):
    """Loss or gradient norm is NaN or infinite; the weights were not touched."""

    reason = "non_finite"
    exit_code = 78


class DiskFull(StageError):
    """There is no room left for what must be written."""

    reason = "disk_full"
    exit_code = 78


class DeviceBusy(StageError):
    """Another trainer holds the card (or the job) and did not let go in time."""

    reason = "device_busy"
    exit_code = 75


class OutOfMemory(StageError):
    """Memory ran out inside a step at the smallest micro-batch (or `memory.on_oom` is `fail`)."""

    reason = "out_of_memory"
    exit_code = 76


class OutOfMemoryInOptimizer(StageError):
    """Memory ran out inside `optimizer.step()`: nothing is repeated, the attempt ends."""

    reason = "oom_in_optimizer"
    exit_code = 76
