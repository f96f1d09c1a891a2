"""Evaluation: the loss it says, leaving training undisturbed, and memory that runs out in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from jobs.errors import NonFinite, OutOfMemory
from tests.support.samples import dataset_summary
from tests.training.attempts import StopAt
from tests.training.conftest import VALIDATION_ROWS, VOCABULARY, batches_of, tiny_spec
from tests.training.contexts import training_context
from tests.training.stepping import FailingAt, Noting, optimizer_for
from worker.training import evaluate as evaluate_module
from worker.training.checkpoints.checkpoint import TrainState
from worker.training.dataset.data import PreparedDataset, Writer
from worker.training.evaluate import Evaluation, evaluate
from worker.training.journal import StopAsked
from worker.training.loop import accumulate
from worker.training.network.model import LoadedModel, load
from worker.training.steps.shape import MicroBatchShape, SafeSize
from worker.training.tasks.evaluated import Evaluated
from worker.training.tasks.seq2seq.batches import PairBatch
from worker.training.tasks.seq2seq.task import Seq2Seq

CPU = torch.device("cpu")


@pytest.fixture
def loaded(model_folder: Path) -> LoadedModel:
    return load(model_folder, CPU, task=Seq2Seq(), dropout=0.0, fused=True, activation_checkpointing=1)


def look(
    loaded: LoadedModel, dataset: PreparedDataset, journal: Noting, *, max_rows: int = 100, samples: int = 3,
    safe: dict[str, SafeSize] | None = None, micro_batch: int = 4, **options: Any,
) -> Evaluation:  # fmt: skip
    spec = tiny_spec(evaluation={"max_rows": max_rows, "samples": samples})
    state = TrainState(spec_sha256="", micro_batch=micro_batch, safe=safe or {})
    optimizer = optimizer_for(loaded.model)
    return evaluate(training_context(journal.folder, loaded, dataset, spec, optimizer, journal, state=state, **options))


def test_validation_loss_is_the_loss_of_training_over_the_same_rows(
    loaded: LoadedModel, dataset: PreparedDataset, noting: Noting
) -> None:
    loaded.model.float()  # in bf16 the kernels with and without gradients round differently
    seen = look(loaded, dataset, noting)
    trained = accumulate(loaded.model, batches_of(dataset.validation, np.arange(VALIDATION_ROWS), 4))
    assert seen.rows == VALIDATION_ROWS
    assert seen.loss == pytest.approx(trained.item(), abs=1e-5)
    assert look(loaded, dataset, noting, max_rows=3, samples=9).rows == 3


@pytest.mark.parametrize("fused", [True, False])
def test_the_loss_and_the_right_tokens_of_each_row_are_those_of_the_row_alone(
    model_folder: Path, dataset: PreparedDataset, fused: bool
) -> None:
    model = load(model_folder, CPU, task=Seq2Seq(), dropout=0.0, fused=fused, activation_checkpointing=0).model.double()
    model.eval()
    rows = dataset.validation
    with torch.no_grad():
        for batch in batches_of(rows, np.arange(VALIDATION_ROWS), 4):
            seen = batch.evaluated(model)
            assert float(seen.loss_sum) == pytest.approx(float(batch.loss_sum(model)), rel=1e-12)
            losses, right = batch.by_row(seen)
            assert losses.sum() == pytest.approx(float(seen.loss_sum), rel=1e-12)
            for place, row in enumerate(batch.rows.tolist()):
                ids, labels = (torch.from_numpy(side(row).astype(np.int64))[None] for side in (rows.input, rows.target))
                logits = model(input_ids=ids, labels=labels).logits[0]
                assert losses[place] == pytest.approx(
                    float(cross_entropy(logits, labels[0], reduction="sum")), rel=1e-6
                )
                assert right[place] == int((logits.argmax(-1) == labels[0]).sum())


def test_training_is_not_disturbed(loaded: LoadedModel, dataset: PreparedDataset, noting: Noting) -> None:
    loaded.model.train()
    state = torch.get_rng_state()
    samples = look(loaded, dataset, noting).samples
    assert torch.equal(torch.get_rng_state(), state)
    assert loaded.model.training
    assert all(parameter.grad is None for parameter in loaded.model.parameters())
    assert [len(sample.input.split()) for sample in samples] == [
        int(length) - 1 for length in dataset.validation.input_lengths[:3]
    ]


def test_memory_that_runs_out_makes_it_begin_again_in_smaller_micro_batches(
    loaded: LoadedModel, dataset: PreparedDataset, noting: Noting
) -> None:
    expected = look(loaded, dataset, noting)
    with FailingAt(900):
        again = look(loaded, dataset, noting)
    assert again.loss == pytest.approx(expected.loss, rel=1e-3)  # bf16, other shapes
    with FailingAt(900, always=True), pytest.raises(OutOfMemory, match="in an evaluation at micro-batch 1"):
        look(loaded, dataset, noting)


def test_safe_sizes_of_training_are_respected_and_a_text_that_needs_more_costs_no_second_evaluation(
    loaded: LoadedModel, dataset: PreparedDataset, noting: Noting, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at: list[int] = []
    real = PairBatch.evaluated

    def counted(batch: PairBatch, model: Any) -> Evaluated:
        looked_at.append(len(batch.rows))
        return real(batch, model)

    generate: Any = loaded.model.generate
    asked: list[int] = []

    def refusing(**options: Any) -> Any:
        asked.append(len(options["input_ids"]))
        if asked[-1] > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return generate(**options)

    monkeypatch.setattr(PairBatch, "evaluated", counted)
    expected = look(loaded, dataset, noting).samples
    assert max(looked_at) > 2
    monkeypatch.setattr(loaded.model, "generate", refusing)
    looked_at.clear()
    safe = {"input ≤ 64, target ≤ 64": SafeSize(1)}
    assert look(loaded, dataset, noting, safe=safe).rows == VALIDATION_ROWS
    assert looked_at == [1] * VALIDATION_ROWS and asked == [3, 2, 1, 1, 1]
    looked_at.clear()
    asked.clear()
    again = look(loaded, dataset, noting)
    assert [sample.input for sample in again.samples] == [sample.input for sample in expected]
    assert asked[0] > 1 and asked[-3:] == [1, 1, 1]
    assert sum(looked_at) == VALIDATION_ROWS


def test_micro_batches_are_no_larger_than_those_of_training_where_validation_rows_are_longer(
    loaded: LoadedModel, noting: Noting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / "prepared").mkdir()
    with Writer(folder, VOCABULARY) as writer:
        writer.add([[3] * 15 + [1]] * 12 + [[3] * 31 + [1]] * 12, [[4] * 7 + [1]] * 24)
        writer.finish({"train": np.arange(12), "validation": np.arange(12, 24)}, dataset_summary())
    shapes = []
    real = PairBatch.evaluated

    def seen(batch: PairBatch, model: Any) -> Any:
        shapes.append(batch.shape)
        return real(batch, model)

    monkeypatch.setattr(PairBatch, "evaluated", seen)
    look(loaded, PreparedDataset.open(folder), noting, samples=0)
    planned = MicroBatchShape(4, 16, 8)  # the micro-batch of `look`, of the longest training row
    assert shapes and all(shape.rows == 2 and shape.inputs <= planned.inputs for shape in shapes)


def test_texts_are_written_together_beside_a_micro_batch_of_one_row_and_are_those_of_each_row_alone(
    loaded: LoadedModel, noting: Noting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = np.random.default_rng(0)
    inputs = [[*draw.integers(3, VOCABULARY, length).tolist(), 1] for length in draw.integers(1, 16, 40)]
    (folder := tmp_path / "prepared").mkdir()
    with Writer(folder, VOCABULARY) as writer:
        writer.add(inputs, [[4, 1]] * 40)
        writer.finish({"train": np.arange(6), "validation": np.arange(6, 40)}, dataset_summary())
    loaded.model.float()  # in bf16 other shapes round differently
    generate: Any = loaded.model.generate
    asked: list[int] = []

    def counted(**options: Any) -> Any:
        asked.append(len(options["input_ids"]))
        return generate(**options)

    monkeypatch.setattr(loaded.model, "generate", counted)
    together = look(loaded, PreparedDataset.open(folder), noting, samples=34, micro_batch=1)
    assert asked == [17, 17], "of 32 at most"
    asked.clear()
    monkeypatch.setattr(evaluate_module, "texts_together", lambda *_: 1)
    alone = look(loaded, PreparedDataset.open(folder), noting, samples=34, micro_batch=1)
    assert asked == [1] * 34
    assert together.samples == alone.samples and together.loss == alone.loss
    assert len({sample.generated for sample in alone.samples}) > 5


def test_a_request_to_stop_is_seen_between_two_batches(
    loaded: LoadedModel, dataset: PreparedDataset, noting: Noting
) -> None:
    loaded.model.train()
    with pytest.raises(StopAsked):
        look(loaded, dataset, noting, stop=StopAt(2))
    assert loaded.model.training


def test_a_loss_that_is_no_number_is_said_and_never_written_down(
    loaded: LoadedModel, dataset: PreparedDataset, noting: Noting
) -> None:
    with torch.no_grad():
        loaded.model.get_parameter("lm_head.weight").fill_(float("nan"))
    with pytest.raises(NonFinite, match="the validation loss is nan"):
        look(loaded, dataset, noting)
