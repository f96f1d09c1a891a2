"""`adamw` for a GPU that cannot hold its states: they are in the host's memory, where the CPU updates the weights.

Weights and gradients stay on the GPU. Once the norm of the gradients is known, they come to the host in loads of
64 MiB; the CPU updates the fp32 master copies, and the weights, rounded to the nearest, go back. While a load is
updated, the next one comes and the one before goes. Only loads are pinned, for memory that is pinned is lost to all
others; a pageable state costs nothing more, for it never travels.

What is computed, and what a checkpoint holds, is that of `adamw` on a CPU, bit for bit. Nothing is allocated on the GPU
after the norm: memory that runs out there leaves every weight as it was.

torchao's `CPUOffloadOptimizer` is not used: it cannot clip gradients by their global norm.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from worker.training.journal import Journal
from worker.training.optimizers.adamw import Rule, Slot, SlotPiece, make_slot, states_of
from worker.training.optimizers.gradients import PIECE, decays, finite_clipping, gradient_norm, load_states

LOAD_BYTES = 2**26
"""Of gradients that come at once: long enough for the slot's full rate, short beside a model. A multiple of `PIECE`
numbers: in other pieces vectors end elsewhere, and the last bits differ from those of `adamw`."""
LOADS = 2
"""Buffers for each direction: one travels while the CPU works on the other."""
STATE_BYTES = 12
"""A trained weight, in the host's memory: master copy and two states."""
_ALIGNED = 64
"""Bytes at a multiple of which each tensor in a buffer begins."""


class AdamWOffload:
    """`Optimizer` with the states of `AdamW` in the host's memory; nothing in it is random."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        weight_decay: float,
        max_grad_norm: float | None,
        fused: bool,
    ) -> None:
        self._slots = [make_slot(name, parameter, fused, on_host=True) for name, parameter in parameters]
        self._max_grad_norm = max_grad_norm
        self._rule = Rule(fused)
        device = self._slots[0].parameter.device
        self._down, self._up = _Lane(device), _Lane(device)
        size = min(LOAD_BYTES, sum(_aligned(slot.parameter.nbytes) for slot in self._slots))
        self.buffers = [
            torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda") for _ in range(2 * LOADS)
        ]
        """For gradients, then for weights."""
        self._loads = _packed(self._slots, weight_decay, self.buffers)

    def compile(self, journal: Journal) -> None:
        """Nothing: its kernels come with torch."""

    @torch.no_grad()
    def step(self, number: int, learning_rate: float, loss: torch.Tensor) -> torch.Tensor:
        """See `Optimizer.step`. NonFinite comes at once."""
        norm, scale = gpu_half(number, [slot.parameter for slot in self._slots], loss, self._max_grad_norm)
        self.host_half(learning_rate, scale)
        return norm

    @torch.no_grad()
    def host_half(self, learning_rate: float, scale: float) -> None:
        """Update everything with the gradients times `scale`. Returns when the weights are back on the GPU."""
        arrived: list[torch.cuda.Event | None] = [self._down.copy(self._loads[0].gradients())]
        sent: list[torch.cuda.Event | None] = []
        for index, load in enumerate(self._loads):
            if index + 1 < len(self._loads):  # into the buffer of the load before, which has been used
                arrived.append(self._down.copy(self._loads[index + 1].gradients()))
            _wait(arrived[index])
            if index >= LOADS:
                _wait(sent[index - LOADS])  # its buffer is used again
            for decay, chunk in load.chunks:
                self._rule.apply(chunk, decay=decay, learning_rate=learning_rate, scale=scale)
            sent.append(self._up.copy(load.weights()))
        _wait(sent[-1])

    def raise_if_nonfinite(self) -> None:
        """Nothing: `step` has raised."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """That of `AdamW`: a run can resume with either."""
        return states_of(self._slots)

    @torch.no_grad()
    def load_state_dict(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Copy saved states in, or refuse. The parameters are those of the same checkpoint by now."""
        load_states(self.state_dict(), saved)
        for slot in self._slots:
            if not slot.finer:  # its master is no state: the weights are
                slot.master.copy_(slot.parameter)


