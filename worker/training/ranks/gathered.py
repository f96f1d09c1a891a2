"""Tensors that ranks hold apart, as rank 0 writes them to one file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RemoteTensor:
    """A tensor that another rank holds."""

    owner: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Of it."""
        return self.like.nbytes

    @property
    def like(self) -> torch.Tensor:
        """One like it without values."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


class Gathered(Mapping[str, torch.Tensor]):
    """Tensors by name. One that another rank holds is read from there each time it is asked for, to the host."""

    def __init__(
        self,
        own: Mapping[str, torch.Tensor],
        elsewhere: Mapping[str, RemoteTensor],
        read: Callable[[str, RemoteTensor], torch.Tensor],
    ) -> None:
        self._own, self._elsewhere, self._read = own, elsewhere, read
        self.like = {**own, **{name: each.like for name, each in elsewhere.items()}}
        """The same names: tensors of the same shapes and types, some without values."""

    def __getitem__(self, name: str) -> torch.Tensor:
        each = self._elsewhere.get(name)
        return self._own[name] if each is None else self._read(name, each)

    def __iter__(self) -> Iterator[str]:
        return iter(self.like)

    def __len__(self) -> int:
        return len(self.like)


class Brought(Mapping[str, torch.Tensor]):
    """Tensors by name that are brought into place when they are asked for."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], bring: Callable[[str], object]) -> None:
        self._bring = bring
        self.like = tensors
        """Those in place, whatever their values are by now."""

    def __getitem__(self, name: str) -> torch.Tensor:
        self._bring(name)
        return self.like[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.like)

    def __len__(self) -> int:
        return len(self.like)


def like(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Tensors of the same names, shapes and types, for whoever needs no values."""
    return tensors.like if isinstance(tensors, Gathered | Brought) else tensors
