"""What an attempt trains with: the plan, given the GPU, other processes and earlier attempts (ADR 0003).

Before anything is loaded. The plan stays if it fits. On a smaller GPU than it was made for, the ladder is walked
again; if others hold the memory it needs, the job waits or is refused, as it says; after attempts that ran out of
memory in the optimizer, it is that many fallbacks further down.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from jobs.attempt import Finished
from jobs.disk.rundir import RunDir
from jobs.errors import BadData, DeviceBusy, HostMemoryInUse, HostOutOfMemory, NotPrepared, OutOfMemory, Rejected
from jobs.gpus import HOST_ROOM, GpuFacts
from jobs.memory_plan import MemoryPlan
from jobs.plan import Plan
from jobs.reasons import Reason
from jobs.spec import JobSpec
from jobs.text.units import GIB, bytes_alike, format_bytes
from jobs.trainer_facts import MemoryPlanned
from worker.training.dataset.data import PreparedDataset
from worker.training.journal import Journal, StopSignal
from worker.training.machine.device import has_native_bf16
from worker.training.machine.host import host_memory
from worker.training.machine.out_of_memory import KINDS, is_of_host, is_out_of_memory, message_of
from worker.training.machine.process_monitor import OtherProcessesUse, ProcessMonitor
from worker.training.models.model_store import check_files
from worker.training.planning.alternatives import LIGHTER, Alternatives
from worker.training.planning.budget import HOST_RESERVE, on_gpu
from worker.training.planning.ladder import Setting
from worker.training.planning.memory_plan import fallbacks
from worker.training.steps.shape import MicroBatchShape

log = logging.getLogger("longhaul.trainer")


@dataclass(frozen=True)
class GpuNow:
    """A GPU with our CUDA context on it, and nothing else of ours. Sizes are bytes."""

    name: str
    total: int
    free: int
    other_processes: OtherProcessesUse
    """What others hold."""
    native_bf16: bool = True


def planned(run: RunDir) -> Plan:
    """plan.json; where one of an earlier version does not say how many GPUs train, the job does."""
    plan, asked = run.plan(), run.spec().resources.gpus
    if asked == plan.resolved.gpus:
        return plan
    return plan.model_copy(update={"resolved": plan.resolved.model_copy(update={"gpus": asked})})


def plan_attempt(
    run: RunDir, spec: JobSpec, plan: Plan, attempt: int, device: torch.device, monitor: ProcessMonitor,
    journal: Journal, stop: StopSignal, traces: Path | None,
) -> Plan:  # fmt: skip
    """The plan of this attempt; its event is noted. A plan of a version that did not plan memory stands as it is.
    `traces`: as of `Predictor`.

    Raises Rejected (`does_not_fit`, `gpu_memory_in_use`), DeviceBusy, HostMemoryInUse, HostOutOfMemory, OutOfMemory (no
    fallback is left), StopAsked.
    """
    alternatives = Alternatives(spec, plan, device, traces)
    gpu = gpu_now(device, monitor) if device.type == "cuda" else None
    adjusted = adjust_plan(spec, plan, gpu, times_out_of_memory(run, attempt), alternatives)
    if adjusted.memory is None:
        log.warning("plan.json is of a version that did not plan memory: what the peak will be, nobody knows")
        return adjusted
    if gpu is not None:
        check_host(adjusted.memory)
        make_room(spec, adjusted.memory, gpu, lambda needed: wait(monitor, needed, journal, stop))
    journal.note(planned_event(plan, adjusted, gpu))
    return adjusted


def reserved_bytes(plan: Plan) -> int | None:
    """What a trial has of a GPU; None on a CPU, and in a plan of a version that did not plan memory."""
    return None if plan.memory is None else plan.memory.reserved_bytes


def within_reserved(plan: Plan) -> Plan:
    """The plan of a trial, with what it reserves as its budget: it trains alike whether others are beside it or not."""
    memory, budget = plan.memory, reserved_bytes(plan)
    if memory is None or budget is None:
        return plan
    change = {"budget_bytes": budget, "margin_bytes": budget - memory.peak_bytes}
    return plan.model_copy(update={"memory": memory.model_copy(update=change)})


@contextlib.contextmanager
def loading(run: RunDir) -> Iterator[None]:
    """Memory that runs out inside, before the first step, ends the attempt with OutOfMemory; where that is the host's,
    and a GPU trains, with HostOutOfMemory."""
    try:
        yield
    except KINDS as error:
        if not is_out_of_memory(error):
            raise
        memory = run.plan().memory
        if memory is not None and memory.device == "cuda" and is_of_host(error):
            states = 0 if memory.host is None else memory.host.optimizer_bytes
            there = f", of which states of the optimizer take {format_bytes(states)}" if states else ""
            raise HostOutOfMemory(
                f"the host's memory ran out while the job was loaded{there}: {message_of(error)}",
                hint="end what else uses the memory of that host; the job tries again by itself, a limited number of "
                "times",
            ) from error
        parts = {} if memory is None else memory.parts
        static = f", which take {format_bytes(parts['weights'] + parts['optimizer'])}" if parts else ""
        raise OutOfMemory(
            f"memory ran out while weights and optimizer states were loaded{static}: {message_of(error)}",
            hint="set memory.optimizer: adafactor, take a smaller model, or make room: memory.planned says who was "
            "on the GPU, too",
        ) from error


def open_stores(run: RunDir, plan: Plan, journal: Journal, *, weights: bool) -> tuple[Path, PreparedDataset]:
    """The folder of the prepared model, and the prepared data; every byte read (the model's, if `weights` are needed).

    Raises NotPrepared where a file is gone or its content has changed. *prepare* then makes it again. A model that is
    as it was made and is refused stays refused: nothing is repaired.
    """
    model, prepared = plan.model.folder, plan.data.prepared
    if model is None or prepared is None:
        raise NotPrepared("plan.json names no prepared model and data", hint="run the stage prepare first")
    try:
        check_files(Path(model), journal.progress, weights=weights)
        return Path(model), PreparedDataset.open(Path(prepared), thorough=True, progress=journal.progress)
    except BadData as error:
        raise NotPrepared(
            f"the prepared model or data is gone or damaged: {error}",
            hint="both stores must be the same folders, LONGHAUL_MODELS and LONGHAUL_PREPARED, for all workers; "
            f"then `longhaul resume {run.id}`",
        ) from error


def gpu_now(device: torch.device, monitor: ProcessMonitor) -> GpuNow:
    """The GPU as it is."""
    free, total = torch.cuda.mem_get_info(device)
    # Without NVML, all that is not free beyond a usual context is somebody else's.
    other_processes = monitor.use() or OtherProcessesUse(max(0, total - free - GIB))
    return GpuNow(torch.cuda.get_device_name(device), total, free, other_processes, has_native_bf16(device))


def times_out_of_memory(run: RunDir, attempt: int) -> int:
    """How many attempts before this one ended because memory ran out in the optimizer."""
    ends = [line for number in range(1, attempt) for line in run.attempt_lines(number)[-1:]]
    return sum(isinstance(end, Finished) and end.reason is Reason.OOM_IN_OPTIMIZER for end in ends)


def adjust_plan(spec: JobSpec, plan: Plan, gpu: GpuNow | None, lower: int, alternatives: Alternatives) -> Plan:
    """The plan for this GPU (None: CPU), `lower` fallbacks below the one that fits it.

    Raises Rejected (`does_not_fit`), or OutOfMemory if there are fewer fallbacks.
    """
    memory = plan.memory
    if memory is None:
        if lower:
            raise OutOfMemory(
                "memory ran out in the optimizer, and plan.json is of a version that did not plan memory",
                hint="submit the job again: it is then planned",
            )
        return plan
    if gpu is not None and gpu.total < memory.budget_bytes:
        if memory.peak_bytes <= gpu.total:
            memory = memory.model_copy(update={"budget_bytes": gpu.total})
        else:
            facts = GpuFacts(gpu.name, gpu.total, native_bf16=gpu.native_bf16)
            memory = alternatives.replan(on_gpu(gpu.total, "gpu", facts))
    if lower:
        memory = apply_fallbacks(spec, memory, lower, alternatives)
    chosen = {
        name: getattr(memory, name) for name in ("micro_batch", "activation_checkpointing", "optimizer", "compile")
    }
    return plan.model_copy(update={"memory": memory, "resolved": plan.resolved.model_copy(update=chosen)})


def apply_fallbacks(spec: JobSpec, memory: MemoryPlan, lower: int, alternatives: Alternatives) -> MemoryPlan:
    """The plan `lower` fallbacks below. Raises OutOfMemory, with what would fit, if there are fewer."""
    below = fallbacks(memory, spec)
    rows, every = below[min(lower, len(below)) - 1] if below else (memory.micro_batch, memory.activation_checkpointing)
    shape = MicroBatchShape(rows, memory.input_tokens, memory.target_tokens)
    parts_of = alternatives.parts
    parts = parts_of(shape, Setting(every, memory.optimizer))
    if lower <= len(below):
        return memory.model_copy(
            update={
                "micro_batch": rows,
                "activation_checkpointing": every,
                "compile": memory.compile and alternatives.uncompiled(every) is None,
                "parts": parts,
                "peak_bytes": sum(parts.values()),
            }
        )
    needs = sum(parts.values())
    hints = [f"give it more than the {format_bytes(memory.budget_bytes)} that it was to have"]
    for name in LIGHTER:
        if name != memory.optimizer and (size := sum(parts_of(shape, Setting(every, name)).values())) < needs:
            hints.append(f"set memory.optimizer: {name}, which needs {format_bytes(size)}")
    raise OutOfMemory(
        f"memory ran out in the optimizer in {lower} attempts, and nothing is smaller than micro-batch {rows} with "
        f"activation_checkpointing {every} and {memory.optimizer}, for which {format_bytes(needs)} were predicted",
        hint=" or ".join(hints),
    )


def check_host(memory: MemoryPlan) -> None:
    """Raises HostMemoryInUse if the host is to hold the states of the optimizer, and others have that memory now;
    HostOutOfMemory if it has too little in all."""
    needed = 0 if memory.host is None else memory.host.optimizer_bytes
    host = host_memory()
    if needed and needed + HOST_ROOM > host.available:
        states, free, total = bytes_alike(needed, host.available, host.total)
        message = (
            f"{states} of the host's memory are needed for the states of adamw_offload, {free} of {total} are free"
        )
        if needed + HOST_RESERVE > host.total:  # others need not go away for it: the system itself takes as much
            raise HostOutOfMemory(message)
        raise HostMemoryInUse(message)


def make_room(spec: JobSpec, memory: MemoryPlan, gpu: GpuNow, wait: Callable[[int], bool]) -> None:
    """Return once the peak fits into what is free of the GPU. `wait` returns whether so many bytes have become free.

    Raises Rejected (`gpu_memory_in_use`), or DeviceBusy after waiting, if others hold too much of it.
    """
    needed = memory.peak_bytes - memory.parts.get("context", 0)  # the context is there already
    if needed <= gpu.free or not gpu.other_processes.bytes:
        return
    wanted, free, total = bytes_alike(needed, gpu.free, gpu.total)
    state = f"{wanted} of the GPU are needed, {free} of {total} are free"
    if spec.memory.other_processes == "fail":
        raise Rejected(
            f"{state}; others hold {gpu.other_processes.text}",
            code="gpu_memory_in_use",
            param="memory.other_processes",
            hint="end those processes, or set memory.other_processes: wait, or a smaller memory.budget",
        )
    if not wait(needed):
        raise DeviceBusy(
            f"{state}, after waiting; others hold {gpu.other_processes.text}",
            hint="the job stays in the queue; end those processes, or set a smaller memory.budget",
        )


def wait(monitor: ProcessMonitor, needed: int, journal: Journal, stop: StopSignal) -> bool:
    """`ProcessMonitor.wait`, as a phase of its own."""
    journal.phase("wait")
    try:
        return monitor.wait(needed, journal, stop)
    finally:
        journal.phase("load")


def planned_event(before: Plan, after: Plan, gpu: GpuNow | None) -> MemoryPlanned:
    """The event: what the attempt trains with, and why, if that differs from plan.json."""
    old, new = before.memory, after.memory
    assert old is not None and new is not None, "memory was planned"
    why = []
    if gpu is not None and old.peak_bytes > gpu.total:
        has, planned = bytes_alike(gpu.total, old.budget_bytes)
        why.append(f"{gpu.name} has {has}, and the plan was made for {planned}")
    if before.resolved != after.resolved and not why:
        why.append("memory ran out in the optimizer")
    return MemoryPlanned(
        micro_batch=new.micro_batch,
        activation_checkpointing=new.activation_checkpointing,
        optimizer=new.optimizer,
        peak_bytes=new.peak_bytes,
        budget_bytes=new.budget_bytes,
        other_processes_bytes=None if gpu is None else gpu.other_processes.bytes,
        other_processes=[] if gpu is None else list(gpu.other_processes.processes),
        changed="; ".join(why) or None,
        evaluation=new.evaluation,
    )
