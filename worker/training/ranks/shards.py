"""The weights of a model sharded among ranks: each lies with its owner, and comes to the others when it is needed.

    owned weights     with their owner, for good; where they are trained, so are their summed gradients
    the others'       views into one of two slots, buffers that are made once; layer n has slot n % 2

So no weight ever changes its address, what autograd keeps of one stays right, and nothing is allocated in a pass. A
fetch broadcasts the weights of a layer from their owners into place. In a pass all ranks make the same exchanges in the
same order (`Schedule`); one whose memory has run out, or that has fewer micro-batches, makes those that are left
without computing: nobody waits for it. Outside passes rank 0 alone computes, and tells the others what it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from worker.training.ranks.gathered import Brought, Gathered, RemoteTensor
from worker.training.ranks.schedule import SLOTS, Direction, Exchange, Schedule
from worker.training.ranks.sharding import Sharding, rounded_up

Tell = Callable[[Mapping[str, object]], object]
"""Of rank 0: has all others do something."""


class Collectives(Protocol):
    """What is needed of a `RankGroup`."""

    @property
    def rank(self) -> int:
        """This one."""

    @property
    def piece(self) -> int:
        """Numbers that `reduce` takes at most."""

    def broadcast(self, tensor: torch.Tensor, owner: int) -> dist.Work:
        """Copy a tensor of its owner to all others; returns at once."""

    def wait(self, work: dist.Work) -> None:
        """Until what was begun is done."""

    def reduce(self, gradients: torch.Tensor | None, count: int, share: float, owner: int) -> torch.Tensor:
        """Add up so many numbers of gradients, each rank's times its share, for their owner."""

    def norm(self, own: torch.Tensor) -> torch.Tensor:
        """The norm of all that ranks have parts of, given that of the own part."""

    def send(self, tensor: torch.Tensor | None, size: int, owner: int) -> Iterator[torch.Tensor]:
        """Bytes of a tensor that one rank has to every rank, in pieces."""

    def each(self, own: object) -> list[Any]:
        """What every rank gives, by rank."""


