"""AdamW with states of one byte a number, and weights rounded stochastically to bf16: torchao's `AdamW8bit`.

Quantization and rounding are torchao's functions, and the update is its formula, on plain tensors: its tensor subclass
and the choice among compiled functions cost the host 0.6 ms a parameter, 0.33 s a step of FLAN-T5-XL in which the GPU
is idle. This costs 0.13 s.

The update is computed in fp32, weight decay included, and compiled: one pass over a parameter, its gradient and states,
and no fp32 copy of them in memory. States are kept as codes into a table of 256 values with one fp32 scale for each 256
numbers. Tensors of less than 4,096 numbers keep fp32 states: torchao would give them bf16 ones, in which the second
moment, moving by a thousandth a step, gets stuck.

The host waits for the device once a step, to see whether loss and norm are finite: the compiled update takes no flag
that would switch it off. That costs the time to fetch one number, and the start of the next step is not overlapped
with the end of this one: some milliseconds in a step of seconds.

Gradients above the limit of the norm are scaled down in place, in bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torchao.optim.quant_utils import (
    _fp32_to_bf16_sr,
    dequant_with_qmap,
    quantize_8bit_with_qmap,
    scale_tensor,
)
from torchao.optim.subclass_8bit import get_qmap_signed, get_qmap_unsigned

from worker.training.journal import Journal
from worker.training.optimizers.gradients import decays, finite_clipping, gradient_norm, load_states
from worker.training.steps.randomness import update_seed

BLOCK = 256  # numbers that share a scale
LEAST_QUANTISED = 4096
_MOST_KINDS = 64  # of parameters, by shape, dtype and decay: a compiled update each; FLAN-T5-XL has 6


@dataclass(frozen=True)
class _Moment:
    """Codes into `table`, of the parameter's shape, and the scale of each block; or fp32 numbers, without both."""

    values: torch.Tensor
    scale: torch.Tensor | None
    table: torch.Tensor | None

    def named(self, kind: str, name: str) -> dict[str, torch.Tensor]:
        """As a checkpoint names them."""
        if self.scale is None:
            return {f"{kind}.{name}": self.values}
        return {f"{kind}.codes.{name}": self.values, f"{kind}.scale.{name}": self.scale}


@dataclass(frozen=True)
class _ParameterStates:
    """A parameter and its states."""

    name: str
    parameter: nn.Parameter
    decay: float
    step: torch.Tensor
    first: _Moment
    second: _Moment


