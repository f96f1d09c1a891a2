"""What a job may use of the memory where it trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jobs.cards import REFERENCE, CardFacts
from jobs.errors import Refused
from jobs.memory_plan import GIB, gibibytes
from jobs.spec import MemorySpec
from worker.training.machine.host import host_memory

DRIVER_BYTES = GIB // 2
"""Of what nvidia-smi calls the card's memory, what the driver keeps: torch finds 31.4 GiB of an RTX 5090's 31.84."""
MARGIN = 0.03
"""Share of the budget on a card that stays free, for free memory in pieces too small to use."""


@dataclass(frozen=True)
class Budget:
    """Bytes that one attempt may use, CUDA context included."""

    bytes: int
    source: Literal["job", "card", "assumed", "host"]
    card: str | None
    """As its driver names it; None on a CPU."""
    margin: int
    """Of them, kept free."""

    @property
    def limit(self) -> int:
        """What a peak may reach."""
        return self.bytes - self.margin

    @property
    def text(self) -> str:
        """For people, such as `31.3 GiB (NVIDIA GeForce RTX 5090)`."""
        named = {
            "job": "memory.budget",
            "card": f"{self.card}",
            "assumed": f"{self.card}, assumed",
            "host": "free here",
        }
        return f"{gibibytes(self.bytes)} ({named[self.source]})"


def find_budget(memory: MemorySpec, device: Literal["cpu", "cuda"], card: CardFacts | None) -> Budget:
    """What `memory.budget` says; else what the card has that was reported, or the reference card; else the host.

    Raises Refused (`budget_too_large`) for more than the reported card has.
    """
    if device == "cpu":
        if memory.budget == "auto":
            return Budget(host_memory().available, "host", None, margin=0)
        return Budget(int(memory.budget * GIB), "job", None, margin=0)
    facts = card or REFERENCE
    usable = facts.memory_bytes - DRIVER_BYTES
    if memory.budget == "auto":
        return on_card(usable, "assumed" if card is None else "card", facts.name)
    wanted = int(memory.budget * GIB)
    if card is not None and wanted > usable:
        most = int(usable / GIB * 10) / 10
        raise Refused(
            f"memory.budget = {memory.budget:g} GiB, but {card.name} has {usable / GIB:.1f} GiB for jobs "
            f"({card.memory_bytes / GIB:.1f} less what its driver keeps)",
            code="budget_too_large",
            param="memory.budget",
            hint=f"set memory.budget to at most {most:g}, or leave it at auto",
        )
    return on_card(wanted, "job", facts.name)


def on_card(usable: int, source: Literal["job", "card", "assumed"], name: str) -> Budget:
    """So many bytes of a card, a margin among them."""
    return Budget(usable, source, name, margin=int(MARGIN * usable))