class Shards:
    """Of one model, as one rank has them."""

    def __init__(self, model: nn.Module, sharding: Sharding, rank: int, device: torch.device) -> None:
        """Give the model, which lies on the host, its place on `device`, and see to it that what its layers need is
        there when they run. Until `join`, what others own has no values.
        """
        self._layers = sharding.layers
        self._others = sharding.others
        self.trained = bool(sharding.others)
        """Whether the sharded weights are."""
        self.share = 0.0
        """Of this rank's gradients in the sums of a pass, in target tokens: they are those of a mean."""
        self._group: Collectives | None = None
        self._tell: Tell | None = None
        self._state: Mapping[str, torch.Tensor] = {}
        self._elsewhere: dict[str, RemoteTensor] = {}
        self._updated = {id(weight) for weight in sharding.updates(rank)}
        self._held: list[int | None] = [None] * SLOTS
        self._schedule: Schedule | None = None
        self._begun = 0
        """Exchanges of the pass that have begun."""
        self._parts_begun = 0
        """Of the next one, what is under way already, where it was interrupted."""
        self._under_way: list[tuple[int, dist.Work]] = []
        """Number of a fetch, and what is to be waited for."""
        self._sums: dict[int, torch.Tensor] = {}
        """By id of an owned weight that is trained: the gradients of all ranks and micro-batches so far."""
        self._owned = {id(weight) for layer in sharding.layers for weight, owner in layer.weights if owner == rank}
        self._sharded = {id(weight) for layer in sharding.layers for weight, _ in layer.weights}
        self._names = {name: id(weight) for name, weight in model.named_parameters()}
        slots = [
            torch.zeros(sharding.slot_bytes(rank), dtype=torch.uint8, device=device)
            for _ in range(min(SLOTS, len(self._layers)))
        ]
        self._places: list[list[tuple[torch.Tensor, int]]] = []
        """Of each layer: where each weight lies, under a version counter of its own, and its owner."""
        for number, layer in enumerate(self._layers):
            places, offset = [], 0
            for weight, owner in layer.weights:
                if owner == rank:
                    place = weight.detach().to(device).contiguous()
                else:
                    flat = slots[number % SLOTS][offset : offset + weight.nbytes]
                    place = flat.view(weight.dtype).view(weight.shape)
                    offset += rounded_up(weight.nbytes)
                weight.data = place
                if owner == rank and self.trained:
                    self._sums[id(weight)] = torch.zeros_like(place)
                places.append((weight.data, owner))
            self._places.append(places)
            layer.module.register_forward_pre_hook(self._before(number))
            layer.module.register_forward_hook(self._after(number))
        for parameter in model.parameters():
            if id(parameter) not in self._sharded:
                parameter.data = parameter.data.to(device)
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)

    def join(self, group: Collectives, state: Mapping[str, torch.Tensor], tell: Tell | None = None) -> None:
        """From now on weights are fetched. `state`: `weights.NAME` and `optimizer.NAME` of this rank, with the tensors
        that it has no values of. `tell`: of rank 0."""
        self._group, self._tell, self._state = group, tell, state
        if self.trained:
            own = {
                name: RemoteTensor(group.rank, tuple(tensor.shape), tensor.dtype)
                for name, tensor in state.items()
                if not name.startswith("weights.") or self._names.get(name.removeprefix("weights.")) in self._owned
            }
            for found in reversed(group.each(own)):
                self._elsewhere |= found  # what several have, the first gives
            self._elsewhere = {name: each for name, each in self._elsewhere.items() if each.owner != group.rank}

    def alike(self, state: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """What of it every rank has: of `weights.NAME` those that are not sharded, of `optimizer.NAME`, where that is
        sharded with the weights, none."""
        if not self.trained:
            return state
        weights = {name: each for name, each in state.items() if name.startswith("weights.")}
        return {
            name: each
            for name, each in weights.items()
            if self._names.get(name.removeprefix("weights.")) not in self._sharded
        }

    def everywhere(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Those that are not sharded."""
        return [parameter for parameter in parameters if id(parameter) not in self._sharded]

    def has(self, name: str) -> bool:
        """Whether this rank has the values of a weight for good."""
        return self._names.get(name) not in self._sharded - self._owned

    def updated(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> list[tuple[str, nn.Parameter]]:
        """Of these the ones that this rank updates: all, where the sharded weights are not trained."""
        return [(name, each) for name, each in parameters if not self.trained or id(each) in self._updated]

    def norm(self, own: torch.Tensor) -> torch.Tensor:
        """Of the gradients of all weights, given that of those that this rank updates."""
        return self._joined.norm(own) if self.trained else own

    # -- passes --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def begin(self, micro_batches: int) -> None:
        """A pass begins: so many micro-batches on the rank that has most."""
        self._schedule = Schedule(len(self._layers), micro_batches, self._held, trained=self.trained)
        self._begun = self._parts_begun = 0
        self.share = 0.0
        for total in self._sums.values():
            total.zero_()

    def end(self, computed: bool) -> None:
        """It has ended here, well (then it has `computed`, if it had rows) or not: make the exchanges that other ranks
        still wait for.
        """
        assert self._schedule is not None, "it has begun"
        assert self._schedule.used or not computed, "layers have computed without asking for their weights"
        count = len(self._schedule.exchanges)
        self._exchange_until(count)
        self._wait_until(count)
        self._schedule = None

    @torch.no_grad()
    def collect(self, target_tokens: int) -> None:
        """It went well everywhere, with so many tokens in all: owned weights get their gradients."""
        for layer in self._layers:
            for weight, _ in layer.weights:
                if id(weight) in self._sums:
                    weight.grad = self._sums[id(weight)].div_(target_tokens)

    @torch.no_grad()
    def share_updates(self) -> None:
        """After an update: give what every rank has to all others, and fetch layers anew from now on."""
        for weight, owner in self._others:
            self._joined.wait(self._joined.broadcast(weight.data, owner))
        if self.trained:
            self._held = [None] * SLOTS

    # -- outside passes ------------------------------------------------------------------------------------------

    def fetch(self, layer: int) -> None:
        """Bring the weights of a layer to all ranks, outside passes."""
        for place, owner in self._places[layer]:
            self._joined.wait(self._joined.broadcast(place, owner))
        self._held[layer % SLOTS] = layer

    def gathered(self, kind: str, own: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The tensors of all ranks, given those of rank 0, without their `kind.`: for rank 0, between two steps."""
        if not self.trained:
            return own
        elsewhere = {
            name.removeprefix(f"{kind}."): each for name, each in self._elsewhere.items() if name.startswith(f"{kind}.")
        }
        return Gathered(own, elsewhere, lambda name, each: self._read(f"{kind}.{name}", each))

    def send(self, name: str, owner: int, size: int) -> None:
        """Take part in what rank 0 reads."""
        own = self._state[name] if self._joined.rank == owner else None
        for _ in self._joined.send(own, size, owner):
            pass

    def _read(self, name: str, each: RemoteTensor) -> torch.Tensor:
        assert self._tell is not None, "rank 0 writes"
        self._tell({"do": "send", "name": name, "owner": each.owner, "size": each.bytes})
        read = torch.empty(each.bytes, dtype=torch.uint8)
        done = 0
        for piece in self._joined.send(None, each.bytes, each.owner):
            read[done : done + len(piece)].copy_(piece)
            done += len(piece)
        return read.view(each.dtype).view(each.shape)

    def whole(self, weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The same weights, by name, each with its values when it is asked for. For rank 0, outside passes."""
        return Brought(weights, self.bring)

    def bring(self, name: str) -> None:
        """See to it that the weight of this name has its values. For rank 0, outside passes."""
        for number, layer in enumerate(self._layers):
            if name.startswith(f"{layer.name}."):
                self._need(number)

    @property
    def _joined(self) -> Collectives:
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
            self._exchange_until(use.ready)
            self._wait_until(use.ready)
            self._exchange_until(use.ahead)
        elif self._group is not None:  # before that, libraries are warmed up
            self._need(layer)

    def _need(self, layer: int) -> None:
        assert self._tell is not None and self._schedule is None, "others compute in passes alone"
        if self._held[layer % SLOTS] != layer:
            self._tell({"do": "fetch", "layer": layer})
            self.fetch(layer)

    @torch.no_grad()
    def _exchange_until(self, count: int) -> None:
        assert self._schedule is not None
        for number in range(self._begun, count):
            # Each part is counted once it is under way: memory that runs out here, too, is no reason to make one twice,
            # or never.
            kind, layer = self._schedule.exchanges[number]
            if kind is Exchange.FETCH:
                self._fetch(number, layer)
            else:
                self._reduce(layer)
            self._begun, self._parts_begun = number + 1, 0

    def _fetch(self, number: int, layer: int) -> None:
        for place, owner in self._places[layer][self._parts_begun :]:
            self._under_way.append((number, self._joined.broadcast(place, owner)))
            self._parts_begun += 1
        self._held[layer % SLOTS] = layer

    def _reduce(self, layer: int) -> None:
        size, group = self._joined.piece, self._joined
        parts = [
            (weight, owner, begin)
            for weight, owner in self._layers[layer].weights
            for begin in range(0, weight.numel(), size)
        ]
        for weight, owner, begin in parts[self._parts_begun :]:
            end = min(begin + size, weight.numel())
            gradient = None if weight.grad is None else weight.grad.view(-1)[begin:end]
            summed = group.reduce(gradient, end - begin, self.share, owner)
            self._parts_begun += 1
            if owner == group.rank:
                self._sums[id(weight)].view(-1)[begin:end].add_(summed)
            if end == weight.numel():
                weight.grad = None

    def _wait_until(self, count: int) -> None:
        while self._under_way and self._under_way[0][0] < count:
            self._joined.wait(self._under_way[0][1])
            del self._under_way[0]
