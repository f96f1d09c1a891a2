"""Which tensors a model has."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """The tensors of a model whose head may be its embedding."""

    shapes: Mapping[str, tuple[int, ...]]
    """Name → shape; what is shared, once."""
    head: str
    embedding: str
    aliases: Collection[str] = ()
    """Other names of the embedding, under which some versions wrote it (beside, or in place of, its own)."""
    unused: Collection[str] = ()
    """In the files of some versions; the model has no use for them."""
    patterns: Collection[str] = ()
    """Regular expressions, found anywhere in such names; tensors of `shapes` are none of them."""

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding."""
        return self.head not in self.shapes

    @property
    def parameters(self) -> int:
        """How many weights these are."""
        return sum(math.prod(shape) for shape in self.shapes.values())
