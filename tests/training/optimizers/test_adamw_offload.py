"""`adamw_offload`: the numbers of `adamw`, however many loads there are, with its states on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from jobs.spec import TrainingSpec
from worker.training.optimizers import adamw, adamw_offload, gradients
from worker.training.optimizers.adamw_offload import AdamWOffload
from worker.training.optimizers.optimizer import Optimizer, make_optimizer

LOSS = torch.tensor(1.0)
SHAPES = {"embedding": (301, 16), "norm": (7,), "projection": (64, 48), "bias": (48,), "scalar": (), "unused": (5, 5)}


LOADED, WHOLE = adamw_offload.LOAD_BYTES, gradients.PIECE


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedding takes several loads, each of several pieces; a load holds several small parameters."""
    monkeypatch.setattr(adamw, "PIECE", 160)
    monkeypatch.setattr(adamw_offload, "PIECE", 160)
    monkeypatch.setattr(gradients, "PIECE", 160)
    monkeypatch.setattr(adamw_offload, "LOAD_BYTES", 2048)


def weights(dtype: torch.dtype) -> nn.ParameterDict:
    generator = torch.Generator().manual_seed(3)
    drawn = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}
    return nn.ParameterDict({name: nn.Parameter(each) for name, each in drawn.items()})


def made(name: Any, model: nn.Module, **training: Any) -> Optimizer:
    return make_optimizer(name, model.named_parameters(), TrainingSpec(**training), fused=True)


def trained(dtype: torch.dtype, steps: range, model: nn.ParameterDict, tested: Optimizer) -> list[float]:
    """The norms."""
    norms = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for key, parameter in model.items():
            if key != "unused":
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
        norms.append(tested.step(step, 1e-3, LOSS).item())
    return norms


@pytest.mark.parametrize("max_grad_norm", [0.5, None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_weights_states_and_norms_are_those_of_adamw(dtype: torch.dtype, max_grad_norm: float | None) -> None:
    models = weights(dtype), weights(dtype)
    plain, offloaded = (
        made(name, model, weight_decay=0.1, max_grad_norm=max_grad_norm)
        for name, model in zip(("adamw", "adamw_offload"), models, strict=True)
    )
    assert isinstance(offloaded, AdamWOffload)
    norms = [trained(dtype, range(1, 8), model, one) for model, one in zip(models, (plain, offloaded), strict=True)]
    assert norms[0] == norms[1]
    for key, weight in models[0].items():
        assert torch.equal(weight, models[1][key]), key
    states = offloaded.state_dict()
    assert states.keys() == plain.state_dict().keys()
    assert [key for key, state in plain.state_dict().items() if not torch.equal(state, states[key])] == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("order", [("adamw", "adamw_offload"), ("adamw_offload", "adamw")])
def test_each_takes_the_states_of_the_other(order: tuple[str, str], dtype: torch.dtype) -> None:
    undisturbed, resumed = weights(dtype), weights(dtype)
    one = made(order[0], undisturbed)
    trained(dtype, range(1, 3), undisturbed, one)
    with torch.no_grad():
        for key, weight in resumed.items():
            weight.copy_(undisturbed[key])
    other = made(order[1], resumed)
    other.load_state_dict(one.state_dict())
    for model, optimizer in ((undisturbed, one), (resumed, other)):
        trained(dtype, range(3, 6), model, optimizer)
    assert all(torch.equal(weight, resumed[key]) for key, weight in undisturbed.items())


class _FailsAt(TorchDispatchMode):
    """Memory runs out at the `at`-th operation."""

    def __init__(self, at: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.at, self.count = at, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count == self.at:
            raise torch.OutOfMemoryError("injected")
        return func(*args, **(kwargs or {}))


@contextmanager
def _marked(monkeypatch: pytest.MonkeyPatch, mode: _FailsAt) -> Iterator[Callable[[], int]]:
    """How many operations the GPU half takes."""
    ends: list[int] = []
    half = adamw_offload.gpu_half

    def noted(*args: Any) -> Any:
        result = half(*args)
        ends.append(mode.count)
        return result

    with monkeypatch.context() as patched:
        patched.setattr(adamw_offload, "gpu_half", noted)
        yield lambda: ends[-1]


def test_memory_that_runs_out_anywhere_in_the_gpu_half_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = weights(torch.bfloat16)
    tested = made("adamw_offload", model)
    trained(torch.bfloat16, range(1, 2), model, tested)
    with _marked(monkeypatch, mode := _FailsAt(0)) as end, mode:
        tested.step(2, 1e-3, LOSS)
    operations = end()
    assert 10 < operations < mode.count, "the CPU's half comes after it"
    before = {key: each.clone() for key, each in (dict(model) | tested.state_dict()).items()}
    for at in range(1, operations + 1):
        with pytest.raises(torch.OutOfMemoryError), _FailsAt(at):
            tested.step(3, 1e-3, LOSS)
        now = dict(model) | tested.state_dict()
        assert [key for key, each in before.items() if not torch.equal(each, now[key])] == [], at


def test_a_load_holds_whole_pieces_of_every_type() -> None:
    assert all(LOADED % (size * WHOLE) == 0 for size in (2, 4, 8))