class AdamW8bit:
    """`Optimizer` whose states are allocated before the first step and saved as plain tensors."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        weight_decay: float,
        max_grad_norm: float | None,
        seed: int,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        named = list(parameters)
        self._max_grad_norm = max_grad_norm
        self._seed = seed
        device = named[0][1].device
        # One table of each kind for all parameters. They are saved, too: codes mean nothing without them.
        self._tables = {
            signed: torch.tensor(make(), dtype=torch.float32, device=device)
            for signed, make in ((True, get_qmap_signed), (False, get_qmap_unsigned))
        }
        # A tensor, since a number would be compiled in. On the host, where the kernels take it as an argument.
        self._rate = torch.zeros(())
        # Those that decay come first: so rounding draws from the generator.
        self._slots = [
            self._slot(name, parameter, weight_decay if decaying else 0.0)
            for decaying in (True, False)
            for name, parameter in named
            if decays(name, parameter) is decaying
        ]
        self._update: Callable[..., None] = torch.compile(  # type: ignore[call-overload]  # too new
            _updating(*betas, eps), fullgraph=True, dynamic=False, recompile_limit=_MOST_KINDS
        )

    def compile(self, journal: Journal) -> None:
        """Compile the update of every shape, by updating stand-ins: half a minute at first, then it is in a cache."""
        journal.phase("compile")
        seen: set[tuple[torch.Size, torch.dtype, float]] = set()
        for slot in self._slots:
            kind = (slot.parameter.shape, slot.parameter.dtype, slot.decay)
            if kind not in seen:
                seen.add(kind)
                stand_in = nn.Parameter(torch.zeros_like(slot.parameter))
                stand_in.grad = torch.zeros_like(slot.parameter)
                self._apply(self._slot(slot.name, stand_in, slot.decay))
                journal.progress()

    @torch.no_grad()
    def step(self, number: int, learning_rate: float, loss: torch.Tensor) -> torch.Tensor:
        """See `Optimizer.step`. NonFinite comes at once."""
        parameters = [slot.parameter for slot in self._slots]
        norm = gradient_norm(parameters)
        scale = finite_clipping(number, norm, loss, self._max_grad_norm)
        if scale < 1:
            torch._foreach_mul_([parameter.grad for parameter in parameters if parameter.grad is not None], scale)
        # The rounding draws from the global generators. Nothing else draws from them until the next step seeds them.
        torch.manual_seed(update_seed(self._seed, number))
        self._rate.fill_(learning_rate)
        for slot in self._slots:
            if slot.parameter.grad is not None:
                self._apply(slot)
        return norm

    def raise_if_nonfinite(self) -> None:
        """Nothing: `step` has raised."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Flat: `exp_avg.codes.NAME` and `exp_avg.scale.NAME` (or `exp_avg.NAME`), exp_avg_sq likewise, `step.NAME`."""
        states = {f"table.{'signed' if signed else 'unsigned'}": table for signed, table in self._tables.items()}
        for slot in self._slots:
            states |= slot.first.named("exp_avg", slot.name) | slot.second.named("exp_avg_sq", slot.name)
            states[f"step.{slot.name}"] = slot.step
        return states

    def load_state_dict(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Copy saved states in, or refuse."""
        load_states(self.state_dict(), saved)

    @torch.no_grad()
    def _apply(self, slot: _ParameterStates) -> None:
        slot.step.add_(1)
        self._update(
            slot.parameter.detach(), slot.parameter.grad, slot.step, self._rate, slot.decay,
            slot.first.values, slot.first.scale, slot.first.table,
            slot.second.values, slot.second.scale, slot.second.table,
        )  # fmt: skip

    def _slot(self, name: str, parameter: nn.Parameter, decay: float) -> _ParameterStates:
        first, second = self._moment(parameter, signed=True), self._moment(parameter, signed=False)
        return _ParameterStates(name, parameter, decay, torch.zeros(()), first, second)

    def _moment(self, parameter: nn.Parameter, *, signed: bool) -> _Moment:
        count = parameter.numel()
        if count < LEAST_QUANTISED or count % BLOCK:
            return _Moment(torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False), None, None)
        codes = torch.zeros_like(parameter, dtype=torch.uint8, requires_grad=False)
        return _Moment(codes, torch.zeros(count // BLOCK, device=parameter.device), self._tables[signed])


def _updating(beta1: float, beta2: float, eps: float) -> Callable[..., None]:
    """The update of one parameter, in place (source: torchao 0.18, `single_param_adam`)."""

    def update(
        parameter: torch.Tensor, gradient: torch.Tensor, step: torch.Tensor, rate: torch.Tensor, decay: float,
        first: torch.Tensor, first_scale: torch.Tensor | None, first_table: torch.Tensor | None,
        second: torch.Tensor, second_scale: torch.Tensor | None, second_table: torch.Tensor | None,
    ) -> None:  # fmt: skip
        weights, slope = parameter.float(), gradient.float()
        weights = weights - rate * decay * weights
        mean = _read(first, first_scale, first_table).lerp(slope, 1 - beta1)
        square = _read(second, second_scale, second_table).lerp(slope.square(), 1 - beta2)
        _write(first, first_scale, first_table, mean)
        _write(second, second_scale, second_table, square)
        denominator = square.sqrt() / (1 - beta2**step).sqrt() + eps
        weights = weights - rate * (mean / (1 - beta1**step)) / denominator
        parameter.copy_(_fp32_to_bf16_sr(weights) if parameter.dtype == torch.bfloat16 else weights)

    return update


def _read(values: torch.Tensor, scale: torch.Tensor | None, table: torch.Tensor | None) -> torch.Tensor:
    if scale is None or table is None:
        return values
    numbers: torch.Tensor = dequant_with_qmap(values, table, scale)
    return numbers


def _write(values: torch.Tensor, scale: torch.Tensor | None, table: torch.Tensor | None, numbers: torch.Tensor) -> None:
    if scale is None or table is None:
        values.copy_(numbers)
        return
    scaled, scales = scale_tensor(numbers, BLOCK)
    values.copy_(quantize_8bit_with_qmap(scaled, table))
    scale.copy_(scales)
