"""What AdamW alone has: the steps of torch's own, the flag on the device; the schedule's values."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import nn

from jobs.errors import NonFinite
from worker.training.optimizers import adamw as module
from worker.training.optimizers import gradients
from worker.training.optimizers.adamw import AdamW
from worker.training.steps.learning_rate import learning_rate

LOSS = torch.tensor(1.0)


def layers(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 3)).to(dtype)


def draw_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("piece", [2**18, 3])
def test_adamw_equals_that_of_torch(fused: bool, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for each in (module, gradients):
        monkeypatch.setattr(each, "PIECE", piece)
    ours, theirs = layers(), layers()
    matrices = [parameter for parameter in theirs.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in theirs.parameters() if parameter.ndim < 2]
    reference = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], lr=1e-2, fused=fused
    )
    tested = AdamW(ours.named_parameters(), weight_decay=0.1, max_grad_norm=0.5, fused=fused)
    for step in range(1, 6):
        draw_gradients(ours, step)
        draw_gradients(theirs, step)
        expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        assert tested.step(step, 1e-2, LOSS).item() == pytest.approx(expected.item())
        reference.step()
    assert {float(state) for name, state in tested.state_dict().items() if name.startswith("step.")} == {5.0}
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_float64_stays_float64() -> None:
    model = layers(torch.float64)
    tested = AdamW(model.named_parameters(), weight_decay=0.0, max_grad_norm=1.0, fused=True)
    draw_gradients(model, 1)
    assert tested.step(1, 1e-3, LOSS.double()).dtype == torch.float64
    assert {state.dtype for name, state in tested.state_dict().items() if "step" not in name} == {torch.float64}
    assert not any(name.startswith("master.") for name in tested.state_dict())


def test_with_the_flag_on_the_device_a_bad_step_and_all_after_it_change_nothing() -> None:
    model = layers(torch.bfloat16)
    tested = AdamW(model.named_parameters(), weight_decay=0.1, max_grad_norm=1.0, fused=True)
    tested._deferred = True  # as on CUDA, where the host does not look at every step
    draw_gradients(model, 1)
    tested.step(1, 1e-2, LOSS)
    tested.raise_if_nonfinite()
    before = {name: state.clone() for name, state in (model.state_dict() | tested.state_dict()).items()}
    draw_gradients(model, 2)
    gradient = next(model.parameters()).grad
    assert gradient is not None
    gradient.view(-1)[3] = float("inf")
    tested.step(2, 1e-2, LOSS)
    draw_gradients(model, 3)
    tested.step(3, 1e-2, LOSS)
    draw_gradients(model, 4)
    tested.step(4, 1e-2, torch.tensor(float("nan")))
    with pytest.raises(NonFinite, match=r"step 2 .* those of step 1"):
        tested.raise_if_nonfinite()
    for name, state in (model.state_dict() | tested.state_dict()).items():
        assert torch.equal(state, before[name]), name


def test_the_schedule_warms_up_from_above_0_and_would_be_0_after_the_last_step() -> None:
    def rates(lr_scheduler: Literal["linear", "cosine", "constant"], warmup: int = 4) -> list[float]:
        return [
            learning_rate(step, peak=1.0, steps=10, warmup=warmup, lr_scheduler=lr_scheduler) for step in range(1, 12)
        ]

    linear = rates("linear")
    assert linear[:4] == [0.25, 0.5, 0.75, 1.0]
    assert linear[3:] == pytest.approx([1, 6 / 7, 5 / 7, 4 / 7, 3 / 7, 2 / 7, 1 / 7, 0])
    cosine = rates("cosine")
    assert cosine[:4] == linear[:4] and cosine[-1] == pytest.approx(0) and min(cosine[:-1]) > 0
    assert cosine[3:] == sorted(cosine[3:], reverse=True)
    assert rates("constant") == [0.25, 0.5, 0.75] + [1.0] * 8
    assert rates("linear", warmup=0)[0] == 1.0
