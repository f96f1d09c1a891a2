"""The step: the same gradient however it is cut, no step lost to an out-of-memory error, nothing changed by a NaN."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from transformers import T5ForConditionalGeneration

from jobs.errors import NonFinite, OutOfMemory, OutOfMemoryInOptimizer
from jobs.trainer_facts import OomRecovered
from tests.training.conftest import batches_of, tiny_model, tiny_spec
from tests.training.contexts import as_loaded, training_context
from tests.training.stepping import FailingAt, Noting, farthest, optimizer_for, weights
from worker.training.dataset.data import PreparedDataset
from worker.training.loop import accumulate, steps
from worker.training.optimizers.adamw import AdamW
from worker.training.steps.randomness import seed_step
from worker.training.steps.result import StepResult


def exact_model(dropout: float = 0.0) -> T5ForConditionalGeneration:
    model = tiny_model(dropout_rate=dropout)
    model.double().train()
    return model


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def run_steps(
    model: T5ForConditionalGeneration, dataset: PreparedDataset, journal: Noting, **parts: Any
) -> Iterator[StepResult]:
    spec = tiny_spec(**parts)
    loaded, optimizer = as_loaded(model, spec), optimizer_for(model)
    return steps(training_context(journal.folder, loaded, dataset, spec, optimizer, journal))


@pytest.mark.parametrize("size", [1, 3, 8, 16])
def test_the_gradient_is_the_same_however_the_step_is_cut_and_that_of_plain_torch(
    dataset: PreparedDataset, size: int
) -> None:
    model, chosen = exact_model(), np.arange(16)
    batches = batches_of(dataset.train, chosen, size)
    assert len(batches) == {1: 16, 3: 6, 8: 2, 16: 1}[size]
    found = accumulate(model, batches)
    cut = gradients(model)
    model.zero_grad()

    inputs = [torch.from_numpy(dataset.train.input(row).astype(np.int64)) for row in range(16)]
    targets = [torch.from_numpy(dataset.train.target(row).astype(np.int64)) for row in range(16)]
    ids = torch.nn.utils.rnn.pad_sequence(inputs, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in inputs], batch_first=True)
    labels = torch.nn.utils.rnn.pad_sequence(targets, batch_first=True, padding_value=-100)
    plain = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    plain.backward()

    assert sum(batch.target_tokens for batch in batches) == sum(len(row) for row in targets)
    assert found.item() == pytest.approx(plain.item(), abs=1e-12)
    assert farthest(cut, gradients(model)) < 1e-12


def test_memory_that_runs_out_anywhere_in_a_step_costs_no_step_and_changes_no_gradient(
    dataset: PreparedDataset, noting: Noting
) -> None:
    model, chosen = exact_model(), np.arange(8)
    with FailingAt(-1) as counter:
        accumulate(model, batches_of(dataset.train, chosen, 4))
    model.zero_grad()
    undisturbed = exact_model()
    expected = [result.loss.item() for result in islice(run_steps(undisturbed, dataset, noting), 3)]
    assert noting.facts == []

    for k in range(1, counter.count, counter.count // 25):
        model = exact_model()
        noting.facts.clear()
        run = run_steps(model, dataset, noting)
        with FailingAt(k):
            first = next(run)
        losses = [first.loss.item(), *(result.loss.item() for result in islice(run, 2))]
        assert losses == pytest.approx(expected, abs=1e-12), f"memory ran out at operation {k}"
        assert farthest(weights(model), weights(undisturbed)) < 1e-10
        (fact,) = noting.facts
        assert isinstance(fact, OomRecovered)
        assert (fact.step, fact.micro_batch_before, fact.micro_batch_after) == (1, 4, 2)
        assert "Tried to allocate 2.00 GiB" in fact.message and fact.milliseconds_lost > 0
        assert first.micro_batch == 2


def test_every_step_starts_from_its_own_seed_whatever_happened_before(dataset: PreparedDataset, noting: Noting) -> None:
    def seeds(disturb: bool) -> list[int]:
        run = run_steps(exact_model(dropout=0.1), dataset, noting)
        found: list[int] = []
        for _ in range(3):
            with FailingAt(200 if disturb and not found else -1):
                next(run)
            found.append(torch.initial_seed())
            torch.rand(7)
        return found

    assert seeds(False) == seeds(True)
    assert len(noting.facts) == 1


def test_dropout_repeats_itself_when_a_step_is_done_again(dataset: PreparedDataset) -> None:
    model = exact_model(dropout=0.3)
    losses = []
    for step in (1, 1, 2):
        seed_step(42, step)
        losses.append(accumulate(model, batches_of(dataset.train, np.arange(8), 4)).item())
    assert losses[0] == losses[1] != losses[2]


def test_at_micro_batch_1_it_ends_with_numbers_and_a_hint(dataset: PreparedDataset, noting: Noting) -> None:
    run = run_steps(exact_model(), dataset, noting)
    with FailingAt(100, always=True), pytest.raises(OutOfMemory, match="step 1 at micro-batch 1") as caught:
        next(run)
    assert "activation_checkpointing" in str(caught.value.hint)
    assert [(fact.micro_batch_before, fact.micro_batch_after) for fact in noting.facts] == [(4, 2), (2, 1)]


def test_on_oom_fail_ends_it_at_once(dataset: PreparedDataset, noting: Noting) -> None:
    run = run_steps(exact_model(), dataset, noting, memory={"on_oom": "fail"})
    with FailingAt(100), pytest.raises(OutOfMemory, match="micro-batch 4"):
        next(run)
    assert noting.facts == []


def test_nothing_is_repeated_once_the_optimizer_has_begun(
    dataset: PreparedDataset, noting: Noting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def starved(*arguments: object) -> torch.Tensor:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(AdamW, "step", starved)
    with pytest.raises(OutOfMemoryInOptimizer, match=r"at step 1: .*can't allocate memory"):
        next(run_steps(exact_model(), dataset, noting))


def test_other_errors_pass_through(dataset: PreparedDataset, noting: Noting) -> None:
    model = exact_model()
    model.set_submodule("encoder.block.0.layer.0.SelfAttention.q", torch.nn.Linear(3, 3).double())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        next(run_steps(model, dataset, noting))


def test_a_nan_stops_before_the_update_and_names_its_step(dataset: PreparedDataset, noting: Noting) -> None:
    model = exact_model()
    run = run_steps(model, dataset, noting)
    next(run)
    next(run)
    before = {name: tensor.clone() for name, tensor in weights(model).items()}
    handle = model.lm_head.register_forward_hook(lambda module, inputs, output: output * float("nan"))
    with pytest.raises(NonFinite, match="step 3 is NaN or infinite; the weights are those of step 2"):
        next(run)
    handle.remove()
    assert farthest(before, weights(model)) == 0


@pytest.mark.parametrize("every", [1, 2])
def test_recomputed_layers_give_the_same_gradient(dataset: PreparedDataset, every: int) -> None:
    model = exact_model(dropout=0.2)
    seed_step(1, 1)
    accumulate(model, batches_of(dataset.train, np.arange(8), 4))
    expected = gradients(model)
    model.zero_grad()
    model.activation_checkpointing_enable({"use_reentrant": False}, every_n_layers=every)
    blocks = [*model.encoder.block, *model.decoder.block]
    assert [block.gradient_checkpointing for block in blocks] == [n % every == 0 for n in range(2)]
    seed_step(1, 1)
    accumulate(model, batches_of(dataset.train, np.arange(8), 4))
    assert farthest(expected, gradients(model)) < 1e-12
