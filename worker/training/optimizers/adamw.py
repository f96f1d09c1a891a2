"""AdamW with an fp32 master copy and fp32 states beside bf16 weights.

The update runs over chunks, so that the fp32 copies of gradients never exist all at once: of whole parameters on a GPU;
on a CPU of pieces that its cache holds, which takes a third of the time.

A step whose loss or gradient norm is not finite changes nothing. On the CPU that is looked at directly. On CUDA looking
would make the host wait at every step; there a flag on the device switches off the update of that step and of all that
follow, and `raise_if_nonfinite`, called wherever the host waits anyway, names the first bad step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim.adamw import adamw

from worker.training.journal import Journal
from worker.training.optimizers.gradients import (
    PIECE,
    clipping,
    decays,
    gradient_norm,
    load_states,
    nonfinite,
    update_dtype,
)

CHUNK_ELEMENTS = 2**25  # fp32 gradients of one chunk: 128 MiB, or one parameter if that is larger; on a CPU `PIECE`


@dataclass(frozen=True)
class Slot:
    """One parameter with its states. `master` is the parameter itself where that is already fp32 or float64."""

    name: str
    parameter: nn.Parameter
    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    step: torch.Tensor

    def states(self) -> dict[str, torch.Tensor]:
        """What has to be saved, by kind."""
        states = {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq, "step": self.step}
        return states | {"master": self.master} if self.finer else states

    @property
    def finer(self) -> bool:
        """Whether the master holds more than the parameter."""
        return self.master.dtype != self.parameter.dtype


class SlotPiece:
    """Numbers of one parameter that are updated together: views of it and of its states."""

    def __init__(self, slot: Slot, part: slice | None) -> None:
        """`part`: of them all, flattened; None: all."""
        self.slot, self._part = slot, part
        self.master, self.exp_avg, self.exp_avg_sq = map(self._of, (slot.master, slot.exp_avg, slot.exp_avg_sq))
        self.copied = self._of(slot.parameter.detach()) if slot.finer else None
        """To which the master's numbers are copied."""
        self.last = part is None or part.stop == slot.parameter.numel()
        """Whether no later numbers of the parameter are left."""

    @property
    def gradient(self) -> torch.Tensor | None:
        """In the master's type: a copy, or the gradient itself."""
        gradient = self.slot.parameter.grad
        return None if gradient is None else self._of(gradient).to(self.master.dtype)

    def _of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self._part is None else tensor.view(-1)[self._part]


@dataclass(frozen=True)
class Rule:
    """How numbers are updated: decoupled weight decay, both moments corrected for their start at 0."""

    fused: bool
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def apply(
        self,
        chunk: Sequence[SlotPiece],
        *,
        decay: float,
        learning_rate: float,
        scale: torch.Tensor | float | None,
        skip: torch.Tensor | None = None,
    ) -> None:
        """Update the pieces that have a gradient. `scale`: of gradients; `skip`: 1.0 on the device changes nothing."""
        found = [(piece, gradient) for piece in chunk if (gradient := piece.gradient) is not None]
        chunk, gradients = [piece for piece, _ in found], [gradient for _, gradient in found]
        if scale is not None and gradients:
            torch._foreach_mul_(gradients, scale)
        adamw(
            [piece.master for piece in chunk],
            gradients,
            [piece.exp_avg for piece in chunk],
            [piece.exp_avg_sq for piece in chunk],
            [],
            # torch counts a step for each of these: the last piece of a parameter counts it for all.
            [piece.slot.step if piece.last else piece.slot.step.clone() for piece in chunk],
            foreach=False,
            fused=self.fused,
            found_inf=skip,
            amsgrad=False,
            beta1=self.beta1,
            beta2=self.beta2,
            lr=learning_rate,
            weight_decay=decay,
            eps=self.eps,
            maximize=False,
        )
        for piece in chunk:
            if piece.copied is not None:
                piece.copied.copy_(piece.master)


