"""Loss scaling: the update is that of the loss as it is, an overflow skips it, and all of this is in the checkpoint."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from jobs.errors import NonFinite, Rejected
from jobs.spec import LoraMethod
from jobs.trainer_facts import OomRecovered
from tests.training.conftest import tiny_model, tiny_spec
from tests.training.contexts import as_loaded, training_context
from tests.training.stepping import FailingAt, Noting, farthest, weights
from tests.training.tasks.causal import test_exactness
from tests.training.tasks.causal.families import model_of
from tests.training.tasks.causal.test_exactness import ROWS
from worker.training.adapters.lora import Lora
from worker.training.dataset.data import PreparedDataset, Rows
from worker.training.loop import accumulate, steps
from worker.training.optimizers import loss_scaling
from worker.training.optimizers.adamw import AdamW
from worker.training.optimizers.loss_scaling import FIRST_SCALE, LossScaling
from worker.training.steps.result import ScaledStep, StepResult
from worker.training.tasks.causal.batches import CausalLimit
from worker.training.tasks.causal.fused import configure

rows, _norms_in_float64 = test_exactness.rows, test_exactness._norms_in_float64
LOSS = torch.tensor(1.0)


def adamw(model: nn.Module, **settings: Any) -> AdamW:
    trained = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    return AdamW(trained, **{"weight_decay": 0.01, "max_grad_norm": 0.1, "fused": True} | settings)


def scaled(model: nn.Module, **settings: Any) -> LossScaling:
    return LossScaling(adamw(model, **settings), model.parameters())


def one_weight(gradient: float = 1.0) -> tuple[nn.Module, LossScaling]:
    """A layer of one weight with this scaled gradient, and what trains it."""
    layer = nn.Linear(1, 1, bias=False)
    give(layer, gradient)
    return layer, scaled(layer)


def give(layer: nn.Module, gradient: float) -> None:
    for parameter in layer.parameters():
        parameter.grad = torch.full_like(parameter, gradient)


@pytest.mark.usefixtures("_norms_in_float64")
@pytest.mark.parametrize("micro_batch", [1, 3, ROWS])
def test_in_float64_scaled_steps_are_those_of_the_loss_as_it_is(rows: Rows, micro_batch: int) -> None:
    model = model_of("qwen2").train()
    configure(model, fused=True, dropout=0.0)
    Lora(LoraMethod(type="lora", rank=4)).inject(model, 0)
    nn.Module.double(model)
    twin = copy.deepcopy(model)
    plain, tested = adamw(twin), scaled(model)
    norms: list[tuple[float, float]] = []
    for number in range(1, 6):
        batches = CausalLimit.of(rows, micro_batch).batches(rows, [np.arange(ROWS)], 0)
        expected = plain.step(number, 1e-2, accumulate(twin, batches))
        found = tested.step(number, 1e-2, accumulate(model, batches, None, None, tested.scale))
        norms.append((float(found), float(expected)))
        model.zero_grad()
        twin.zero_grad()
    difference = farthest(weights(model), weights(twin))
    print(json.dumps({"micro_batch": micro_batch, "weights": difference, "norms": norms[-1]}))
    assert tested.scale == FIRST_SCALE and norms[0][0] > 0.1, "clipped"
    assert difference <= 1e-12
    assert all(one == pytest.approx(other, rel=1e-12) for one, other in norms)


def test_gradients_that_float16_would_lose_arrive(rows: Rows) -> None:
    # A loss so small that its gradients are below what float16 holds: nothing is learned from it without a scale.
    model = model_of("qwen2").train()
    configure(model, fused=True, dropout=0.0)
    nn.Module.half(model)
    Lora(LoraMethod(type="lora", rank=4), torch.float16).inject(model, 0)
    assert {each.dtype for each in model.parameters() if each.requires_grad} == {torch.float32}
    [batch] = CausalLimit.of(rows, ROWS).batches(rows, [np.arange(ROWS)], 0)
    reached = {}
    for scale in (1e-7, 1e-7 * FIRST_SCALE):
        model.zero_grad()
        batch.loss_sum(model).backward(torch.tensor(scale))
        found = [each.grad for name, each in model.named_parameters() if "lora_B" in name and each.grad is not None]
        reached[scale] = sum(int(each.count_nonzero()) for each in found) / sum(each.numel() for each in found)
    print(json.dumps({"share_of_gradients": list(reached.values())}))
    assert reached[1e-7] < 0.5 and reached[1e-7 * FIRST_SCALE] > 0.99


@pytest.mark.parametrize("gradient", [float("inf"), float("-inf"), float("nan")])
def test_an_overflow_changes_nothing_but_the_scale(gradient: float) -> None:
    layer, tested = one_weight(gradient)
    before = {name: each.clone() for name, each in (weights(layer) | tested.state_dict()).items()}
    norm = tested.step(7, 0.1, LOSS)
    assert not torch.isfinite(norm)
    assert tested.last == ScaledStep(FIRST_SCALE, True, FIRST_SCALE / 2, 1)
    after = weights(layer) | tested.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"loss_scaling.scale", "loss_scaling.skipped"}
    give(layer, tested.scale)
    tested.step(8, 0.1, LOSS)
    assert tested.last is not None and not tested.last.skipped and tested.last.skipped_updates == 1
    assert float(tested.state_dict()["step.weight"]) == 1.0, "the bias of AdamW's means is that of the updates made"


def test_the_scale_doubles_after_so_many_good_steps_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scaling, "GROWTH_STEPS", 3)
    layer, tested = one_weight()
    seen = []
    for number, gradient in enumerate([1.0, 1.0, float("inf"), 1.0, 1.0, 1.0, 1.0], 1):
        give(layer, gradient)
        tested.step(number, 0.1, LOSS)
        seen.append(tested.scale / FIRST_SCALE)
    assert seen == [1, 1, 0.5, 0.5, 0.5, 1, 1]


def test_a_loss_that_is_not_finite_is_no_overflow_of_gradients() -> None:
    layer, tested = one_weight()
    before = weights(layer)["weight"].clone()
    with pytest.raises(NonFinite, match="the loss of step 3 is NaN or infinite beside a model in float16") as caught:
        tested.step(3, 0.1, torch.tensor(float("nan")))
    assert "method.base_dtype: bfloat16" in str(caught.value.hint)
    assert torch.equal(weights(layer)["weight"], before) and tested.scale == FIRST_SCALE


def test_gradients_that_no_scale_makes_finite_end_the_run() -> None:
    layer, tested = one_weight()
    for number in range(1, 17):
        give(layer, float("inf"))
        tested.step(number, 0.1, LOSS)
    give(layer, float("inf"))
    with pytest.raises(NonFinite, match="the gradient norm, also without a scaled loss, of step 17"):
        tested.step(17, 0.1, LOSS)
    assert tested.last is not None and (tested.last.next_scale, tested.last.skipped_updates) == (1.0, 16)


def test_its_state_is_saved_with_the_optimizers() -> None:
    layer, tested = one_weight(float("inf"))
    tested.step(1, 0.1, LOSS)
    saved = {name: each.clone() for name, each in tested.state_dict().items()}
    other = scaled(layer)
    other.load_state_dict(saved)
    assert other.scale == FIRST_SCALE / 2 and torch.equal(other.state_dict()["loss_scaling.skipped"], torch.tensor(1))
    with pytest.raises(Rejected, match="optimizer states are missing, unknown"):
        other.load_state_dict({name: each for name, each in saved.items() if name != "loss_scaling.scale"})
    with pytest.raises(Rejected, match="optimizer states are missing, unknown"):
        adamw(layer).load_state_dict(saved)


# -- in the loop ------------------------------------------------------------------------------------------------------


def run_steps(
    dataset: PreparedDataset, journal: Noting, planted: int | None = None
) -> tuple[nn.Module, LossScaling, Iterator[StepResult]]:
    """A small T5 in float64; the gradients of step `planted` overflow."""
    model = tiny_model(dropout_rate=0.0)
    model.double().train()
    spec = tiny_spec()
    optimizer = scaled(model)
    real = optimizer.step

    def step(number: int, learning_rate: float, loss: torch.Tensor) -> torch.Tensor:
        if number == planted:
            next(iter(model.parameters())).grad.view(-1)[3] = float("inf")  # type: ignore[union-attr]  # it has one
        return real(number, learning_rate, loss)

    optimizer.step = step  # type: ignore[method-assign]
    context = training_context(journal.folder, as_loaded(model, spec), dataset, spec, optimizer, journal)
    return model, optimizer, steps(context)


def test_a_skipped_update_is_a_step_over_its_rows(dataset: PreparedDataset, noting: Noting) -> None:
    _, _, plain = run_steps(dataset, noting)
    _, _, planted = run_steps(dataset, noting, planted=3)
    whole, skipping = list(plain), list(planted)
    assert [each.step for each in skipping] == [each.step for each in whole] == list(range(1, 22))
    for name in ("rows", "target_tokens", "epoch", "learning_rate"):
        assert [getattr(each, name) for each in skipping] == [getattr(each, name) for each in whole]
    assert [each.scaled and each.scaled.skipped for each in skipping] == [step == 3 for step in range(1, 22)]
    assert [float(each.loss) for each in skipping[:3]] == [float(each.loss) for each in whole[:3]]
    assert float(skipping[3].loss) != float(whole[3].loss)


def test_memory_that_runs_out_in_a_step_redoes_it_with_the_same_scale(dataset: PreparedDataset, noting: Noting) -> None:
    undisturbed, _, expected = run_steps(dataset, noting, planted=2)
    losses = [float(next(expected).loss) for _ in range(5)]
    with FailingAt(-1) as counter:
        next(run_steps(dataset, noting)[2])
    assert noting.facts == []
    for k in range(1, counter.count // 2, counter.count // 12):  # before the optimizer's own operations
        noting.facts.clear()
        model, optimizer, results = run_steps(dataset, noting, planted=2)
        found = [next(results), next(results)]
        scale = optimizer.scale
        with FailingAt(k):
            found.append(next(results))
        assert scale == FIRST_SCALE / 2 and found[2].scaled == ScaledStep(scale, False, scale, 1)
        found += [next(results), next(results)]
        assert [type(fact) for fact in noting.facts] == [OomRecovered]
        assert [float(each.loss) for each in found] == pytest.approx(losses, abs=1e-12)
        assert farthest(weights(model), weights(undisturbed)) < 1e-10
        assert [each.scaled and each.scaled.skipped for each in found] == [False, True, False, False, False]
