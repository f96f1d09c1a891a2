"""Encoder-decoders of every family: gradients are those of plain transformers, guards know their tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel
from transformers.models.mt5.modeling_mt5 import MT5LayerNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm
from transformers.models.umt5.modeling_umt5 import UMT5LayerNorm

from jobs.errors import Rejected
from tests.support.samples import dataset_summary
from tests.training.tasks.seq2seq.families import FAMILIES, VOCABULARY, config_of, model_of
from worker.training.adapters.method import weights_of
from worker.training.dataset.data import PreparedDataset, Rows, Writer
from worker.training.loop import accumulate
from worker.training.models.model_files import validate_folder
from worker.training.tasks.seq2seq.batches import PairLimit
from worker.training.tasks.seq2seq.layout import PairFlops
from worker.training.tasks.seq2seq.self_check import configure
from worker.training.tasks.seq2seq.task import Seq2Seq

ROWS = 9


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """Inputs of 4 to 22 tokens, targets of 3 to 17, which end with a token of their own."""
    folder = tmp_path_factory.mktemp("prepared")
    draw = np.random.default_rng(3)
    inputs, targets = (
        [[*draw.integers(5, VOCABULARY, draw.integers(*sizes)), 2] for _ in range(ROWS)] for sizes in ((3, 22), (2, 17))
    )
    with Writer(folder, VOCABULARY) as writer:
        writer.add(inputs, targets)
        writer.finish({"train": np.arange(ROWS), "validation": np.arange(0)}, dataset_summary())
    return PreparedDataset.open(folder).train


def gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def plain(model: PreTrainedModel, rows: Rows) -> tuple[float, dict[str, torch.Tensor]]:
    """Each row by itself through the model's own forward pass with labels; the mean over all target tokens."""
    model.zero_grad()
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row in range(len(rows)):
        ids, labels = (torch.from_numpy(side(row).astype(np.int64)) for side in (rows.input, rows.target))
        logits = model(input_ids=ids[None], labels=labels[None], use_cache=False).logits[0]
        total = total + F.cross_entropy(logits, labels, reduction="sum")
        count += len(labels)
    (total / count).backward()
    return float(total.detach()) / count, gradients(model)


