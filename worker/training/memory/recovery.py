"""What is done about memory that ran out inside a step, before that very step is done again (ADR 0003, 5).

    cause            first time in a step                        then
    fragmentation    the cache is cleared, same size again       as exhausted; the next epoch has the old size again
    other_processes  waited for, if the job says so; same size   as exhausted; the next epoch has the old size again
    exhausted        the length bucket gets half its size        half of that, down to one row

A bucket that has its old size again, and fails again, gets at once the size that did before: one error an epoch.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from jobs.errors import OutOfMemory
from jobs.events import OomRecovered
from worker.training.context import TrainingContext
from worker.training.dataset.data import Int64, Rows
from worker.training.machine.out_of_memory import KINDS, MemoryShortage, figures, is_out_of_memory
from worker.training.machine.usage import Cache
from worker.training.memory.oom_reports import OomReports
from worker.training.memory.remedy import what_would_fit
from worker.training.steps.safe_size import SafeSize
from worker.training.steps.shape import MicroBatchShape
from worker.training.tasks.task import Batch, Limit

log = logging.getLogger("longhaul.trainer")


@dataclass
class Pass:
    """Forward and backward over the rows of one step, as far as it came."""

    step: int
    groups: Sequence[Int64]
    began: float
    """By time.perf_counter()."""
    batches: Sequence[Batch] = ()
    """None before they were cut."""
    at: int | None = None
    """Which of them is in the model."""
    cutting_s: float = 0.0
    """Seconds until they were cut."""
    loss: torch.Tensor | None = None
    """Mean of a target token (0-dim), once all went through the model."""
    failed: MicroBatchShape | None = None
    """Of the micro-batch for which memory ran out, where another rank had it."""

    @property
    def target_tokens(self) -> int:
        """Those that the loss counts."""
        return sum(batch.target_tokens for batch in self.batches)

    def shape(self, rows: Rows, limit: Limit) -> MicroBatchShape:
        """That of the micro-batch in the model; before there was one, that of the longest."""
        if self.failed is not None:
            return self.failed
        if self.at is not None:
            return self.batches[self.at].shape
        return max(limit.shapes(rows, self.groups), key=lambda shape: shape.input_width + shape.target_width)


class Recovery:
    """One per attempt. `retry` may be called any number of times for a step."""

    def __init__(self, context: TrainingContext) -> None:
        self.oom_reports = OomReports(context.run.path)
        self._context = context
        self._spec, self._cache = context.spec, context.cache
        self._model, self._rows = context.loaded.model, context.data.train
        self._retried: set[tuple[int, str]] = set()
        """Step and cause of each retry at the same size."""
        self._waited_for_bytes = 0
        """Bytes of others that were waited for in vain: only more than that is worth another wait."""

    def retry(self, shortage: MemoryShortage, failed: Pass, limit: Limit) -> Limit:
        """Free memory; returns the limit with which to redo the step. Call it outside the `except`.

        Raises OutOfMemory at one row, where the job says `on_oom: fail`, and if memory runs out here, too.
        Raises StopAsked while waiting for others.
        """
        try:
            return self._retry(shortage, failed, limit)
        except KINDS as error:
            if not is_out_of_memory(error):
                raise
            another = str(error).splitlines()[:1]
        raise OutOfMemory(
            f"memory ran out in step {failed.step}: {shortage.text}; and again while room was made: {another}",
            hint="the checkpoints are intact; look at what else uses the memory of this machine or GPU",
        )

    def _retry(self, shortage: MemoryShortage, failed: Pass, limit: Limit) -> Limit:
        other_processes = None
        if failed.failed is None:  # what others hold of the GPU of another rank is not known here
            other_processes = self._context.monitor.use()
            shortage = shortage.beside(other_processes)
        shape = failed.shape(self._rows, limit)
        bucket = shape.bucket
        self._model.zero_grad(set_to_none=True)  # of all its micro-batches: every one of them is done again
        release_memory(self._cache)
        kept = self._keep(shortage, failed, limit, bucket)
        smaller = limit.lowered(self._rows, failed.groups, shape, passing=shortage.cause != "exhausted")
        if self._spec.memory.on_oom == "fail":
            raise self._fail_as_configured(
                shortage, failed, limit.size(bucket), None if smaller is None else smaller.size(bucket)
            )
        same = self._retry_same_size(shortage, failed.step, limit.safe.get(bucket))
        chosen = limit if same else smaller
        if chosen is None:
            raise self._one_row_too_many(shortage, failed.step, bucket)
        self._context.journal.note(
            OomRecovered(
                step=failed.step,
                micro_batch_before=limit.size(bucket),
                micro_batch_after=chosen.size(bucket),
                message=shortage.text,
                milliseconds_lost=(time.perf_counter() - failed.began) * 1000,
                cause=shortage.cause,
                bucket=bucket,
                requested_bytes=shortage.requested,
                allocated_bytes=shortage.figures.allocated,
                reserved_bytes=shortage.figures.reserved,
                other_processes_bytes=None if other_processes is None else other_processes.bytes,
                report=kept,
            )
        )
        return chosen

    def _retry_same_size(self, shortage: MemoryShortage, step: int, known: SafeSize | None) -> bool:
        """Whether to try the same size again, once per step; not if the bucket has failed in an earlier epoch, too.

        After fragmentation the cache is clear by now. If other processes hold the memory, this waits for them.
        """
        if shortage.cause == "exhausted" or (step, shortage.cause) in self._retried:
            return False
        if known is not None and known.fallback is not None:
            return False
        if shortage.cause == "other_processes" and not self._others_left(shortage):
            return False
        self._retried.add((step, shortage.cause))
        return True

    def _others_left(self, shortage: MemoryShortage) -> bool:
        other_processes = shortage.other_processes
        assert other_processes is not None
        if other_processes.bytes <= self._waited_for_bytes:
            return False
        left = others_left(self._context, shortage)
        if not left:
            self._waited_for_bytes = other_processes.bytes
        return left

    def _keep(self, shortage: MemoryShortage, failed: Pass, limit: Limit, bucket: str) -> str | None:
        shapes = [asdict(batch.shape) | {"failed": index == failed.at} for index, batch in enumerate(failed.batches)]
        about = {
            "bucket": bucket,
            "micro_batch": limit.micro_batch,
            "safe": {name: asdict(known) for name, known in limit.safe.items()},
            "micro_batches": shapes,
        }
        self._context.journal.fence()
        return self.oom_reports.keep(failed.step, shortage, about)

    def _fail_as_configured(
        self, shortage: MemoryShortage, failed: Pass, size: int, smaller: int | None
    ) -> OutOfMemory:
        """The job says `on_oom: fail`."""
        way = "memory.on_oom: recover redoes such a step in smaller micro-batches"
        if smaller is not None:
            way += f", here of {smaller} instead of {size} rows; or set memory.micro_batch: {smaller}"
        return OutOfMemory(
            f"memory ran out in step {failed.step} at micro-batch {size}, and memory.on_oom is fail: {shortage.text}",
            hint=way,
        )

    def _one_row_too_many(self, shortage: MemoryShortage, step: int, bucket: str) -> OutOfMemory:
        return OutOfMemory(
            f"memory ran out in step {step} at micro-batch 1, one row of {bucket}: {shortage.text}",
            hint=what_would_fit(self._spec, self._context.plan, shortage),
        )


def others_left(context: TrainingContext, shortage: MemoryShortage) -> bool:
    """Whether the others on the GPU leave, if the job says to wait for them. Call it when memory has been released.

    Raises StopAsked.
    """
    if context.spec.memory.other_processes != "wait":
        return False
    # What the pass held and wanted, less what is still held now that its gradients and activations are gone.
    held, holds = shortage.figures.reserved or 0, figures(context.cache.device).reserved or 0
    return context.monitor.wait(max(0, held - holds) + shortage.asked, context.journal, context.stop)


def release_memory(cache: Cache) -> None:
    """Clear the cache of what a failed pass has left, cycles of objects included."""
    try:
        if cache.device.type == "cuda":  # elsewhere clearing does it
            gc.collect()
        cache.clear()
    except KINDS as error:  # a driver may answer late; whether there is room, what is done again will tell
        if not is_out_of_memory(error):
            raise
        log.warning("memory ran out while it was given back: %s", error)
