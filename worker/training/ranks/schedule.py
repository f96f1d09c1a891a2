"""In which order a pass needs the weights of layers, known before it begins and the same on every rank.

Each micro-batch goes through the layers forward, then back. A layer's weights lie in one of two slots, so they are
there still where a pass turns round. Every other time they are fetched anew, while the layer before is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

SLOTS = 2


class Direction(Enum):
    """Of a pass through a layer."""

    FORWARD = auto()
    BACKWARD = auto()


@dataclass(frozen=True)
class Use:
    """The weights of a layer are needed."""

    direction: Direction
    layer: int
    ready: int
    """Fetches that must be complete."""
    ahead: int
    """Fetches that may begin: the next layer's is among them, which goes into the other slot."""


class Schedule:
    """Of one pass, and how far it has come."""

    def __init__(self, layers: int, micro_batches: int, held: Sequence[int | None]) -> None:
        """`held`: the layer of which each slot has the weights as the pass begins."""
        self.fetches: list[int] = []
        """Layers, in order."""
        slots, needed = list(held), []
        once = [(Direction.FORWARD, layer) for layer in range(layers)]
        once += [(Direction.BACKWARD, layer) for layer in reversed(range(layers))]
        for direction, layer in once * micro_batches:
            if slots[layer % SLOTS] != layer:
                slots[layer % SLOTS] = layer
                self.fetches.append(layer)
            needed.append((direction, layer, len(self.fetches)))
        aheads = [ready for _, _, ready in needed[1:]] + [len(self.fetches)]
        self._uses = [Use(*each, ahead) for each, ahead in zip(needed, aheads, strict=True)]
        self._at = 0

    def next(self, direction: Direction, layer: int) -> Use:
        """The next time that this is needed. Layers between that did not run, or have nothing to learn, are passed."""
        for number in range(self._at, len(self._uses)):
            use = self._uses[number]
            if (use.direction, use.layer) == (direction, layer):
                self._at = number + 1
                return use
        raise AssertionError(f"layer {layer} runs where no pass through the model brings it: {direction}")