@pytest.fixture
def _norms_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stock ones take the mean of squares in fp32 whatever the dtype is."""

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(hidden_states.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * hidden_states * scale  # type: ignore[no-any-return]

    for kind in (T5LayerNorm, MT5LayerNorm, UMT5LayerNorm):
        monkeypatch.setattr(kind, "forward", forward)


@pytest.mark.usefixtures("_norms_in_float64")
@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_is_that_of_plain_transformers_however_it_is_cut(family: str, is_fused: bool, rows: Rows) -> None:
    expected, wanted = plain(model_of(family).eval(), rows)
    model = model_of(family)
    configure(model, fused=is_fused, dropout=0.0)
    model.train()
    for micro_batch in (1, 3, ROWS):
        model.zero_grad()
        batches = PairLimit.of(rows, micro_batch).batches(rows, [np.arange(ROWS)], int(model.config.pad_token_id))
        assert len(batches) > 1 or micro_batch == ROWS
        assert float(accumulate(model, batches)) == pytest.approx(expected, rel=1e-12)
        found = gradients(model)
        assert found.keys() == wanted.keys()
        for name, gradient in wanted.items():
            difference = float((found[name] - gradient).norm())
            assert difference <= 1e-12 * max(1e-3, float(gradient.norm())), (name, micro_batch)


def saved(folder: Path, family: str, **more: Any) -> PreTrainedModel:
    """The model, and its folder as Longhaul writes it."""
    model = model_of(family, torch.bfloat16, **more)
    tensors = {name: tensor.contiguous() for name, tensor in weights_of(model).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_of(family, **more)))
    (folder / "tokenizer.json").write_text("{}")
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layout_has_exactly_the_tensors_that_are_written_and_loaded(tmp_path: Path, family: str) -> None:
    model, task = saved(tmp_path, family), Seq2Seq()
    config = config_of(family)
    assert task.takes(config | {"architectures": [type(model).__name__]})
    assert task.layout(config).shapes == {name: tuple(tensor.shape) for name, tensor in weights_of(model).items()}
    assert validate_folder(tmp_path, "x", task).keys() == task.layout(config).shapes.keys()
    opened, info = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype=torch.bfloat16, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    layout = task.layout(config)
    assert (opened.get_parameter(layout.head) is opened.get_parameter(layout.embedding)) == layout.tied
    for name, tensor in weights_of(model).items():
        assert torch.equal(weights_of(opened)[name], tensor), name


def test_a_bart_of_the_hub_has_no_head_and_older_names(tmp_path: Path) -> None:
    model = saved(tmp_path, "bart")
    tensors = {name.removeprefix("model."): tensor.contiguous() for name, tensor in weights_of(model).items()}
    del tensors["final_logits_bias"]
    for alias in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"):
        tensors[alias] = tensors["shared.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = config_of("bart") | {"architectures": ["BartModel"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    task = Seq2Seq((64, 64))
    assert task.takes(config)
    assert task.adapted(config)["architectures"] == ["BartForConditionalGeneration"]
    assert task.layout(config).shapes.keys() - validate_folder(tmp_path, "x", task).keys() == {"final_logits_bias"}
    tensors["decoder.embed_tokens.weight"] += 1
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(Rejected, match=r"decoder\.embed_tokens\.weight has other values than model\.shared\.weight"):
        validate_folder(tmp_path, "x", task)
    tensors["decoder.embed_tokens.weight"] -= 1
    del tensors["encoder.layers.1.fc1.bias"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(Rejected) as caught:
        validate_folder(tmp_path, "x", task)
    assert caught.value.detail_code in ("missing_keys", "bad_safetensors")


def test_an_mt5_has_a_head_of_its_own_whatever_its_config_says(tmp_path: Path) -> None:
    saved(tmp_path, "mt5")
    config = config_of("mt5") | {"tie_word_embeddings": True}  # as transformers 5 saves it
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert not Seq2Seq().layout(config).tied
    validate_folder(tmp_path, "x", Seq2Seq())
    assert Seq2Seq().layout({"model_type": "mt5"}).parameters == 300_176_768, "google/mt5-small"


@pytest.mark.parametrize(
    ("architecture", "kind", "taken"),
    [
        ("BartForConditionalGeneration", "bart", True),
        ("BartForSequenceClassification", "bart", False),
        ("MT5EncoderModel", "mt5", True),
        ("WhisperForConditionalGeneration", "whisper", False),
        ("MBartForConditionalGeneration", "mbart", False),
        ("LlamaForCausalLM", "llama", False),
    ],
)
def test_what_is_an_encoder_decoder_of_texts_is_seen_by_its_config(architecture: str, kind: str, taken: bool) -> None:
    config = {"model_type": kind, "architectures": [architecture], "is_encoder_decoder": kind != "llama"}
    assert Seq2Seq().takes(config) is taken


def test_no_more_tokens_are_asked_for_than_a_model_has_places() -> None:
    config = config_of("bart") | {"architectures": ["BartForConditionalGeneration"]}
    Seq2Seq((64, 64)).adapted(config)
    for limits, key in (((65, 64), "data.max_input_tokens"), ((64, 65), "data.max_target_tokens")):
        with pytest.raises(Rejected, match=f"{key} is 65, and the model knows 64 positions") as caught:
            Seq2Seq(limits).adapted(config)
        assert (caught.value.detail_code, caught.value.param) == ("limit_too_large", key)
    assert Seq2Seq((10_000, 10_000)).adapted(config_of("mt5")) == config_of("mt5")
    Seq2Seq((64, 64)).adapted(config_of("pegasus"))


def test_a_model_that_adds_to_its_loss_or_cannot_begin_a_target_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = model_of("bart")
    whole = model.forward

    def with_more(*arguments: Any, **options: Any) -> Any:
        found = whole(*arguments, **options)
        if found.loss is not None:
            found.loss = found.loss + 1
        return found

    monkeypatch.setattr(model, "forward", with_more)
    with pytest.raises(Rejected, match="the loss of two rows is") as caught:
        configure(model, fused=False, dropout=None)
    assert caught.value.detail_code == "self_check_failed"
    model = model_of("marian")
    monkeypatch.delattr(type(model), "prepare_decoder_input_ids_from_labels")
    with pytest.raises(Rejected, match="prepare_decoder_input_ids_from_labels") as caught:
        configure(model, fused=True, dropout=None)
    assert caught.value.detail_code == "self_check_failed"


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_passes_the_check_of_every_family(family: str) -> None:
    configure(model_of(family, torch.bfloat16), fused=True, dropout=None)


@pytest.mark.parametrize("family", ["mt5", "bart", "pegasus"])
def test_every_dropout_is_set(family: str, rows: Rows) -> None:
    model = model_of(family).train()
    batch = PairLimit.of(rows, ROWS).batches(rows, [np.arange(ROWS)], 0)[0]
    configure(model, fused=True, dropout=0.0)
    assert torch.equal(batch.loss_sum(model), batch.loss_sum(model)), "something is still dropped"
    configure(model, fused=True, dropout=0.5)
    assert not torch.equal(batch.loss_sum(model), batch.loss_sum(model))


@pytest.mark.parametrize("family", FAMILIES)
def test_flops_are_those_of_the_matrix_products(family: str) -> None:
    model = model_of(family, torch.float32).train()
    configure(model, fused=False, dropout=0.0)
    model.set_attn_implementation("eager")
    inputs, targets = 24, 16
    ids = torch.arange(inputs)[None] + 4
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids[:, :targets], use_cache=False).loss.backward()
    flops = PairFlops.of_config(config_of(family)).rows(np.array([inputs]), np.array([targets]))
    # The first product of a model has no gradient of its input: less than three times forward.
    assert counter.get_total_flops() == pytest.approx(flops, rel=0.05)


@pytest.mark.parametrize("family", ["mt5", "bart"])
def test_recomputed_layers_give_the_same_gradients(family: str, rows: Rows) -> None:
    found = []
    for every in (0, 1, 2):
        model = model_of(family)
        configure(model, fused=True, dropout=0.0)
        model.train()
        if every:
            model.activation_checkpointing_enable({"use_reentrant": False}, every_n_layers=every)
        accumulate(model, PairLimit.of(rows, 3).batches(rows, [np.arange(ROWS)], 0))
        found.append(gradients(model))
    for other in found[1:]:
        for name, gradient in found[0].items():
            assert float((other[name] - gradient).norm()) <= 1e-12 * max(1e-3, float(gradient.norm())), name
