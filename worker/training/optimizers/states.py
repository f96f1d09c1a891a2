"""The states of an optimizer, as they come back from a checkpoint: all of them, or the checkpoint is rejected."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from jobs.errors import Rejected


@torch.no_grad()
def load_states(own: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]) -> None:
    """Copy `saved` into `own`, tensor by tensor. Refuses `optimizer_state` unless names, shapes and dtypes agree."""
    wrong = sorted(own.keys() ^ saved.keys())
    wrong = wrong or sorted(name for name, state in own.items() if not _alike(state, saved[name]))
    if wrong:
        raise Rejected(
            f"{len(wrong)} optimizer states are missing, unknown, of another shape or dtype: {', '.join(wrong[:5])}",
            code="optimizer_state",
            hint="the checkpoint belongs to another model, another optimizer or another version",
        )
    for name, state in own.items():
        state.copy_(saved[name])


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype
