"""Every error Longhaul raises on purpose, in one tree.

    LonghaulError
    ├── UserError (ValueError)      the request is invalid; names the dotted key and the value
    ├── NotFound                    no such job, dataset or file
    ├── Conflict                    the state of the job (or of the key) does not allow it
    │   ├── InvalidTransition             a job cannot go from one state to the other
    │   └── Superseded              an attempt wrote after its successor had started
    ├── Damaged                     a run directory that cannot be read
    │   └── NewerFormat             a newer version wrote it
    ├── QueueFull                   too many requests wait already
    ├── WorkerMissing               no worker is there that could do it
    ├── StoreUnavailable            Redis does not answer
    │   └── Recovering              it answers, but was emptied and is being refilled
    └── StageError                  ends a trainer process, with its reason (jobs/reasons.py)
        ├── Rejected                 configuration or guard: never repaired, never retried
        │   └── DoesNotFit          no setting that the job allows fits its budget
        ├── BadData
        ├── NonFinite
        ├── BaseChanged             weights that are not trained have changed
        ├── DiskFull
        ├── DeviceBusy
        ├── HostMemoryInUse         the job waits until others need less of the host's memory
        ├── HostOutOfMemory
        ├── NotPrepared             the job goes back to *prepare*
        ├── RankLost                one process of an attempt on several GPUs has ended, or differs from the others
        ├── RankSilent              one of them does not answer
        ├── GpuLost                 the worker ends, too; the job continues once a worker has a GPU
        ├── NoValidCheckpoint       the job pauses: only its user may discard its progress
        ├── OutOfMemory
        └── OutOfMemoryInOptimizer

The message names the problem, the value and what to do. `hint` is the last part alone, for records and chat.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

from jobs.reasons import Reason

if TYPE_CHECKING:  # the errors are of use where there is no pydantic
    from jobs.memory_plan import MemoryPlan


class LonghaulError(Exception):
    """Root of the tree. `code` is stable and machine-readable; `str(error)` is for people."""

    code: ClassVar[str] = "error"
    hint: str | None = None
    """What to do, where it is not in the message."""


class UserError(LonghaulError, ValueError):
    """The request is invalid. `param` is the dotted key in the job file, or None."""

    code = "invalid_value"

    def __init__(self, message: str, *, param: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.hint = hint


class NotFound(LonghaulError):
    """The job, data set or file does not exist."""

    code = "not_found"


class Conflict(LonghaulError):
    """The current state does not allow it."""

    code = "conflict"


class InvalidTransition(Conflict):
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
    """A file of a run directory is missing or invalid: it was edited, or the disk failed."""

    code = "damaged"

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class NewerFormat(Damaged):
    """A newer version of Longhaul wrote a file of the run directory. It is intact; nothing repairs it."""

    code = "newer_format"


class QueueFull(LonghaulError):
    """As many requests wait as may: nothing was added."""

    code = "queue_full"

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


class WorkerMissing(LonghaulError):
    """No healthy worker of the role that a request needs has been heard of in the last minute."""

    code = "no_worker"

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


class StoreUnavailable(LonghaulError):
    """Redis does not answer."""

    code = "store_unavailable"


class Recovering(StoreUnavailable):
    """Redis was emptied (or is new) and has not been given every run directory yet."""

    code = "recovering"


class StageError(LonghaulError):
    """Ends a trainer process. `code` is finer than `reason`: it names the guard or the defect; users search for it. A
    class of its own has what is caught, or raised in several places."""

    reason: Reason

    def __init__(
        self,
        message: str,
        *,
        reason: Reason | None = None,
        code: str | None = None,
        hint: str | None = None,
        param: str | None = None,
    ) -> None:
        """`reason`: only where the class has none."""
        super().__init__(message)
        self.reason = reason or self.reason
        self.detail_code = code or self.reason.value
        self.hint = hint or self.reason.hint
        self.param = param
        self.parts: tuple[StageError, ...] = (self,)
        """The errors that it is made of, where it names several."""


class Rejected(StageError):
    """The configuration or a guard refuses; nothing is repaired."""

    reason = Reason.REJECTED


class DoesNotFit(Rejected):
    """No setting that the job allows fits its budget. `memory`: the plan of the smallest one."""

    def __init__(self, message: str, memory: MemoryPlan, *, hint: str, param: str) -> None:
        super().__init__(message, code="does_not_fit", hint=hint, param=param)
        self.memory = memory


class BadData(StageError):
    """The data cannot be used."""

    reason = Reason.BAD_DATA


class NonFinite(StageError):
    """Loss or gradient norm is NaN or infinite; the weights were not touched."""

    reason = Reason.NON_FINITE


class BaseChanged(StageError):
    """Weights that are not trained are no longer what they were when they were loaded."""

    reason = Reason.BASE_CHANGED


class DiskFull(StageError):
    """There is no room left for what must be written."""

    reason = Reason.DISK_FULL


class DeviceBusy(StageError):
    """Another trainer holds the GPU (or the job) and did not release it in time."""

    reason = Reason.DEVICE_BUSY


class HostMemoryInUse(StageError):
    """Others have memory of the host that the job needs."""

    reason = Reason.HOST_MEMORY_IN_USE


class HostOutOfMemory(StageError):
    """The host has no room now for what must be in its memory."""

    reason = Reason.HOST_OUT_OF_MEMORY


class NotPrepared(StageError):
    """The prepared model or data is missing or damaged."""

    reason = Reason.NOT_PREPARED


class RankLost(StageError):
    """One of the processes of an attempt on several GPUs has ended without a reason, or differs from the others."""

    reason = Reason.CRASH

    def __init__(self, message: str, *, code: str = "rank_lost", hint: str | None = None) -> None:
        super().__init__(message, code=code, hint=hint)


class RankSilent(StageError):
    """One of the processes of an attempt on several GPUs does not answer."""

    reason = Reason.STALLED


class GpuLost(StageError):
    """The worker's GPU is no longer usable. A worker that ends because of it has the same exit code."""

    reason = Reason.GPU_LOST


