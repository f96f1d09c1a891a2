"""Gradients are those of plain transformers on the whole batch, however a step is cut: in float64, for every family."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from jobs.errors import Rejected
from tests.support.samples import dataset_summary
from tests.training.tasks.classification.families import FAMILIES, LABELS, VOCABULARY, model_of
from worker.training.dataset.data import PreparedDataset, Rows, Writer
from worker.training.loop import accumulate
from worker.training.tasks.classification import fused
from worker.training.tasks.classification.batches import ClassLimit
from worker.training.tasks.classification.fused import ClassLoss
from worker.training.tasks.classification.task import Classification
from worker.training.tasks.compiled import set_dropout

ROWS, PAD = 9, 1
SINGLE, SEVERAL = ClassLoss(3), ClassLoss(3, several=True)
WEIGHTS = (0.5, 2.0, 1.5)


def prepared(folder: str, tmp: pytest.TempPathFactory, labels: list[list[int]], *, length: int | None = None) -> Rows:
    path = tmp.mktemp(folder)
    draw = np.random.default_rng(3)
    inputs = [draw.integers(5, VOCABULARY, length or draw.integers(6, 31)) for _ in range(ROWS)]
    with Writer(path, VOCABULARY) as writer:
        writer.add(inputs, labels)
        writer.finish({"train": np.arange(ROWS), "validation": np.arange(0)}, dataset_summary())
    return PreparedDataset.open(path).train


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """Texts of 6 to 30 tokens with one label each."""
    return prepared("single", tmp_path_factory, [[number % 3] for number in range(ROWS)])


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """The same with 0 to 3 labels."""
    return prepared("several", tmp_path_factory, [[], [0], [1, 2], [0, 1, 2], [], [2], [0, 2], [1], []])


def gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def plain(model: PreTrainedModel, rows: Rows, loss: ClassLoss) -> tuple[float, dict[str, torch.Tensor]]:
    """All rows at once, as transformers pads them, with its own loss (or torch's, where classes have weights)."""
    model.zero_grad()
    width = int(rows.input_lengths.max())
    ids = torch.from_numpy(rows.gather("input", np.arange(ROWS), width, PAD))
    mask = torch.from_numpy((np.arange(width) < rows.input_lengths[:, None]).astype(np.int64))
    if loss.several:
        labels = torch.zeros(ROWS, 3, dtype=torch.float64)
        for row in range(ROWS):
            labels[row, rows.target(row).astype(np.int64)] = 1
    else:
        labels = torch.tensor([int(rows.target(row)[0]) for row in range(ROWS)])
    model.config.problem_type = "multi_label_classification" if loss.several else "single_label_classification"
    found = model(input_ids=ids, attention_mask=mask, labels=labels)
    value = found.loss
    if loss.weights is not None:
        weights = torch.tensor(loss.weights, dtype=torch.float64)
        value = (
            F.binary_cross_entropy_with_logits(found.logits, labels, pos_weight=weights)
            if loss.several
            else (F.cross_entropy(found.logits, labels, reduction="none") * weights[labels]).mean()
        )
    value.backward()
    return float(value.detach()), gradients(model)


@pytest.mark.parametrize("loss", [SINGLE, SEVERAL, ClassLoss(3, weights=WEIGHTS), ClassLoss(3, True, WEIGHTS)])
@pytest.mark.parametrize("family", [*FAMILIES, "xlm-roberta", "camembert"])
def test_a_step_is_that_of_plain_transformers_however_it_is_cut(
    family: str, loss: ClassLoss, rows: Rows, several: Rows
) -> None:
    data = several if loss.several else rows
    model = model_of(family).train()
    fused.configure(model, fused=True, dropout=0.0)
    model.train()
    expected, wanted = plain(model, data, loss)
    for micro_batch in (1, 3, ROWS):
        model.zero_grad()
        batches = ClassLimit.of(data, micro_batch).with_loss(loss).batches(data, [np.arange(ROWS)], PAD)
        assert len(batches) > 1 or micro_batch == ROWS
        assert sum(batch.target_tokens for batch in batches) == ROWS
        assert float(accumulate(model, batches)) == pytest.approx(expected, rel=1e-12)
        found = gradients(model)
        assert found.keys() == wanted.keys()
        largest = max(float(gradient.norm()) for gradient in wanted.values())
        for name, gradient in wanted.items():
            difference = float((found[name] - gradient).norm())
            assert difference <= 1e-12 * max(largest, float(gradient.norm())), (name, micro_batch)


PACKED = ("bert", "roberta", "electra", "xlm-roberta", "camembert")


@pytest.mark.parametrize("family", PACKED)
def test_no_padding_goes_through_the_layers_of_known_encoders(family: str, rows: Rows) -> None:
    model = model_of(family)
    fused.configure(model, fused=True, dropout=0.0)
    [batch] = ClassLimit.of(rows, ROWS).with_loss(SINGLE).batches(rows, [np.arange(ROWS)], PAD)
    encoder: Any = model.base_model.encoder
    first, last = encoder.layer
    sizes: list[int] = []
    for layer in (first, last):
        layer.output.dense.register_forward_hook(lambda module, given, result: sizes.append(len(result)))
    batch.logits(model)
    assert sizes == [int(rows.input_lengths.sum()) // 16 * 16 + 16, ROWS]


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(PACKED)))
def test_encoders_that_are_not_known_are_left_as_they_are(family: str) -> None:
    assert fused.pack(model_of(family)) == 0


