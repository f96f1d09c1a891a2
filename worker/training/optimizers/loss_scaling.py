"""Loss scaling: what trains adapters beside a model in float16 (ADR 0011).

Gradients that go back through such a model are float16: below 6e-8 they become 0, and beyond 65,504 infinite. So the
loss is multiplied by a power of two before the backward pass, and the gradients of the adapters, which are float32, are
divided by it before they are used: but for rounding, they are those of the loss itself. Where they overflow, the update
of that step is skipped, and the next step has half the scale; after 2,000 steps without an overflow it is doubled. The
figures are those of `torch.amp.GradScaler`, which takes torch's own optimizers alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from jobs.errors import NonFinite
from worker.training.journal import Journal
from worker.training.optimizers.gradients import gradient_norm, load_states
from worker.training.optimizers.optimizer import Optimizer
from worker.training.steps.result import ScaledStep

FIRST_SCALE, LEAST_SCALE = 2.0**16, 1.0
GROWTH_STEPS = 2000
BEYOND_FLOAT16 = (
    "what the model computes exceeds the range of float16, or training diverges: submit the job again with "
    "method.base_dtype: bfloat16, for a GPU of compute capability 8.0 or newer"
)
"""Beginning of a hint."""


class LossScaling:
    """`Optimizer` around another one, which gets the gradients of the loss as it is, and only such as are finite.

    The host waits for the device once a step, to see whether they are.
    """

    def __init__(self, optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
        self._optimizer = optimizer
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        # On the host, where reading is free.
        self._scale = torch.tensor(FIRST_SCALE, dtype=torch.float32)
        self._steps = torch.zeros((), dtype=torch.int64)
        self._skipped = torch.zeros((), dtype=torch.int64)
        self.last: ScaledStep | None = None

    @property
    def scale(self) -> float:
        """What the loss of the next step is to be multiplied by before its backward pass."""
        return float(self._scale)

    def compile(self, journal: Journal) -> None:
        """See `Optimizer`."""
        self._optimizer.compile(journal)

    @torch.no_grad()
    def step(self, number: int, learning_rate: float, loss: torch.Tensor) -> torch.Tensor:
        """See `Optimizer`; `loss` is not scaled, the gradients are. A step that is skipped has no finite norm.

        Raises NonFinite where the loss itself is not finite, which no scale changes, and where gradients are not with
        the least scale.
        """
        scale = self.scale
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        torch._foreach_mul_(gradients, 1 / scale)
        norm = gradient_norm(self._parameters)
        no_loss, overflow = (~torch.isfinite(torch.stack([loss.to(norm.dtype), norm]))).tolist()
        if no_loss:
            raise beyond_float16(number, "the loss")
        if not overflow:
            norm = self._optimizer.step(number, learning_rate, loss)
            self._steps += 1
            if int(self._steps) == GROWTH_STEPS:
                self._change_scale(2.0)
        else:
            if scale <= LEAST_SCALE:
                raise beyond_float16(number, "the gradient norm, also without a scaled loss,")
            self._skipped += 1
            self._change_scale(0.5)
        self.last = ScaledStep(scale, overflow, self.scale, int(self._skipped))
        return norm

    def raise_if_nonfinite(self) -> None:
        """See `Optimizer`."""
        self._optimizer.raise_if_nonfinite()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Those of the optimizer, and three numbers."""
        own = {"scale": self._scale, "steps": self._steps, "skipped": self._skipped}
        return self._optimizer.state_dict() | {f"loss_scaling.{name}": state for name, state in own.items()}

    def load_state_dict(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Copy saved states in, or refuse."""
        load_states(self.state_dict(), saved)
        # Its own by now, but it may have more to do with them.
        self._optimizer.load_state_dict(self._optimizer.state_dict())

    def _change_scale(self, factor: float) -> None:
        self._scale *= factor
        self._steps.zero_()


def beyond_float16(step: int, what: str) -> NonFinite:
    """The error of a step that no loss scale could make finite."""
    return NonFinite(
        f"{what} of step {step} is NaN or infinite beside a model in float16; the weights are those of step {step - 1}",
        hint=f"{BEYOND_FLOAT16}; lower training.learning_rate; or look at the rows of that step; the checkpoints are "
        "intact",
    )
