"""What ranks exchange in a pass, in which order: known before it begins, and the same on every rank.

Each micro-batch goes through the layers forward, then back. A layer's weights lie in one of two slots, so they are
there still where a pass turns round. Every other time they are fetched anew, while the layer before is computed. Where
the sharded weights are trained, the gradients of a layer go to their owners when the pass back has come to the next.
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


class Exchange(Enum):
    """What all ranks do together with a layer."""

    FETCH = auto()
    """Its weights come from their owners."""
    REDUCE = auto()
    """Its gradients are added up by their owners."""


@dataclass(frozen=True)
class Use:
    """The weights of a layer are needed."""

    direction: Direction
    layer: int
    ready: int
    """Exchanges that must be complete."""
    ahead: int
    """Exchanges that may begin: the next layer's weights are among them, which go into the other slot."""


class Schedule:
    """Of one pass, and how far it has come."""

    def __init__(self, layers: int, micro_batches: int, held: Sequence[int | None], *, trained: bool) -> None:
        """`held`: the layer of which each slot has the weights as the pass begins. `trained`: so are the layers."""
        self.exchanges: list[tuple[Exchange, int]] = []
        """With their layers, in order."""
        self._slots = list(held)
        self._uses: list[Use] = []
        self._at = 0
        once = [(Direction.FORWARD, layer) for layer in range(layers)]
        once += [(Direction.BACKWARD, layer) for layer in reversed(range(layers))]
        order = once * micro_batches
        for number, (direction, layer) in enumerate(order):
            self._fetch(layer)
            ready = len(self.exchanges)
            if trained and number and order[number - 1][0] is Direction.BACKWARD:
                self.exchanges.append((Exchange.REDUCE, order[number - 1][1]))
            for _, following in order[number + 1 : number + 2]:
                self._fetch(following)
            self._uses.append(Use(direction, layer, ready, len(self.exchanges)))
        if trained:
            self.exchanges.append((Exchange.REDUCE, order[-1][1]))

    def next(self, direction: Direction, layer: int) -> Use:
        """The next time that this is needed. Layers between that did not run, or have nothing to learn, are passed."""
        for number in range(self._at, len(self._uses)):
            use = self._uses[number]
            if (use.direction, use.layer) == (direction, layer):
                self._at = number + 1
                return use
        raise AssertionError(f"layer {layer} runs where no pass through the model brings it: {direction}")

    @property
    def used(self) -> bool:
        """Whether any layer has asked for its weights."""
        return self._at > 0

    def _fetch(self, layer: int) -> None:
        if self._slots[layer % SLOTS] != layer:
            self._slots[layer % SLOTS] = layer
            self.exchanges.append((Exchange.FETCH, layer))