class AdamW:
    """`Optimizer` with full states; nothing in it is random."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        weight_decay: float,
        max_grad_norm: float | None,
        fused: bool,
    ) -> None:
        self._slots = [make_slot(name, parameter, fused) for name, parameter in parameters]
        self._max_grad_norm = max_grad_norm
        self._rule = Rule(fused)
        device = self._slots[0].parameter.device
        self._first_bad = torch.zeros((), dtype=torch.int64, device=device)  # first step that was not finite, or 0
        self._deferred = fused and device.type == "cuda"  # only the fused kernels take a flag on the device
        self._chunks = [
            (weight_decay if decaying else 0.0, chunk)
            for decaying in (True, False)
            for chunk in _chunked([slot for slot in self._slots if decays(slot.name, slot.parameter) is decaying])
        ]

    def compile(self, journal: Journal) -> None:
        """Nothing: its kernels come with torch."""

    @torch.no_grad()
    def step(self, number: int, learning_rate: float, loss: torch.Tensor) -> torch.Tensor:
        """See `Optimizer.step`; NonFinite comes at once on the CPU, at the next `raise_if_nonfinite` on CUDA."""
        norm = gradient_norm(slot.parameter for slot in self._slots)
        bad = ~torch.isfinite(norm + loss.to(norm.dtype))
        self._first_bad = torch.where(bad & (self._first_bad == 0), number, self._first_bad)
        if not self._deferred:
            self.raise_if_nonfinite()
        scale = None if self._max_grad_norm is None else clipping(norm, self._max_grad_norm)
        for decay, chunk in self._chunks:
            skip = (self._first_bad != 0).to(torch.float32) if self._rule.fused else None
            self._rule.apply(chunk, decay=decay, learning_rate=learning_rate, scale=scale, skip=skip)
        return norm

    def raise_if_nonfinite(self) -> None:
        """Raise NonFinite if a step so far was not finite. Waits for the device."""
        first = int(self._first_bad.item())
        if first:
            raise nonfinite(first)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Flat, `kind.parameter name` → tensor; the tensors themselves, not copies."""
        return states_of(self._slots)

    def load_state_dict(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Copy saved states in, or refuse."""
        load_states(self.state_dict(), saved)


def states_of(slots: Iterable[Slot]) -> dict[str, torch.Tensor]:
    """See `AdamW.state_dict`."""
    return {f"{kind}.{slot.name}": state for slot in slots for kind, state in slot.states().items()}


def make_slot(name: str, parameter: nn.Parameter, fused: bool, *, on_host: bool = False) -> Slot:
    """`on_host`: states and master copy are in the host's memory, and the master is always a copy of its own."""
    master = parameter.detach()
    master = (master.cpu() if on_host else master).to(update_dtype(parameter.dtype), copy=on_host)
    return Slot(
        name=name,
        parameter=parameter,
        master=master,
        exp_avg=torch.zeros_like(master, memory_format=torch.preserve_format),
        exp_avg_sq=torch.zeros_like(master, memory_format=torch.preserve_format),
        # The fused kernel reads its step on the device; the plain one wants it on the host, where reading is free.
        step=torch.zeros((), dtype=torch.float32, device=master.device if fused else "cpu"),
    )


def _chunked(slots: list[Slot]) -> list[list[SlotPiece]]:
    chunks: list[list[SlotPiece]] = []
    room = 0
    for slot in slots:
        count, on_cpu = slot.parameter.numel(), slot.parameter.device.type == "cpu"
        most = PIECE if on_cpu else max(count, 1)
        for begin in range(0, count, most):
            size = min(most, count - begin)
            if not chunks or size > room:
                chunks.append([])
                room = PIECE if on_cpu else CHUNK_ELEMENTS
            chunks[-1].append(SlotPiece(slot, slice(begin, begin + size) if on_cpu else None))
            room -= size
    return chunks
