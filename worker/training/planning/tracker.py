"""Live bytes of tensors by category, and their peak, counted while operations run, with or without data.

A storage counts from the operation that first gives it out to its end, whoever holds it. What a kernel allocates and
frees inside itself is not seen from outside; `inside` tells it.

Of tensors on the device "meta", torch works out shapes in Python, 0.3 ms an operation, and the layers of a model ask
the same again and again: `MetaResults` knows the answer the second time.
"""

from __future__ import annotations

import itertools
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


_Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]
_VALUES = frozenset((int, float, bool, str, torch.dtype, torch.device, torch.layout, torch.memory_format))


class _Entry:
    """One live storage."""

    __slots__ = ("born", "category", "reference", "size")

    def __init__(self, category: int, size: int, born: int) -> None:
        self.category, self.size, self.born = category, size, born
        self.reference: weakref.ref[Any] | None = None


class MetaResults:
    """Runs operations; where all that goes in lies on "meta", what comes out is known by that from the second time on.

    For operations that change nothing and whose results share no memory with anything. Such a result is decided by
    the sizes, strides and dtypes of the tensors that go in, by all other arguments and by torch's default dtype.
    """

    def __init__(self) -> None:
        self._fresh: dict[Any, bool] = {}
        self._known: dict[Any, tuple[bool, tuple[_Layout | None, ...]] | None] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`func(*args, **kwargs)`, or what equals it."""
        fresh = self._fresh.get(func)
        if fresh is None:
            fresh = self._fresh[func] = _makes_anew(func)
        key = _key(func, args, kwargs) if fresh else None
        if key is None:
            return func(*args, **kwargs)
        if key not in self._known:
            result = func(*args, **kwargs)
            self._known[key] = _layouts(result, (args, kwargs))
            return result
        known = self._known[key]
        if known is None:
            return func(*args, **kwargs)
        one, layouts = known
        results = tuple(
            each and torch.empty_strided(each[0], each[1], dtype=each[2], device="meta") for each in layouts
        )
        return results[0] if one else results


def _makes_anew(func: Any) -> bool:
    schema = func._schema
    return all(each.alias_info is None for each in (*schema.arguments, *schema.returns))


def _key(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """None: something goes in that is neither a plain tensor on "meta" nor a value that can be compared."""
    found: list[Any] = [func, torch.get_default_dtype()]
    pending = [*reversed(args), *itertools.chain.from_iterable(kwargs.items())]
    while pending:
        each = pending.pop()
        kind = type(each)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            if not each.is_meta or each.layout is not torch.strided or each.dtype.is_complex:
                return None
            found.append((each.shape, each.stride(), each.dtype))
        elif kind is list or kind is tuple:
            found.append((kind, len(each)))
            pending.extend(reversed(each))
        elif each is None or kind in _VALUES:
            found.append((kind, each))  # 1, 1.0 and True are equal
        else:
            return None
    return tuple(found)


def _layouts(result: Any, given: Any) -> tuple[bool, tuple[_Layout | None, ...]] | None:
    """Of plain results that each fill a storage of their own; None: there are others, such as those of `_unsafe_view`,
    whose schema does not tell that it is a view.
    """
    one = isinstance(result, torch.Tensor)
    results = (result,) if one else result
    if type(results) is not tuple:
        return None
    taken = {each.untyped_storage()._cdata for each in tree_leaves(given) if isinstance(each, torch.Tensor)}
    found: list[_Layout | None] = []
    for each in results:
        if each is None:
            found.append(None)
            continue
        if type(each) is not torch.Tensor or not each.is_meta or each.storage_offset():
            return None
        storage = each.untyped_storage()
        if storage._cdata in taken:
            return None
        taken.add(storage._cdata)
        layout = (each.shape, each.stride(), each.dtype)
        again = torch.empty_strided(layout[0], layout[1], dtype=layout[2], device="meta")
        if storage.nbytes() != again.untyped_storage().nbytes():
            return None
        found.append(layout)
    return one, tuple(found)


class Tracker(TorchDispatchMode):
    """Counts what operations allocate inside `with`, and what is passed to `add`."""

    def __init__(
        self,
        device: torch.device,
        *,
        granularity: int = 1,
        inside: Inside | None = None,
        results: MetaResults | None = None,
    ) -> None:
        """Only storages on `device` count, each rounded up to `granularity` bytes. `results`: for a device
        on which nothing is computed.
        """
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
        self._results = results

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
        result = func(*args, **kwargs) if self._results is None else self._results.run(func, args, kwargs)
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
