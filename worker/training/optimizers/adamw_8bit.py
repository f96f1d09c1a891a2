"""AdamW with states of one byte a number (torchao), and weights rounded stochastically to bf16.

Its update is computed in fp32, weight decay included, and compiled: one pass over a parameter, its gradient and states,
and no fp32 copy of them in memory. States are kept as codes into a table of 256 values with one fp32 scale for each 256
numbers. Tensors of less than 4,096 numbers keep fp32 states: torchao would give them bf16 ones, in which the second
moment, moving by a thousandth a step, gets stuck.

The host waits for the device once a step, to see whether loss and norm are finite: the compiled update takes no flag
that would switch it off. That costs the time to fetch one number, and the start of the next step is not overlapped
with the end of this one: some milliseconds in a step of seconds.

Gradients above the limit of the norm are scaled down in place, in bf16.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn
from torchao.optim import AdamW8bit as TorchaoAdamW8bit
from torchao.optim.subclass_8bit import OptimState8bit

from worker.training.journal import Journal
from worker.training.optimizers.gradients import decays, finite_clipping, gradient_norm
from worker.training.optimizers.states import load_states
from worker.training.steps.randomness import update_seed

BLOCK = 256  # numbers that share a scale
LEAST_QUANTISED = 4096


class AdamW8bit:
    """`Optimizer` over torchao's, whose states it allocates before the first step and saves as plain tensors."""

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
        self._named = list(parameters)
        self._max_grad_norm = max_grad_norm
        self._seed = seed
        self._betas, self._eps = betas, eps
        device = self._named[0][1].device
        # One table of each kind for all parameters. They are saved, too: codes mean nothing without them.
        self._tables = {signed: OptimState8bit.zeros((BLOCK,), signed, BLOCK, device).qmap for signed in (True, False)}
        # A tensor, since a number would be compiled in. On the host, where the kernels take it as an argument.
        self._rate = torch.zeros(())
        groups = [
            (decay, [parameter for name, parameter in self._named if decays(name, parameter) is decaying])
            for decaying, decay in ((True, weight_decay), (False, 0.0))
        ]
        self._optimizer = self._over([(decay, group) for decay, group in groups if group])

    def compile(self, journal: Journal) -> None:
        """Compile the update of every shape, by updating stand-ins: half a minute at first, then it is in a cache."""
        journal.phase("compile")
        seen: set[tuple[torch.Size, torch.dtype, float]] = set()
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                kind = (parameter.shape, parameter.dtype, group["weight_decay"])
                if kind not in seen:
                    seen.add(kind)
                    stand_in = nn.Parameter(torch.zeros_like(parameter))
                    stand_in.grad = torch.zeros_like(parameter)
                    self._over([(group["weight_decay"], [stand_in])]).step()
                    journal.progress()

    @torch.no_grad()
    def step(self, number: int, learning_rate: float, loss: torch.Tensor) -> torch.Tensor:
        """See `Optimizer.step`. NonFinite comes at once."""
        parameters = [parameter for _, parameter in self._named]
        norm = gradient_norm(parameters)
        scale = finite_clipping(number, norm, loss, self._max_grad_norm)
        if scale < 1:
            torch._foreach_mul_([parameter.grad for parameter in parameters if parameter.grad is not None], scale)
        # The rounding draws from the global generators. Nothing else draws from them until the next step seeds them.
        torch.manual_seed(update_seed(self._seed, number))
        self._rate.fill_(learning_rate)
        self._optimizer.step()
        return norm

    def raise_if_nonfinite(self) -> None:
        """Nothing: `step` has raised."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Flat: `exp_avg.codes.NAME` and `exp_avg.scale.NAME` (or `exp_avg.NAME`), exp_avg_sq likewise, `step.NAME`."""
        states = {f"table.{'signed' if signed else 'unsigned'}": table for signed, table in self._tables.items()}
        for name, parameter in self._named:
            for kind, state in self._optimizer.state[parameter].items():
                if isinstance(state, OptimState8bit):
                    states[f"{kind}.codes.{name}"] = state.codes
                    states[f"{kind}.scale.{name}"] = state.scale
                else:
                    states[f"{kind}.{name}"] = state
        return states

    def load_state_dict(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Copy saved states in, or refuse."""
        load_states(self.state_dict(), saved)

    def _over(self, groups: list[tuple[float, list[nn.Parameter]]]) -> TorchaoAdamW8bit:
        optimizer = TorchaoAdamW8bit(
            [{"params": parameters, "weight_decay": decay} for decay, parameters in groups],
            lr=self._rate,
            betas=self._betas,
            eps=self._eps,
            block_size=BLOCK,
            bf16_stochastic_round=True,
        )
        for _, parameters in groups:
            for parameter in parameters:
                optimizer.state[parameter] = {
                    "step": torch.zeros(()),
                    "exp_avg": self._state(parameter, signed=True),
                    "exp_avg_sq": self._state(parameter, signed=False),
                }
        return optimizer

    def _state(self, parameter: nn.Parameter, *, signed: bool) -> torch.Tensor:
        count = parameter.numel()
        if count < LEAST_QUANTISED or count % BLOCK:
            return torch.zeros_like(parameter, dtype=torch.float32)
        codes = torch.zeros_like(parameter, dtype=torch.uint8)
        scale = torch.zeros(count // BLOCK, device=parameter.device)
        state: torch.Tensor = OptimState8bit(codes, scale, self._tables[signed], signed, dtype=parameter.dtype)
        return state
