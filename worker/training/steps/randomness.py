"""Random numbers: a seed for every step, and the states of the generators as JSON."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def seed_step(seed: int, step: int, rank: int = 0) -> None:
    """Seed torch's generators (CPU and CUDA) for one step: whatever happened before leaves no trace in its dropout."""
    value = _derived(seed, step, rank)
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():  # without CUDA, `torch.manual_seed` keeps a stack trace with the seed: 2 ms
        torch.cuda.manual_seed_all(value)


def update_seed(seed: int, step: int) -> int:
    """Seed of the rounding of one step's update: the same whatever forward and backward have drawn before."""
    return _derived(seed, step, "update")


def init_seed(seed: int) -> int:
    """Seed of the weights that a method adds to the model."""
    return _derived(seed, "init")


def rng_states() -> dict[str, Any]:
    """States of python's, numpy's and torch's generators, as JSON."""
    version, internal, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state(legacy=True)
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {
        "python": [version, list(internal), gauss],
        "numpy": [kind, [int(key) for key in keys], *rest],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "cuda": [state.numpy().tobytes().hex() for state in cuda],
    }


def restore_rng(states: Mapping[str, Any]) -> None:
    """Undo `rng_states`."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_state_tensor(states["torch"]))
    if states["cuda"] and torch.cuda.is_initialized():
        torch.cuda.set_rng_state_all([_state_tensor(state) for state in states["cuda"]])


def _derived(*parts: int | str) -> int:
    digest = hashlib.sha256(" ".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _state_tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
