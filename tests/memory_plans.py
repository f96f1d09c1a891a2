"""A memory plan as check would write it, for tests of what is made of one."""

from __future__ import annotations

from typing import Any

from jobs.memory_plan import Candidate, MemoryPlan
from jobs.text.units import GIB

PARTS = {
    "weights": 5 * GIB, "gradients": 5 * GIB, "optimizer": 5 * GIB, "activations": 9 * GIB, "temporaries": GIB,
    "context": GIB,
}  # fmt: skip


def memory_plan(**changes: Any) -> MemoryPlan:
    """8 rows of a large model with adamw_8bit on an RTX 5090, adamw being too large."""
    chosen: dict[str, Any] = {"optimizer": "adamw_8bit", "activation_checkpointing": 0, "micro_batch": 8}
    chosen |= {key: changes[key] for key in chosen.keys() & changes.keys()}
    facts: dict[str, Any] = {
        "device": "cuda",
        "gpu": "NVIDIA GeForce RTX 5090",
        "budget_bytes": 31 * GIB,
        "budget_source": "gpu",
        "margin_bytes": GIB,
        "input_tokens": 256,
        "target_tokens": 256,
        "parts": PARTS,
        "peak_bytes": sum(PARTS.values()),
        "compile": True,
        "candidates": [
            Candidate(**chosen, peak_bytes=sum(PARTS.values()), slowdown=1.05, score=0.9, parts=PARTS),
            Candidate(
                optimizer="adamw",
                activation_checkpointing=0,
                micro_batch=0,
                peak_bytes=43 * GIB,
                slowdown=1.6,
                score=0.6,
            ),
        ],
        "why": "adamw needs more than 43.0 GiB",
        "seconds": 1.0,
    }
    return MemoryPlan(**facts | chosen | changes)
