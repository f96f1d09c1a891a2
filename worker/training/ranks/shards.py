"""The weights of a model divided among ranks: each lies with its owner, and comes to the others when it is needed.

    owned weights     with their owner, for good
    the others'       views into one of two slots, buffers that are made once; layer n has slot n % 2

So no weight ever changes its address, what autograd keeps of one stays right, and nothing is allocated in a pass. A
fetch broadcasts the weights of a layer from their owners into place. In a pass all ranks make the same fetches in the
same order (`Schedule`); one whose memory has run out, or that has fewer micro-batches, makes those that are left
without computing: nobody waits for it. Outside passes rank 0 alone computes, and tells the others what it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from worker.training.ranks.division import Division, rounded_up
from worker.training.ranks.schedule import SLOTS, Direction, Schedule


class Broadcasts(Protocol):
    """What is needed of a `RankGroup`."""

    def broadcast(self, tensor: torch.Tensor, owner: int) -> dist.Work:
        """Copy a tensor of its owner to all others; returns at once."""

    def wait(self, work: dist.Work) -> None:
        """Until what was begun is done."""


class Shards:
    """Of one model, as one rank has them."""

    def __init__(self, model: nn.Module, division: Division, rank: int, device: torch.device) -> None:
        """Give the model, which lies on the host, its place on `device`, and see to it that what its layers need is
        there when they run. Until `join`, what others own has no values.
        """
        self._layers = division.layers
        self._group: Broadcasts | None = None
        self._ask: Callable[[int], object] | None = None
        self._held: list[int | None] = [None] * SLOTS
        self._schedule: Schedule | None = None
        self._begun = 0
        """Fetches of the pass that have begun."""
        self._weights_begun = 0
        """Weights of the next one that are under way already, where it was interrupted."""
        self._under_way: list[tuple[int, dist.Work]] = []
        """Number of the fetch, and what is to be waited for."""
        slots = [
            torch.zeros(division.slot_bytes(rank), dtype=torch.uint8, device=device)
            for _ in range(min(SLOTS, len(self._layers)))
        ]
        self._places: list[list[tuple[torch.Tensor, int]]] = []
        """Of each layer: where each weight lies, under a version counter of its own, and its owner."""
        away = set()
        for number, layer in enumerate(self._layers):
            places, offset = [], 0
            for weight, owner in layer.weights:
                if owner == rank:
                    place = weight.detach().to(device)
                else:
                    flat = slots[number % SLOTS][offset : offset + weight.nbytes]
                    place = flat.view(weight.dtype).view(weight.shape)
                    offset += rounded_up(weight.nbytes)
                weight.data = place
                away.add(id(weight))
                places.append((weight.data, owner))
            self._places.append(places)
            layer.module.register_forward_pre_hook(self._before(number))
            layer.module.register_forward_hook(self._after(number))
        for parameter in model.parameters():
            if id(parameter) not in away:
                parameter.data = parameter.data.to(device)
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)

    def join(self, group: Broadcasts, ask: Callable[[int], object] | None = None) -> None:
        """From now on fetches are made. `ask`: of rank 0: has the others make a fetch of this layer."""
        self._group, self._ask = group, ask

    def begin(self, micro_batches: int) -> None:
        """A pass begins: so many micro-batches on the rank that has most."""
        self._schedule = Schedule(len(self._layers), micro_batches, self._held)
        self._begun = 0

    def end(self) -> None:
        """It has ended here, well or not: make the fetches that other ranks still wait for."""
        assert self._schedule is not None, "it has begun"
        count = len(self._schedule.fetches)
        self._fetch_until(count)
        self._wait_until(count)
        self._schedule = None

    def fetch(self, layer: int) -> None:
        """Bring the weights of a layer to all ranks, outside passes."""
        for place, owner in self._places[layer]:
            self._joined.wait(self._joined.broadcast(place, owner))
        self._held[layer % SLOTS] = layer

    def whole(self, weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The same weights, by name, each with its values when it is asked for. For rank 0, outside passes."""
        return _Whole(weights, self.bring)

    def bring(self, name: str) -> None:
        """See to it that the weight of this name has its values. For rank 0, outside passes."""
        for number, layer in enumerate(self._layers):
            if name.startswith(f"{layer.name}."):
                self._need(number)

    @property
    def _joined(self) -> Broadcasts:
        assert self._group is not None, "they have joined"
        return self._group

    def _before(self, layer: int) -> Callable[..., None]:
        def before_forward(module: nn.Module, inputs: object) -> None:
            with torch._C.DisableTorchFunction():  # weights as they are, whatever a mode computes with
                self._use(Direction.FORWARD, layer)

        return before_forward

    def _after(self, layer: int) -> Callable[..., None]:
        # The gradient of what comes out of a layer is there before anything of it is computed again, or its gradients.
        def before_backward(gradient: torch.Tensor) -> None:
            self._use(Direction.BACKWARD, layer)

        def after_forward(module: nn.Module, inputs: object, outputs: Any) -> None:
            for output in tree_leaves(outputs):
                if isinstance(output, torch.Tensor) and output.requires_grad:
                    output.register_hook(before_backward)
                    return

        return after_forward

    def _use(self, direction: Direction, layer: int) -> None:
        if self._schedule is not None:
            use = self._schedule.next(direction, layer)
            self._fetch_until(use.ready)
            self._wait_until(use.ready)
            self._fetch_until(use.ahead)
        elif self._group is not None:  # before that, libraries are warmed up
            self._need(layer)

    def _need(self, layer: int) -> None:
        assert self._ask is not None and self._schedule is None, "others compute in passes alone"
        if self._held[layer % SLOTS] != layer:
            self._ask(layer)
            self.fetch(layer)

    def _fetch_until(self, count: int) -> None:
        assert self._schedule is not None
        for number in range(self._begun, count):
            layer = self._schedule.fetches[number]
            for place, owner in self._places[layer][self._weights_begun :]:
                # Counted once it is under way: memory that runs out here, too, is no reason to make it twice, or never.
                self._under_way.append((number, self._joined.broadcast(place, owner)))
                self._weights_begun += 1
            self._begun, self._weights_begun = number + 1, 0
            self._held[layer % SLOTS] = layer

    def _wait_until(self, count: int) -> None:
        while self._under_way and self._under_way[0][0] < count:
            self._joined.wait(self._under_way[0][1])
            del self._under_way[0]


class _Whole(Mapping[str, torch.Tensor]):
    """Weights by name that are brought when they are asked for."""

    def __init__(self, weights: Mapping[str, torch.Tensor], bring: Callable[[str], object]) -> None:
        self._weights, self._bring = weights, bring

    def __getitem__(self, name: str) -> torch.Tensor:
        self._bring(name)
        return self._weights[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)
