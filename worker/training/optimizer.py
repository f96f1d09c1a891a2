"""AdamW with an fp32 master copy and fp32 states beside bf16 weights, and the learning-rate schedule.

Why a master copy: rounding to the nearest bf16 loses 94 % of Adam's updates at a learning rate of 1e-5. The update runs
over chunks of parameters, so that the fp32 copies of gradients never exist all at once.

A step whose loss or gradient norm is not finite changes nothing. On the CPU that is looked at directly. On CUDA looking
would make the host wait at every step; there a flag on the device switches off the update of that step and of all that
follow, and `raise_if_nonfinite`, called wherever the host waits anyway, names the first bad step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.optim.adamw import adamw

from jobs.errors import NonFinite, Refused

CHUNK_ELEMENTS = 2**25  # fp32 gradients of one chunk: 128 MiB, or one parameter if that is larger


def learning_rate(
    step: int, *, peak: float, steps: int, warmup: int, decay: Literal["linear", "cosine", "constant"]
) -> float:
    """Rate of step 1 … `steps`: rises as step / warmup, then decays so that it would be 0 one step after the last."""
    if step < warmup:
        return peak * step / warmup
    start = max(1, warmup)
    share = (step - start) / (steps + 1 - start)  # 0 at the peak, 1 one step after the last
    if decay == "linear":
        return peak * (1 - share)
    if decay == "cosine":
        return peak * 0.5 * (1 + math.cos(math.pi * share))
    return peak


@dataclass(frozen=True)
class _Slot:
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
        return states | {"master": self.master} if self.separate else states

    @property
    def separate(self) -> bool:
        """Whether the master is a copy of its own."""
        return self.master.data_ptr() != self.parameter.data_ptr()


class AdamW:
    """Decoupled weight decay (not on biases and layer norms), clipping by global norm, all states allocated at once."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        weight_decay: float,
        max_grad_norm: float | None,
        fused: bool,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        self._slots = [_slot(name, parameter, fused) for name, parameter in parameters if parameter.requires_grad]
        self._weight_decay = weight_decay
        self._max_grad_norm = max_grad_norm
        self._betas = betas
        self._eps = eps
        self._fused = fused
        device = self._slots[0].parameter.device
        self._first_bad = torch.zeros((), dtype=torch.int64, device=device)  # first step that was not finite, or 0
        self._deferred = fused and device.type == "cuda"  # only the fused kernels take a flag on the device
        self._chunks = [
            (weight_decay if decays else 0.0, chunk)
            for decays in (True, False)
            for chunk in _chunked([slot for slot in self._slots if _decays(slot) is decays])
        ]

    @torch.no_grad()
    def step(self, number: int, learning_rate: float, loss: torch.Tensor) -> torch.Tensor:
        """Clip the gradients and update the weights; returns the global norm before clipping (0-dim, on the device).

        Step `number` with a `loss` (0-dim) or norm that is not finite changes nothing; raises NonFinite at once on the
        CPU, at the next `raise_if_nonfinite` on CUDA.
        """
        norm = self._gradient_norm()
        bad = ~torch.isfinite(norm + loss.to(norm.dtype))
        self._first_bad = torch.where(bad & (self._first_bad == 0), number, self._first_bad)
        if not self._deferred:
            self.raise_if_nonfinite()
        scale = None if self._max_grad_norm is None else torch.clamp(self._max_grad_norm / (norm + 1e-6), max=1.0)
        for decay, chunk in self._chunks:
            self._update(chunk, decay, learning_rate, scale)
        return norm

    def raise_if_nonfinite(self) -> None:
        """Raise NonFinite if a step so far was not finite. Waits for the device."""
        first = int(self._first_bad.item())
        if first:
            raise NonFinite(
                f"loss or gradient norm of step {first} is NaN or infinite; the weights are those of step {first - 1}",
                hint="lower schedule.learning_rate, or look at the rows of that step; the checkpoints are intact",
            )

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Flat, `kind.parameter name` → tensor; the tensors themselves, not copies."""
        return {f"{kind}.{slot.name}": state for slot in self._slots for kind, state in slot.states().items()}

    @torch.no_grad()
    def load_state_dict(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Copy saved states in. Refuses `optimizer_state` unless names and shapes are exactly those of `state_dict`."""
        own = self.state_dict()
        wrong = sorted(own.keys() ^ saved.keys())
        wrong = wrong or sorted(name for name in own if own[name].shape != saved[name].shape)
        if wrong:
            raise Refused(
                f"{len(wrong)} optimizer states are missing, unknown or of another shape: {', '.join(wrong[:5])}",
                code="optimizer_state",
                hint="the checkpoint belongs to another model or another version",
            )
        for name, state in own.items():
            state.copy_(saved[name])

    def _gradient_norm(self) -> torch.Tensor:
        # Reduced in the precision of the master weights, without a copy of the gradient in it.
        norms: list[torch.Tensor] = [
            torch.linalg.vector_norm(slot.parameter.grad, dtype=slot.master.dtype)
            for slot in self._slots
            if slot.parameter.grad is not None
        ]
        norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return norm

    def _update(self, chunk: list[_Slot], decay: float, learning_rate: float, scale: torch.Tensor | None) -> None:
        chunk = [slot for slot in chunk if slot.parameter.grad is not None]
        gradients = [slot.parameter.grad.to(slot.master.dtype) for slot in chunk if slot.parameter.grad is not None]
        if scale is not None:
            for gradient in gradients:
                gradient.mul_(scale)
        adamw(
            [slot.master for slot in chunk],
            gradients,
            [slot.exp_avg for slot in chunk],
            [slot.exp_avg_sq for slot in chunk],
            [],
            [slot.step for slot in chunk],
            foreach=False,
            fused=self._fused,
            found_inf=(self._first_bad != 0).to(torch.float32) if self._fused else None,
            amsgrad=False,
            beta1=self._betas[0],
            beta2=self._betas[1],
            lr=learning_rate,
            weight_decay=decay,
            eps=self._eps,
            maximize=False,
        )
        for slot in chunk:
            if slot.separate:
                slot.parameter.copy_(slot.master)


def _slot(name: str, parameter: nn.Parameter, fused: bool) -> _Slot:
    needs_master = parameter.dtype in (torch.bfloat16, torch.float16)
    master = parameter.detach().to(torch.float32) if needs_master else parameter.detach()
    return _Slot(
        name=name,
        parameter=parameter,
        master=master,
        exp_avg=torch.zeros_like(master, memory_format=torch.preserve_format),
        exp_avg_sq=torch.zeros_like(master, memory_format=torch.preserve_format),
        # The fused kernel reads its step on the device; the plain one wants it on the host, where reading is free.
        step=torch.zeros((), dtype=torch.float32, device=parameter.device if fused else "cpu"),
    )


def _decays(slot: _Slot) -> bool:
    return slot.parameter.ndim >= 2 and "bias" not in slot.name


def _chunked(slots: list[_Slot]) -> list[list[_Slot]]:
    chunks: list[list[_Slot]] = []
    room = 0
    for slot in slots:
        if not chunks or slot.parameter.numel() > room:
            chunks.append([])
            room = CHUNK_ELEMENTS
        chunks[-1].append(slot)
        room -= slot.parameter.numel()
    return chunks
