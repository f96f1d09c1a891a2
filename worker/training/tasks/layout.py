"""Which tensors a model has."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field


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
    new: Collection[frozenset[str]] = ()
    """Tensors that a file may lack, and that the model store then adds: each of these sets whole, or not at all."""
    prefix: str = ""
    """What some versions left out at the beginning of names."""
    renames: Mapping[str, str] = field(default_factory=dict)
    """Regular expressions for what some versions wrote in names, and what is written today."""

    def own_name(self, name: str) -> str:
        """What a tensor of a file is called in the model."""
        for old, now in self.renames.items():
            name = re.sub(old, now, name)
        whole = f"{self.prefix}{name}"
        return whole if name not in self.shapes and whole in self.shapes else name

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding."""
        return self.head not in self.shapes

    @property
    def parameters(self) -> int:
        """How many weights these are."""
        return sum(math.prod(shape) for shape in self.shapes.values())
