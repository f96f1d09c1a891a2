"""What is done about memory that ran out inside a step, before that very step is done again (ADR 0003, 5).

    cause            first time in a step                        then
    fragmentation    the cache is cleared, same size again       as exhausted; the next epoch has the old size again
    other_processes  waited for, if the job says so; same size   as exhausted; the next epoch has the old size again
    exhausted        the length bucket gets half its size        half of that, down to one row

A bucket that has its old size again, and fails again, gets at once the size that did before: one error an epoch.
"""

from __future__ import annotations

import gc
import json
import logging
import pickle
import resource
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from jobs.errors import OutOfMemory
from jobs.memory_plan import Candidate, MemoryPlan
from jobs.plan import Plan
from jobs.spec import JobSpec
from jobs.text.units import bytes_alike, format_bytes
from jobs.trainer_facts import OomRecovered
from worker.training.context import TrainingContext
from worker.training.dataset.data import Int64, Rows
from worker.training.machine.out_of_memory import KINDS, MemoryShortage, figures, is_out_of_memory
from worker.training.machine.usage import Cache
from worker.training.planning.alternatives import LIGHTER, Alternatives
from worker.training.planning.ladder import Setting
from worker.training.steps.shape import MicroBatchShape, SafeSize
from worker.training.tasks.registry import task_of
from worker.training.tasks.task import Batch, Limit

# -- oom reports -------------------------------------------------------------------------------------------------------
# What is kept about an out-of-memory error, for later diagnosis: a folder in the run directory.
#
#     oom_reports/step-00000123-1/  report.json; on CUDA memory_summary.txt, snapshot.pickle (pytorch.org/memory_viz)
#
# The allocator's history is not in the snapshot: recording it would cost every step something.

FOLDER = "oom_reports"
DRIVER = Path("/proc/driver/nvidia/version")
MOST_FOLDERS = 10
"""Of one run. What comes later has its event only."""

log = logging.getLogger("longhaul.trainer")


class OomReports:
    """The folder `oom_reports/` of one run directory."""

    def __init__(self, run: Path) -> None:
        self._folder = run / FOLDER

    def wanted(self) -> bool:
        """Whether another error would be kept."""
        try:
            return not self._folder.exists() or sum(1 for _ in self._folder.iterdir()) < MOST_FOLDERS
        except OSError:
            return False

    def keep(self, step: int, shortage: MemoryShortage, about: Mapping[str, Any]) -> str | None:
        """Write one folder; its name, relative to the run directory. None if there are enough, or it cannot be written.

        `about`: whatever else belongs into report.json.
        """
        if not self.wanted():
            return None
        number = 1
        while (folder := self._folder / f"step-{step:08d}-{number}").exists():
            number += 1
        try:
            self._folder.mkdir(exist_ok=True)
            folder.mkdir()
            _write(folder, step, shortage, about)
        except Exception as error:  # a full disk, no memory for this either: no reason to end a run that can continue
            log.warning("no report is kept about the memory that ran out in step %d: %r", step, error)
            shutil.rmtree(folder, ignore_errors=True)
            return None
        return f"{FOLDER}/{folder.name}"


