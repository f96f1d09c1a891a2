"""A difference, divided among what is behind it.

A category of the plan is a product: weights are parameters x bytes of one, activations are rows x tokens x bytes a
token. Where one factor differs, the difference in the category is its cost. Where several do, each gets the part that
its logarithm has in that of the quotient (the logarithmic mean Divisia index, Ang 2004): the parts add up exactly, and
do not depend on which job comes first.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

Keys = tuple[str, ...]
_LOST = 20.0
"""Where parts would be so many times the whole, they cancel each other out: nobody can tell them apart."""


@dataclass(frozen=True)
class Factor:
    """One factor of a product, in the reference and in the other job."""

    before: float
    after: float
    keys: Keys
    """Those that differ and act through it."""


@dataclass(frozen=True)
class Product:
    """A category of the peak, or a part of one; or the time."""

    category: str
    before: float
    after: float
    factors: Sequence[Factor]
    """The last one is what is left of the amount by the others."""
    exact: bool = True
    """Whether that is a factor of its own; else it is not told apart from the others."""


@dataclass
class Costs:
    """What differences cost, by the keys that are behind them; without keys: nobody knows what is."""

    parts: defaultdict[Keys, defaultdict[str, float]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(float))
    )
    estimated: set[Keys] = field(default_factory=set)
    """Those with a part of a category that others changed, too."""

    def add(self, product: Product) -> None:
        """Divide the difference among the keys."""
        shares = divide(product)
        for keys, amount in shares.items():
            self.parts[keys][product.category] += amount
        if len(shares) > 1:
            self.estimated |= shares.keys()

    def take(self, other: Costs) -> None:
        """Add those of another."""
        for keys, parts in other.parts.items():
            for category, amount in parts.items():
                self.parts[keys][category] += amount
        self.estimated |= other.estimated

    def of(self, *keys: str) -> float | None:
        """What these differences cost together, or one by itself; None: nothing is known of that."""
        return sum(self.parts[keys].values()) if keys in self.parts else None


def divide(product: Product) -> dict[Keys, float]:
    """The difference by keys. What has no keys is told of those that have: the product is not as simple as that."""
    change = product.after - product.before
    if not change:
        return {}
    moved = [each for each in product.factors if each.keys and each.before != each.after]
    every = tuple(dict.fromkeys(key for each in moved for key in each.keys))
    logs: defaultdict[Keys, float] = defaultdict(float)
    for each in moved:
        if each.before <= 0 or each.after <= 0:  # it came, or went
            return {each.keys: change}
        logs[each.keys] += math.log(each.after / each.before)
    total = sum(logs.values())
    left = product.factors[-1].keys
    if not product.exact and left and every != left:
        return {every: change}
    if total * change <= 0 or any(abs(log) > _LOST * abs(total) for log in logs.values()):
        return {every: change}
    return {keys: change * log / total for keys, log in logs.items()}
