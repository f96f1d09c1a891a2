"""What one GPU has of a model that several shard (ADR 20), and when it has which gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils._pytree import tree_leaves

from worker.training.planning.prediction import ModelSize
from worker.training.ranks.sharding import Sharding, shard


@dataclass(frozen=True)
class Share:
    """What one rank has of a model whose weights ranks shard, the one that has most of each; bytes."""

    sharded_bytes: int = 0
    """Of the sharded weights, of all ranks."""
    weights: int = 0
    """Of those that it owns, and of its slots."""
    gradients: int = 0
    """Of sums of gradients of those that it owns, kept for good; 0: they are not trained."""
    updated: int = 0
    """Numbers that it updates; 0: all that are trained."""
    rank: int = 0
    """One that updates so many."""
    ranks: int = 1

    @property
    def trained(self) -> bool:
        """Whether the sharded weights are."""
        return self.gradients > 0

    @property
    def less_weights(self) -> int:
        """Bytes of weights that it has not."""
        return self.sharded_bytes - self.weights

    @property
    def less_gradients(self) -> int:
        """Bytes of gradients that it has not."""
        return self.sharded_bytes - self.gradients if self.trained else 0

    def size(self, whole: ModelSize) -> ModelSize:
        """Of what it has."""
        updated = self.updated or whole.trained
        return ModelSize(
            parameter_bytes=whole.parameter_bytes - self.less_weights,
            trained=updated,
            trained_bytes=whole.trained_bytes - self.less_gradients,
            master_bytes=round(whole.master_bytes * updated / max(1, whole.trained)),
        )


WHOLE = Share()
"""Of a rank that has all."""


def share_of(sharding: Sharding) -> Share:
    """Of the rank that has most."""
    ranks = range(sharding.ranks)
    if not sharding.others:
        return Share(sharding.sharded_bytes, sharding.most_bytes, ranks=sharding.ranks)
    updated = [sum(weight.numel() for weight in sharding.updates(rank)) for rank in ranks]
    return Share(
        sharded_bytes=sharding.sharded_bytes,
        weights=sharding.most_bytes,
        gradients=max(sharding.owned_bytes(rank) for rank in ranks),
        updated=max(updated),
        rank=updated.index(max(updated)),
        ranks=sharding.ranks,
    )


@contextlib.contextmanager
def gradients_going(model: nn.Module, share: Share) -> Iterator[None]:
    """Inside, gradients of sharded weights go to their owners as `Shards` has it: those of a layer, once the backward
    pass has come to the next. Afterwards those from before are back."""
    layers = shard(model, share.ranks, trained=True).layers if share.trained else ()
    weights = [weight for layer in layers for weight, _ in layer.weights]
    gradients = [weight.grad for weight in weights]

    def dropping(number: int) -> Callable[..., None]:
        def before_backward(gradient: object) -> None:
            for weight, _ in layers[number + 1].weights if number + 1 < len(layers) else ():
                weight.grad = None

        def after_forward(module: nn.Module, inputs: object, outputs: Any) -> None:
            tree_leaves(outputs)[0].register_hook(before_backward)

        return after_forward

    hooks = [layer.module.register_forward_hook(dropping(number)) for number, layer in enumerate(layers)]
    for weight in weights:
        weight.grad = None
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for weight, before in zip(weights, gradients, strict=True):
            weight.grad = before