class NoValidCheckpoint(StageError):
    """The job had checkpoints, and none of them verifies."""

    reason = Reason.NO_VALID_CHECKPOINT


class OutOfMemory(StageError):
    """Memory ran out inside a step at the smallest micro-batch (or `memory.on_oom` is `fail`)."""

    reason = Reason.OUT_OF_MEMORY


class OutOfMemoryInOptimizer(StageError):
    """Memory ran out inside `optimizer.step()`: nothing is repeated, the attempt ends."""

    reason = Reason.OOM_IN_OPTIMIZER


# -- several at once -----------------------------------------------------------------------------------------


class Mistakes:
    """Errors that were kept back, in order."""

    def __init__(self) -> None:
        self._errors: list[StageError] = []

    @contextmanager
    def kept_back(self) -> Iterator[None]:
        """Keep what is raised here, and go on after it."""
        try:
            yield
        except (BadData, Rejected) as error:
            self.add(error)

    def add(self, error: StageError) -> None:
        """Keep an error; of one that is made of several, each. What was said already is not said again."""
        known = {str(one) for one in self._errors}
        self._errors += [one for one in error.parts if str(one) not in known]

    def raise_all(self) -> None:
        """Raise the only error as it is; of several, one of the first one's kind that names them all."""
        if not self._errors:
            return
        first = self._errors[0]
        if len(self._errors) == 1:
            raise first
        lines = [f"- {one}" + (f"\n  hint: {one.hint}" if one.hint else "") for one in self._errors]
        together = type(first)("\n".join([f"{len(lines)} errors:", *lines]), code=first.detail_code, param=first.param)
        together.parts = tuple(self._errors)
        raise together
