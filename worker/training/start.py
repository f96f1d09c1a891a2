"""What an attempt trains with: the plan, once card, neighbours and earlier attempts were looked at (ADR 0003).

Before anything is loaded. The plan stands where it fits. On a smaller card than it was made for, the ladder is walked
again; where others hold the memory it needs, the job waits or is refused, as it says; after attempts that ran out of
memory in the optimizer, it is that many rungs lower.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from jobs.attempt import Finished
from jobs.errors import DeviceBusy, OutOfMemory, Refused
from jobs.events import MemoryPlanned
from jobs.memory_plan import GIB, MemoryPlan, gibibytes
from jobs.plan import Plan
from jobs.rundir import RunDir
from jobs.spec import JobSpec
from worker.training.journal import Journal
from worker.training.machine.neighbours import ForeignUse, Neighbours
from worker.training.machine.out_of_memory import KINDS, is_out_of_memory
from worker.training.planning.budget import on_card
from worker.training.planning.memory_plan import rungs
from worker.training.planning.prediction import Setting, Shape
from worker.training.planning.ways import LIGHTER, Ways
from worker.training.stop import Stop

log = logging.getLogger("longhaul.trainer")


@dataclass(frozen=True)
class CardNow:
    """A card with our CUDA context on it, and nothing else of ours. Sizes are bytes."""

    name: str
    total: int
    free: int
    foreign: ForeignUse
    """What others hold."""


def planned(
    run: RunDir, spec: JobSpec, plan: Plan, attempt: int, device: torch.device, neighbours: Neighbours,
    journal: Journal, stop: Stop,
) -> Plan:  # fmt: skip
    """The plan of this attempt; its event is noted. A plan of a version that did not plan memory stands as it is.

    Raises Refused (`does_not_fit`, `foreign_memory`), DeviceBusy, OutOfMemory (no rung is left), StopAsked.
    """
    ways = Ways(spec, plan, device)
    card = look(device, neighbours) if device.type == "cuda" else None
    settled = settle(spec, plan, card, times_out_of_memory(run, attempt), ways)
    if settled.memory is None:
        log.warning("plan.json is of a version that did not plan memory: what the peak will be, nobody knows")
        return settled
    if card is not None:
        make_room(spec, settled.memory, card, lambda needed: wait(neighbours, needed, journal, stop))
    journal.note(told(plan, settled, card))
    return settled


@contextlib.contextmanager
def loading(run: RunDir) -> Iterator[None]:
    """Memory that runs out inside, before the first step, ends the attempt with OutOfMemory."""
    try:
        yield
    except KINDS as error:
        if not is_out_of_memory(error):
            raise
        memory = run.plan().memory
        static = (
            "" if memory is None else f", which take {gibibytes(memory.parts['weights'] + memory.parts['optimizer'])}"
        )
        failure = str(error).splitlines()[0][:500]
        raise OutOfMemory(
            f"memory ran out while weights and optimizer states were loaded{static}: {failure}",
            hint="set memory.optimizer: adafactor, take a smaller model, or make room: memory.planned says who was "
            "on the card, too",
        ) from error


def look(device: torch.device, neighbours: Neighbours) -> CardNow:
    """The card as it is."""
    free, total = torch.cuda.mem_get_info(device)
    # Without NVML, all that is not free beyond a usual context is somebody else's.
    foreign = neighbours.use() or ForeignUse(max(0, total - free - GIB))
    return CardNow(torch.cuda.get_device_name(device), total, free, foreign)


def times_out_of_memory(run: RunDir, attempt: int) -> int:
    """How many attempts before this one ended because memory ran out in the optimizer."""
    ends = [line for number in range(1, attempt) for line in run.attempt_lines(number)[-1:]]
    return sum(isinstance(end, Finished) and end.reason == "oom_in_optimizer" for end in ends)


def settle(spec: JobSpec, plan: Plan, card: CardNow | None, lower: int, ways: Ways) -> Plan:
    """The plan for this card (None: CPU), `lower` rungs below the one that fits it.

    Raises Refused (`does_not_fit`), OutOfMemory where there are not so many rungs.
    """
    memory = plan.memory
    if memory is None:
        if lower:
            raise OutOfMemory(
                "memory ran out in the optimizer, and plan.json is of a version that did not plan memory",
                hint="submit the job again: it is then planned",
            )
        return plan
    if card is not None and card.total < memory.budget_bytes:
        if memory.peak_bytes <= card.total:
            memory = memory.model_copy(update={"budget_bytes": card.total})
        else:
            memory = ways.replan(on_card(card.total, "card", card.name))
    if lower:
        memory = lowered(spec, memory, lower, ways.parts)
    chosen = {name: getattr(memory, name) for name in ("micro_batch", "recompute_layers", "optimizer")}
    return plan.model_copy(update={"memory": memory, "resolved": plan.resolved.model_copy(update=chosen)})


def lowered(
    spec: JobSpec, memory: MemoryPlan, lower: int, parts_of: Callable[[Shape, Setting], dict[str, int]]
) -> MemoryPlan:
    """The plan `lower` rungs below. Raises OutOfMemory, saying what would fit, where there are not so many."""
    below = rungs(memory, spec)
    rows, every = below[min(lower, len(below)) - 1] if below else (memory.micro_batch, memory.recompute_layers)
    shape = Shape(rows, memory.input_tokens, memory.target_tokens)
    parts = parts_of(shape, Setting(every, memory.optimizer))
    if lower <= len(below):
        return memory.model_copy(
            update={"micro_batch": rows, "recompute_layers": every, "parts": parts, "peak_bytes": sum(parts.values())}
        )
    needs = sum(parts.values())
    ways_out = [f"give it more than the {gibibytes(memory.budget_bytes)} that it was to have"]
    for name in LIGHTER:
        if name != memory.optimizer and (size := sum(parts_of(shape, Setting(every, name)).values())) < needs:
            ways_out.append(f"set memory.optimizer: {name}, which needs {gibibytes(size)}")
    raise OutOfMemory(
        f"memory ran out in the optimizer in {lower} attempts, and nothing is smaller than micro-batch {rows} with "
        f"recompute_layers {every} and {memory.optimizer}, for which {gibibytes(needs)} were predicted",
        hint=" or ".join(ways_out),
    )


def make_room(spec: JobSpec, memory: MemoryPlan, card: CardNow, wait: Callable[[int], bool]) -> None:
    """Return once the peak fits into what is free of the card. `wait` says whether so many bytes have become free.

    Raises Refused (`foreign_memory`), or DeviceBusy after waiting, where others hold too much of it.
    """
    needed = memory.peak_bytes - memory.parts.get("context", 0)  # the context is there already
    if needed <= card.free or not card.foreign.bytes:
        return
    state = f"{gibibytes(needed)} of the card are needed, {gibibytes(card.free)} of {gibibytes(card.total)} are free"
    if spec.memory.foreign == "refuse":
        raise Refused(
            f"{state}; others hold {card.foreign.text}",
            code="foreign_memory",
            param="memory.foreign",
            hint="end those processes, or set memory.foreign: wait, or a smaller memory.budget",
        )
    if not wait(needed):
        raise DeviceBusy(
            f"{state}, after waiting; others hold {card.foreign.text}",
            hint="the job stays in the queue; end those processes, or set a smaller memory.budget",
        )


def wait(neighbours: Neighbours, needed: int, journal: Journal, stop: Stop) -> bool:
    """`Neighbours.wait`, as a phase of its own."""
    journal.phase("wait")
    try:
        return neighbours.wait(needed, journal, stop)
    finally:
        journal.phase("load")


def told(before: Plan, after: Plan, card: CardNow | None) -> MemoryPlanned:
    """The event: what the attempt trains with, and why that is not what plan.json says, if so."""
    old, new = before.memory, after.memory
    assert old is not None and new is not None, "memory was planned"
    why = []
    if card is not None and old.peak_bytes > card.total:
        why.append(f"{card.name} has {gibibytes(card.total)}, and the plan was made for {gibibytes(old.budget_bytes)}")
    if before.resolved != after.resolved and not why:
        why.append("memory ran out in the optimizer")
    return MemoryPlanned(
        micro_batch=new.micro_batch,
        recompute_layers=new.recompute_layers,
        optimizer=new.optimizer,
        peak_bytes=new.peak_bytes,
        budget_bytes=new.budget_bytes,
        foreign_bytes=None if card is None else card.foreign.bytes,
        foreign=[] if card is None else list(card.foreign.processes),
        changed="; ".join(why) or None,
    )
