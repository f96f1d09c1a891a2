"""Which rank holds which weights of a model that one GPU has no room for (ADR 20). The same on every rank: it follows
from names and shapes alone.

Sharded are the matrices of the layers. What lies outside layers (embeddings, head, last norm), and what is small in
them (norms, biases, adapters), is on every rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

GRANULARITY = 512
"""Bytes: each tensor begins at a multiple of so many, as torch's allocator for GPUs has them."""


@dataclass(frozen=True)
class ShardedLayer:
    """A layer, and the rank that owns each of its sharded weights."""

    name: str
    module: nn.Module
    weights: Sequence[tuple[nn.Parameter, int]]
    """In the order in which they come to the ranks that do not own them."""

    def missing_bytes(self, rank: int) -> int:
        """Of the weights that others own, as they lie in a slot."""
        return sum(rounded_up(weight.nbytes) for weight, owner in self.weights if owner != rank)


@dataclass(frozen=True)
class Sharding:
    """Of a model among so many ranks."""

    ranks: int
    layers: Sequence[ShardedLayer]
    """Those with sharded weights, in the order of the model, which is that of the forward pass."""
    others: Sequence[tuple[nn.Parameter, int]] = ()
    """Trained weights that every rank has, and the rank that updates each."""

    @property
    def sharded_bytes(self) -> int:
        """Of all sharded weights."""
        return sum(rounded_up(weight.nbytes) for layer in self.layers for weight, _ in layer.weights)

    def owned_bytes(self, rank: int) -> int:
        """Of those that a rank owns."""
        return self.sharded_bytes - sum(layer.missing_bytes(rank) for layer in self.layers)

    def slot_bytes(self, rank: int) -> int:
        """Of one of its two slots: room for what it misses of any layer."""
        return max((layer.missing_bytes(rank) for layer in self.layers), default=0)

    def updates(self, rank: int) -> list[nn.Parameter]:
        """Weights that a rank updates, where those of the layers are trained."""
        of_layers = [each for layer in self.layers for each in layer.weights]
        return [weight for weight, owner in (*of_layers, *self.others) if owner == rank]

    @property
    def most_bytes(self) -> int:
        """Of owned weights and slots, where that is the most."""
        return max(self.owned_bytes(rank) + 2 * self.slot_bytes(rank) for rank in range(self.ranks))


def shard(model: nn.Module, ranks: int, *, trained: bool) -> Sharding:
    """Each weight goes to the rank that owns the least in all, and of equals to that which owns the least of its layer:
    of each layer the largest first. `trained`: also weights that are trained; of those that are not sharded, the
    largest of all first, each rank updates its part.
    """
    owned: Counter[int] = Counter()
    layers, others = [], []
    uses = Counter(id(weight) for module in model.modules() for weight in module._parameters.values())
    within = Counter(id(weight) for _, module in layers_of(model) for weight in matrices_of(module))
    matrices = {
        name: [
            weight
            for weight in matrices_of(module)
            if uses[id(weight)] == within[id(weight)] == 1 and (trained or not weight.requires_grad)
        ]
        for name, module in layers_of(model)
    }
    sharded = {id(weight) for weights in matrices.values() for weight in weights}
    rest = [weight for weight in model.parameters() if trained and weight.requires_grad and id(weight) not in sharded]
    for weight in sorted(rest, key=lambda each: -each.nbytes):
        owner = min(range(ranks), key=lambda rank: (owned[rank], rank))
        owned[owner] += weight.nbytes
        others.append((weight, owner))
    for name, module in layers_of(model):
        weights, of_layer = [], Counter[int]()
        for weight in sorted(matrices[name], key=lambda each: -each.nbytes):
            owner = min(range(ranks), key=lambda rank: (owned[rank], of_layer[rank], rank))
            of_layer[owner] += weight.nbytes
            owned[owner] += weight.nbytes
            weights.append((weight, owner))
        if weights:
            layers.append(ShardedLayer(name, module, weights))
    return Sharding(ranks, layers, others)


def layers_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The repeated layers of a model, by name: the outermost of those that transformers can recompute."""
    # Here, for what saves and reads checkpoints needs the rest of this module alone, and would wait seconds for it.
    from transformers.modeling_layers import GradientCheckpointingLayer

    found: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer, _ in found)
        if isinstance(module, GradientCheckpointingLayer) and not inside:
            found.append((name, module))
    return found


def matrices_of(layer: nn.Module) -> list[nn.Parameter]:
    """Of a layer, without embeddings, which are also read before it runs (T5's position bias)."""
    return [
        weight
        for module in layer.modules()
        if not isinstance(module, nn.Embedding)
        for weight in module._parameters.values()
        if weight is not None and weight.ndim >= 2
    ]


def in_order(model: nn.Module, run: Callable[[], object]) -> bool:
    """Whether a pass, which `run` makes, goes through the layers in their order, through each at most once. Code that
    computes with their weights itself goes through none: it would not wait for them (`packed.py` on a CPU).
    """
    layers = [module for _, module in layers_of(model)]
    seen: list[int] = []
    hooks = [
        layer.register_forward_pre_hook(lambda module, inputs, number=number: seen.append(number))
        for number, layer in enumerate(layers)
    ]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return bool(seen) and all(one < other for one, other in pairwise(seen))


def rounded_up(size: int) -> int:
    """Bytes that a tensor of this size takes."""
    return -(-size // GRANULARITY) * GRANULARITY