def test_layers_that_are_recomputed_are_those_of_transformers(rows: Rows) -> None:
    model = model_of("bert")
    fused.configure(model, fused=True, dropout=0.0)
    [batch] = ClassLimit.of(rows, ROWS).with_loss(SINGLE).batches(rows, [np.arange(ROWS)], PAD)
    kept = batch.loss_sum(model.train()).detach()
    model.activation_checkpointing_enable({"use_reentrant": False})
    recomputed = batch.loss_sum(model)
    assert float(recomputed.detach()) == pytest.approx(float(kept), rel=1e-12)
    recomputed.backward()


def test_a_decoder_is_left_as_it_is() -> None:
    assert fused.pack(model_of("bert")) == 1
    assert fused.pack(model_of("bert", is_decoder=True)) == 0


def test_there_is_no_mask_where_no_row_is_padded(tmp_path_factory: pytest.TempPathFactory, rows: Rows) -> None:
    equal = prepared("equal", tmp_path_factory, [[0]] * ROWS, length=16)
    [batch] = ClassLimit.of(equal, ROWS).with_loss(SINGLE).batches(equal, [np.arange(ROWS)], PAD)
    assert batch.attention_mask is None and batch.shape.input_width == 16
    [padded] = ClassLimit.of(rows, ROWS).with_loss(SINGLE).batches(rows, [np.arange(ROWS)], PAD)
    assert padded.attention_mask is not None
    assert padded.attention_mask.sum(1).tolist() == rows.input_lengths.tolist()


def test_labels_do_not_change_how_rows_are_cut(rows: Rows, several: Rows) -> None:
    shapes = [ClassLimit.of(data, 2).shapes(data, [np.arange(ROWS)]) for data in (rows, several)]
    assert shapes[0] == shapes[1] and {shape.target_width for shape in shapes[0]} == {1}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_dropout_is_set_and_the_check_passes_in_bf16(family: str) -> None:
    model = model_of(family, torch.bfloat16)
    fused.configure(model, fused=True, dropout=0.0)
    model.train()
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        first = model(input_ids=ids).logits
        assert torch.equal(first, model(input_ids=ids).logits), "something is still dropped"
    set_dropout(model, 0.5)
    with torch.no_grad():
        assert not torch.equal(first, model(input_ids=ids).logits)


def test_a_model_whose_rows_depend_on_each_other_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("bert")
    whole = model.forward

    def mixing(*arguments: object, **options: object) -> object:
        found = whole(*arguments, **options)
        found.logits = found.logits + found.logits.mean(0)
        return found

    monkeypatch.setattr(model, "forward", mixing)
    with pytest.raises(Rejected, match="beside another") as caught:
        fused.configure(model, fused=False, dropout=None)
    assert caught.value.detail_code == "self_check_failed"

    def looking_for_an_end(*arguments: object, **options: object) -> object:
        raise ValueError("Each example must contain at least one <eos> token.")  # as BART does

    monkeypatch.setattr(model, "forward", looking_for_an_end)
    with pytest.raises(Rejected, match="at least one <eos> token") as caught:
        fused.configure(model, fused=False, dropout=None)
    assert caught.value.detail_code == "self_check_failed"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", ["convbert", "mobilebert"])
def test_an_encoder_that_sees_padding_is_refused(family: str, dtype: torch.dtype) -> None:
    """Both mix each token with those beside it, and neither masks them there."""
    narrow = {"convbert": {"embedding_size": 32}, "mobilebert": {
        "embedding_size": 32, "true_hidden_size": 32, "intra_bottleneck_size": 32}}[family]  # fmt: skip
    with pytest.raises(Rejected, match=r"hidden states of token . of 7 are others by .* beside padding") as caught:
        fused.configure(model_of(family, dtype, **narrow), fused=True, dropout=None)
    assert caught.value.detail_code == "self_check_failed"


def test_a_classifier_that_is_no_encoder_is_not_taken() -> None:
    config = {"model_type": "bart", "architectures": ["BartForSequenceClassification"]}
    assert not Classification().takes(config | {"is_encoder_decoder": True})
    assert Classification().takes({"model_type": "electra", "architectures": ["ElectraForPreTraining"]})


def test_three_labels_are_those_of_the_families() -> None:
    assert model_of("roberta").config.num_labels == len(LABELS)
