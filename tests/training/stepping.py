"""What tests of single steps share: a journal, an optimizer, memory that runs out, results, and weights compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from worker.training.journal import Journal
from worker.training.optimizers.adamw import AdamW
from worker.training.steps.result import StepResult
from worker.training.steps.shape import MicroBatchShape


class Noting(Journal):
    """A journal that remembers its facts."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.folder = path.parent
        self.facts: list[Any] = []

    def note(self, fact: Any) -> None:
        self.facts.append(fact)


class FailingAt(TorchDispatchMode):
    """Raises at the `k`-th operation, once (or from then on at every `again`-th)."""

    def __init__(self, k: int, *, always: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.k, self.always, self.count = k, always, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count == self.k or (self.always and self.count > self.k):
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate 2.00 GiB (injected at {self.count})")
        return function(*args, **(kwargs or {}))


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def farthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def optimizer_for(model: torch.nn.Module) -> AdamW:
    return AdamW(model.named_parameters(), weight_decay=0.01, max_grad_norm=1.0, fused=True)


def step_result(step: int, **more: Any) -> StepResult:
    one = torch.tensor(1.0)
    facts: dict[str, Any] = {
        "step": step, "epoch": 0.1, "loss": one, "grad_norm": one, "learning_rate": 1e-4, "rows": 8,
        "input_tokens": 600, "target_tokens": 300, "padded_tokens": 1000, "flops": 4e12, "data_wait_s": 0.1,
        "micro_batch": 4, "largest": MicroBatchShape(4, 16, 16),
    }  # fmt: skip
    return StepResult(**facts | more)
