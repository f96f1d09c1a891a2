"""Evaluation: the loss it says, leaving training undisturbed, and memory that runs out in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jobs.errors import NonFinite, OutOfMemory
from jobs.rundir import RunDir
from tests.training.attempts import StopAt
from tests.training.conftest import VALIDATION_ROWS, batches_of
from tests.training.test_loop import OutOfMemoryAt
from worker.training import evaluate as evaluation
from worker.training.dataset.data import PreparedDataset
from worker.training.evaluate import Evaluation, evaluate
from worker.training.journal import Journal
from worker.training.loop import accumulate
from worker.training.machine.usage import Cache
from worker.training.network.model import LoadedModel, load
from worker.training.steps.batches import Batch
from worker.training.steps.limits import SafeSize
from worker.training.stop import StopAsked

CPU = torch.device("cpu")


@pytest.fixture
def loaded(model_folder: Path) -> LoadedModel:
    return load(model_folder, CPU, dropout=0.0, fused=True, recompute_layers=1)


def look(loaded: LoadedModel, dataset: PreparedDataset, journal: Journal, **options: Any) -> Evaluation:
    defaults = {"max_rows": 100, "samples": 3, "micro_batch": 4, "stop": StopAt(RunDir("/nowhere"))}
    return evaluate(loaded, dataset.validation, cache=Cache(CPU), journal=journal, **defaults | options)


def test_it_is_the_loss_of_training_over_the_same_rows(
    loaded: LoadedModel, dataset: PreparedDataset, journal: Journal
) -> None:
    loaded.model.float()  # in bf16 the kernels with and without gradients round differently
    seen = look(loaded, dataset, journal)
    trained = accumulate(loaded.model, batches_of(dataset.validation, np.arange(VALIDATION_ROWS), 4))
    assert seen.rows == VALIDATION_ROWS
    assert seen.loss == pytest.approx(trained.item(), abs=1e-5)
    assert look(loaded, dataset, journal, max_rows=3, samples=9).rows == 3


def test_training_is_not_disturbed(loaded: LoadedModel, dataset: PreparedDataset, journal: Journal) -> None:
    loaded.model.train()
    state = torch.get_rng_state()
    samples = look(loaded, dataset, journal).samples
    assert torch.equal(torch.get_rng_state(), state)
    assert loaded.model.training
    assert all(parameter.grad is None for parameter in loaded.model.parameters())
    assert [len(sample.input.split()) for sample in samples] == [
        int(length) - 1 for length in dataset.validation.input_lengths[:3]
    ]


def test_memory_that_runs_out_makes_it_begin_again_in_smaller_micro_batches(
    loaded: LoadedModel, dataset: PreparedDataset, journal: Journal
) -> None:
    expected = look(loaded, dataset, journal)
    with OutOfMemoryAt(300):
        again = look(loaded, dataset, journal)
    assert again.loss == pytest.approx(expected.loss, rel=1e-3)  # bf16, other shapes
    with OutOfMemoryAt(300, always=True), pytest.raises(OutOfMemory, match="in an evaluation at micro-batch 1"):
        look(loaded, dataset, journal)


def test_safe_sizes_of_training_are_respected_and_a_text_that_needs_more_costs_no_second_evaluation(
    loaded: LoadedModel, dataset: PreparedDataset, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at: list[int] = []
    real = evaluation.token_loss_sum

    def counted(model: Any, batch: Batch) -> torch.Tensor:
        looked_at.append(len(batch.rows))
        return real(model, batch)

    generate, asked = loaded.model.generate, []

    def refusing(**options: Any) -> Any:
        asked.append(len(options["input_ids"]))
        if asked[-1] > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return generate(**options)

    monkeypatch.setattr(evaluation, "token_loss_sum", counted)
    expected = look(loaded, dataset, journal).samples
    assert max(looked_at) > 2
    monkeypatch.setattr(loaded.model, "generate", refusing)
    looked_at.clear()
    safe = {"input ≤ 64, target ≤ 64": SafeSize(1)}
    assert look(loaded, dataset, journal, safe=safe).rows == VALIDATION_ROWS
    assert looked_at == [1] * VALIDATION_ROWS and asked == [1, 1, 1]
    looked_at.clear()
    asked.clear()
    again = look(loaded, dataset, journal)
    assert [sample.input for sample in again.samples] == [sample.input for sample in expected]
    assert asked[0] > 1 and asked[-3:] == [1, 1, 1]
    assert sum(looked_at) == VALIDATION_ROWS


def test_a_request_to_stop_is_seen_between_two_batches(
    loaded: LoadedModel, dataset: PreparedDataset, journal: Journal
) -> None:
    loaded.model.train()
    with pytest.raises(StopAsked):
        look(loaded, dataset, journal, stop=StopAt(RunDir("/nowhere"), 2))
    assert loaded.model.training


def test_a_loss_that_is_no_number_is_said_and_never_written_down(
    loaded: LoadedModel, dataset: PreparedDataset, journal: Journal
) -> None:
    with torch.no_grad():
        loaded.model.get_parameter("lm_head.weight").fill_(float("nan"))
    with pytest.raises(NonFinite, match="the validation loss is nan"):
        look(loaded, dataset, journal)
