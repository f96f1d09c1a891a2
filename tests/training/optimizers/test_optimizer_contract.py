"""What every optimizer owes the trainer: small updates add up, decay works, a NaN changes nothing, strict states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from jobs.errors import NonFinite, Rejected
from jobs.spec import TrainingSpec
from worker.training.optimizers import adamw_8bit
from worker.training.optimizers.optimizer import Optimizer, make_optimizer

NAMES = ("adamw", "adamw_offload", "adamw_8bit", "adafactor")
ALIKE = ("adamw", "adamw_offload")
"""Each takes the states of the other."""
LOSS = torch.tensor(1.0)
pytestmark = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(autouse=True)
def _eager_and_quantized(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Not compiled here, which would take half a minute; and matrices of 512 numbers get states of one byte."""
    monkeypatch.setattr(adamw_8bit, "LEAST_QUANTISED", 512)
    with torch.compiler.set_stance("force_eager"):
        yield


def layers() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 3)).bfloat16()


def made(name: Any, model: nn.Module, **training: Any) -> Optimizer:
    return make_optimizer(name, model.named_parameters(), TrainingSpec(**training), fused=True)


def draw_gradients(model: nn.Module, seed: int, size: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = (size * torch.randn(parameter.shape, generator=generator)).to(parameter.dtype)


def everything(model: nn.Module, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    return {key: tensor.clone() for key, tensor in (model.state_dict() | optimizer.state_dict()).items()}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [key for key in one if not torch.equal(one[key], other[key])] == []


def test_updates_far_below_a_bf16_rounding_step_add_up(name: str) -> None:
    model = nn.ParameterDict({"weight": torch.ones(64, 64, dtype=torch.bfloat16)})  # the next below is 0.0039 away
    tested, control = made(name, model, max_grad_norm=None), nn.Parameter(model["weight"].detach().clone())
    nearest = torch.optim.AdamW([control], lr=1e-5)
    for step in range(1, 1001):
        model["weight"].grad = control.grad = torch.ones(64, 64, dtype=torch.bfloat16)
        tested.step(step, 1e-5, LOSS)
        nearest.step()
    assert model["weight"].float().mean().item() == pytest.approx(0.99, abs=0.002)
    assert control.float().mean().item() == 1.0


def test_weight_decay_far_below_a_rounding_step_works_and_spares_vectors(name: str) -> None:
    model = nn.ParameterDict({"weight": torch.ones(64, 64, dtype=torch.bfloat16), "norm": torch.ones(64).bfloat16()})
    tested, control = made(name, model, weight_decay=0.1), nn.Parameter(model["weight"].detach().clone())
    nearest = torch.optim.AdamW([control], lr=1e-3, weight_decay=0.1)
    for step in range(1, 501):
        for parameter in (*model.values(), control):
            parameter.grad = torch.zeros_like(parameter)
        tested.step(step, 1e-3, LOSS)
        nearest.step()
    assert model["weight"].float().mean().item() == pytest.approx((1 - 1e-4) ** 500, abs=0.002)
    assert torch.equal(model["norm"], torch.ones(64).bfloat16())
    assert control.float().mean().item() == 1.0


def test_gradients_are_scaled_down_to_the_limit_of_their_norm(name: str) -> None:
    clipped, scaled = layers(), layers()
    one, other = made(name, clipped, max_grad_norm=0.5), made(name, scaled, max_grad_norm=None)
    for step in (1, 2, 3):
        draw_gradients(clipped, step, size=2.0**step)
        norm = torch.nn.utils.get_total_norm([p.grad.double() for p in clipped.parameters() if p.grad is not None])
        draw_gradients(scaled, step, size=2.0**step * 0.5 / norm.item())
        assert one.step(step, 0.1, LOSS).item() == pytest.approx(norm.item(), rel=1e-5)
        assert other.step(step, 0.1, LOSS).item() == pytest.approx(0.5, rel=1e-2)
    for key, weight in clipped.state_dict().items():
        # 0.1 was moved three times; they may differ by rounding of the gradient and of the weight.
        torch.testing.assert_close(weight, scaled.state_dict()[key], rtol=0.02, atol=0.02)


def test_states_exist_before_the_first_step_and_stay_where_they_are(name: str) -> None:
    model = layers()
    tested = made(name, model)
    before = {key: state.data_ptr() for key, state in tested.state_dict().items()}
    draw_gradients(model, 1)
    tested.step(1, 1e-3, LOSS)
    assert {key: state.data_ptr() for key, state in tested.state_dict().items()} == before
    assert all(type(state) is torch.Tensor for state in tested.state_dict().values())


@pytest.mark.parametrize("where", ["gradient", "loss"])
def test_a_step_that_is_not_finite_changes_neither_weights_nor_states(name: str, where: str) -> None:
    model = layers()
    tested = made(name, model, weight_decay=0.1, max_grad_norm=None if where == "loss" else 1.0)
    draw_gradients(model, 1)
    tested.step(1, 1e-2, LOSS)
    before = everything(model, tested)
    draw_gradients(model, 2)
    if where == "gradient":
        gradient = next(model.parameters()).grad
        assert gradient is not None
        gradient.view(-1)[3] = float("nan")
    with pytest.raises(NonFinite, match=r"step 2 .* those of step 1"):
        tested.step(2, 1e-2, LOSS if where == "gradient" else torch.tensor(float("inf")))
    assert_same(everything(model, tested), before)


def test_what_is_random_follows_from_seed_and_step_alone(name: str) -> None:
    def weights_after(disturb: bool, first: int = 1, seed: int = 42) -> dict[str, torch.Tensor]:
        model = layers()
        tested = made(name, model, seed=seed)
        for step in (first, first + 1):
            draw_gradients(model, step - first)
            torch.manual_seed(5)
            torch.rand(7 if disturb else 1)
            tested.step(step, 1e-4, LOSS)
        return everything(model, tested)

    usual = weights_after(False)
    assert_same(weights_after(True), usual)
    if name not in ALIKE:
        for others in (weights_after(False, first=2), weights_after(False, seed=43)):
            assert not torch.equal(others["0.weight"], usual["0.weight"])


def test_saved_states_go_on_as_if_nothing_had_happened(name: str) -> None:
    model = layers()
    tested = made(name, model)
    draw_gradients(model, 1)
    tested.step(1, 1e-2, LOSS)
    saved = everything(model, tested)
    other = layers()
    other.load_state_dict({key: saved[key] for key in other.state_dict()})
    resumed = made(name, other)
    resumed.load_state_dict({key: saved[key] for key in tested.state_dict()})
    for one, optimizer in ((model, tested), (other, resumed)):
        draw_gradients(one, 2)
        optimizer.step(2, 1e-2, LOSS)
    assert_same(everything(other, resumed), everything(model, tested))


def test_states_that_are_not_exactly_its_own_are_refused(name: str) -> None:
    tested = made(name, layers())
    saved = {key: state.clone() for key, state in tested.state_dict().items()}
    key = next(key for key, state in saved.items() if key.endswith(".0.weight") and state.ndim)
    for change in (
        {other: state for other, state in saved.items() if other != key},
        saved | {f"{key}.9": torch.zeros(1)},
        saved | {key: saved[key][:-1]},
        saved | {key: saved[key].double()},
    ):
        with pytest.raises(Rejected, match=key) as caught:
            tested.load_state_dict(change)
        assert caught.value.detail_code == "optimizer_state"
    for other_name in set(NAMES) - {name, *(ALIKE if name in ALIKE else ())}:
        with pytest.raises(Rejected):
            made(other_name, layers()).load_state_dict(saved)