def _write(folder: Path, step: int, shortage: MemoryShortage, about: Mapping[str, Any]) -> None:
    other_processes = shortage.other_processes
    report = {
        "step": step,
        "message": shortage.message,
        "cause": shortage.cause,
        "requested_bytes": shortage.requested,
        "allocated_bytes": shortage.figures.allocated,
        "reserved_bytes": shortage.figures.reserved,
        "free_bytes": shortage.figures.free,
        "other_processes_bytes": None if other_processes is None else other_processes.bytes,
        "processes": [] if other_processes is None else [each.model_dump() for each in other_processes.processes],
        **about,
        "versions": _versions(shortage.device),
        "traceback": "".join(shortage.trace).splitlines(),
    }
    (folder / "report.json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    if shortage.summary is not None:
        (folder / "memory_summary.txt").write_text(shortage.summary)
    if shortage.snapshot is not None:
        with open(folder / "snapshot.pickle", "wb") as file:
            pickle.dump(shortage.snapshot, file)


def _versions(device: str) -> dict[str, str | None]:
    versions: dict[str, str | None] = {"torch": torch.__version__, "cuda": torch.version.cuda}
    if device == "cuda":
        versions["gpu"] = torch.cuda.get_device_name()
        versions["driver"] = DRIVER.read_text().splitlines()[0] if DRIVER.exists() else None
    return versions


# -- remedy ------------------------------------------------------------------------------------------------------------
# What would have fitted when not even one row did, by the plan's predictions.


def less(spec: JobSpec, plan: Plan) -> str:
    """What helps in any case, for people."""
    return f"lower {' and '.join(task_of(spec, plan.task).limit_keys)}, or take a smaller model"


def what_would_fit(spec: JobSpec, plan: Plan, shortage: MemoryShortage) -> str:
    """What to do, for people, once the memory of the failed pass is free. May take seconds: the attempt is over anyway.

    What was available is, on a GPU, what the process held when it was refused more; on a CPU, what it can still get.
    """
    try:
        hints = [_hint(spec, plan, shortage)]
    except Exception as error:  # a prediction that fails must not take the place of the error that it is to explain
        log.warning("what would have fitted cannot be predicted: %r", error)
        hints = [f"set memory.activation_checkpointing: 1, {less(spec, plan)}"]
    if shortage.other_processes is not None and shortage.other_processes.bytes and not shortage.limited:
        hints.append(f"or give it the whole GPU: others hold {shortage.other_processes.text}")
    return "; ".join(hints)


def _hint(spec: JobSpec, plan: Plan, shortage: MemoryShortage) -> str:
    memory, got = plan.memory, _got(plan.memory, shortage)
    if memory is None or got is None:
        return f"set memory.activation_checkpointing: 1, {less(spec, plan)}"
    # In order of score: the first is the fastest.
    fitting = [
        each
        for each in memory.candidates
        if each.peak_bytes < got
        and (each.optimizer, each.activation_checkpointing)
        != (plan.resolved.optimizer, plan.resolved.activation_checkpointing)
    ]
    if fitting:
        settings, size = _settings(plan, fitting[0]), fitting[0].peak_bytes
    elif (found := _one_row(spec, plan, memory, got)) is not None:
        settings, size = found
    else:
        return f"the process got {format_bytes(got)}, and no setting is predicted to need less: {less(spec, plan)}"
    needs, instead_of, there = bytes_alike(size, memory.peak_bytes, got)
    return f"set {settings} (predicted {needs} instead of {instead_of}; the process got {there})"


def _one_row(spec: JobSpec, plan: Plan, memory: MemoryPlan, got: int) -> tuple[str, int] | None:
    """Settings that were not tried, with which a micro-batch of one row fits, and their peak; None: there are none."""
    if plan.model.folder is None:
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))  # a budget is for training, which is over
    try:
        alternatives = Alternatives(spec, plan, torch.device(memory.device))
        shape, now = MicroBatchShape(1, memory.input_tokens, memory.target_tokens), plan.resolved
        for optimizer in (now.optimizer, *LIGHTER):
            for every in (0, 2, 1):
                found = Candidate(
                    optimizer=optimizer,
                    activation_checkpointing=every,
                    micro_batch=1,
                    peak_bytes=sum(alternatives.parts(shape, Setting(every, optimizer)).values()),
                    slowdown=1.0,
                    score=0.0,
                )
                if found.peak_bytes < got and (optimizer, every) != (now.optimizer, now.activation_checkpointing):
                    return _settings(plan, found), found.peak_bytes
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    return None


def _got(memory: MemoryPlan | None, shortage: MemoryShortage) -> int | None:
    """Bytes that the process had at least, in the terms of the plan: on a GPU with its CUDA context."""
    if shortage.device != "cuda":
        # Of tensors, weights and states are left.
        free = figures(torch.device("cpu")).free
        return None if memory is None or free is None else free + memory.parts["weights"] + memory.parts["optimizer"]
    if shortage.figures.reserved is None:
        return None
    return shortage.figures.reserved + (memory.parts.get("context", 0) if memory is not None else 0)


def _settings(plan: Plan, candidate: Candidate) -> str:
    settings = []
    if candidate.optimizer != plan.resolved.optimizer:
        settings.append(f"memory.optimizer: {candidate.optimizer}")
    if candidate.activation_checkpointing != plan.resolved.activation_checkpointing:
        settings.append(f"memory.activation_checkpointing: {candidate.activation_checkpointing}")
    return ", ".join([*settings, f"memory.micro_batch: {max(1, candidate.micro_batch)}"])


# -- recovery ----------------------------------------------------------------------------------------------------------


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
