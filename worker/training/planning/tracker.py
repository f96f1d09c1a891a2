"""Live bytes of tensors by category, and their peak, counted while operations run, with or without data.

A storage counts from the operation that first gives it out to its end, whoever holds it. What a kernel allocates and
frees inside itself is not seen from outside; `inside` tells it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CATEGORIES = ("weights", "gradients", "optimizer", "activations", "temporaries")
WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, TEMPORARIES = range(len(CATEGORIES))
Inside = Callable[[Any, tuple[Any, ...], dict[str, Any]], int]
"""Operation, arguments, named arguments -> the most bytes that its kernel holds besides these and its result."""


class _Entry:
    """One live storage."""

    __slots__ = ("born", "category", "reference", "size")

    def __init__(self, category: int, size: int, born: int) -> None:
        self.category, self.size, self.born = category, size, born
        self.reference: weakref.ref[Any] | None = None


class Tracker(TorchDispatchMode):
    """Counts what operations allocate inside `with`, and what is passed to `add`."""

    def __init__(self, device: torch.device, *, granularity: int = 1, inside: Inside | None = None) -> None:
        """Only storages on `device` count, each rounded up to `granularity` bytes."""
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.category = TEMPORARIES
        """Of what is allocated from now on."""
        self.live = [0] * len(CATEGORIES)
        self.total = 0
        self.peak = 0
        self._at_peak = [0] * len(CATEGORIES)
        self._peak_time = 0
        self._freed_since = [0] * len(CATEGORIES)
        self._time = 0
        self._entries: dict[int, _Entry] = {}
        self._device = device.type
        self._granularity = granularity
        self._inside = inside

    def add(self, tensors: Iterable[torch.Tensor], category: int) -> None:
        """Count tensors that exist already; one that is already counted changes its category."""
        for tensor in tensors:
            entry = self._count(tensor, category)
            if entry is not None and entry.category != category:
                self.live[entry.category] -= entry.size
                self.live[category] += entry.size
                entry.category = category
        self._measure(0)

    def begin(self) -> None:
        """Forget the peak so far: the next begins with what is live now."""
        self.peak = -1
        self._measure(0)

    def at_peak(self) -> tuple[list[int], list[int]]:
        """Bytes of each category at the peak, and how many of them have been freed since."""
        return list(self._at_peak), list(self._freed_since)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, then count its result."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._time += 1
        if isinstance(result, torch.Tensor):
            self._count(result, self.category)
        elif result is not None:
            for one in tree_leaves(result):
                if isinstance(one, torch.Tensor):
                    self._count(one, self.category)
        self._measure(0 if self._inside is None else self._inside(func, args, kwargs))
        return result

    def _count(self, tensor: torch.Tensor, category: int) -> _Entry | None:
        if tensor.device.type != self._device:
            return None
        storage = tensor.untyped_storage()
        key = storage._cdata
        entry = self._entries.get(key)
        if entry is not None:
            return entry
        size = -(-storage.nbytes() // self._granularity) * self._granularity
        if not size:
            return None
        entry = _Entry(category, size, self._time)
        self._entries[key] = entry
        # The reference must outlive the storage to hear of its end.
        entry.reference = weakref.ref(storage, lambda _: self._free(key))
        self.live[category] += size
        self.total += size
        return entry

    def _free(self, key: int) -> None:
        entry = self._entries.pop(key)
        self.live[entry.category] -= entry.size
        self.total -= entry.size
        if entry.born <= self._peak_time:
            self._freed_since[entry.category] += entry.size

    def _measure(self, inside: int) -> None:
        if self.total + inside > self.peak:
            self.peak = self.total + inside
            self._at_peak = list(self.live)
            self._at_peak[TEMPORARIES] += inside
            self._freed_since = [0] * len(CATEGORIES)
            self._peak_time = self._time