def gpu_half(
    step: int, parameters: Iterable[nn.Parameter], loss: torch.Tensor, max_norm: float | None
) -> tuple[torch.Tensor, float]:
    """All that an update computes on the GPU: the global norm (0-dim), and the factor for the gradients, on the host.

    Waits for the GPU. Raises NonFinite if loss or norm of `step` is not finite.
    """
    norm = gradient_norm(parameters)
    return norm, finite_clipping(step, norm, loss, max_norm)


class _Lane:
    """One direction between host and GPU, beside what the GPU computes. On a CPU copies are made at once."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> torch.cuda.Event | None:
        """Copy each second tensor into the first; the event is recorded after them all."""
        if self._stream is None:
            for target, source in pairs:
                target.copy_(source)
            return None
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            event: torch.cuda.Event = self._stream.record_event()
            return event


def _wait(event: torch.cuda.Event | None) -> None:
    if event is not None:
        event.synchronize()


class _LoadedPiece(SlotPiece):
    """Whose gradient comes in a buffer, and whose weights go from one."""

    def __init__(self, slot: Slot, part: slice, gradient: torch.Tensor, weights: torch.Tensor) -> None:
        super().__init__(slot, part)
        self._arrived, self.copied = gradient, weights

    @property
    def gradient(self) -> torch.Tensor | None:
        """In the master's type: a copy, or what is in the buffer."""
        return None if self.slot.parameter.grad is None else self._arrived.to(self.master.dtype)


@dataclass(frozen=True)
class _Part:
    """Numbers of one parameter, and where they are in the buffers."""

    parameter: nn.Parameter
    place: slice
    """Of the flattened parameter."""
    gradient: torch.Tensor
    weights: torch.Tensor


@dataclass
class _Load:
    """What comes and goes at once."""

    parts: list[_Part] = field(default_factory=list)
    chunks: list[tuple[float, list[SlotPiece]]] = field(default_factory=list)
    """Weight decay, and pieces of which a CPU's cache holds all."""

    def gradients(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Buffer and gradient of each parameter that has one."""
        for part in self.parts:
            if part.parameter.grad is not None:
                yield part.gradient, part.parameter.grad.view(-1)[part.place]

    def weights(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Weights and buffer of each parameter that was updated."""
        for part in self.parts:
            if part.parameter.grad is not None:
                yield part.parameter.detach().view(-1)[part.place], part.weights


def _packed(slots: Iterable[Slot], weight_decay: float, buffers: Sequence[torch.Tensor]) -> list[_Load]:
    """Every number in a load, in order, with views of the buffers for it."""
    loads: list[_Load] = []
    used = size = len(buffers[0])
    for slot in slots:
        count, dtype = slot.parameter.numel(), slot.parameter.dtype
        decay = weight_decay if decays(slot.name, slot.parameter) else 0.0
        most = LOAD_BYTES // dtype.itemsize
        for begin in range(0, count, most):
            place = slice(begin, min(begin + most, count))
            taken = (place.stop - begin) * dtype.itemsize
            if used + taken > size:
                loads.append(_Load())
                places = len(loads) % LOADS, LOADS + len(loads) % LOADS
                used = 0
            gradient, weights = (buffers[which][used : used + taken].view(dtype) for which in places)
            used += _aligned(taken)
            part = _Part(slot.parameter, place, gradient, weights)
            loads[-1].parts.append(part)
            _add(loads[-1].chunks, slot, part, decay)
    return loads


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _add(chunks: list[tuple[float, list[SlotPiece]]], slot: Slot, part: _Part, decay: float) -> None:
    """The pieces of a part, each with those before it if they are small and decay alike."""
    first = part.place.start
    for begin in range(first, part.place.stop, PIECE):
        place = slice(begin, min(begin + PIECE, part.place.stop))
        within = slice(place.start - first, place.stop - first)
        piece = _LoadedPiece(slot, place, part.gradient[within], part.weights[within])
        if not chunks or chunks[-1][0] != decay or _numbers(chunks[-1][1]) + _numbers([piece]) > PIECE:
            chunks.append((decay, []))
        chunks[-1][1].append(piece)


def _numbers(pieces: Iterable[SlotPiece]) -> int:
    return sum(piece.master.numel() for piece in pieces)
