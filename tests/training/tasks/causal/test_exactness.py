"""Gradients are those of plain transformers, however a step is cut: in float64, for every family."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

from jobs.errors import Rejected
from tests.support.samples import dataset_summary
from tests.training.tasks.causal.families import FAMILIES, OTHERS, VOCABULARY, config_of, model_of
from worker.training.dataset.data import PreparedDataset, Rows, Writer
from worker.training.kernels.causal_attention import causal_attention
from worker.training.loop import accumulate
from worker.training.tasks.causal import fused
from worker.training.tasks.causal.batches import CausalLimit
from worker.training.tasks.causal.fused import configure, has_plain_head
from worker.training.tasks.compiled import set_dropout

ROWS = 9


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """Chats of 6 to 30 tokens, longer than the sliding windows, with one reply or two."""
    folder = tmp_path_factory.mktemp("prepared")
    draw = np.random.default_rng(3)
    inputs = [draw.integers(3, VOCABULARY, draw.integers(6, 31)) for _ in range(ROWS)]
    learned = [
        np.concatenate([np.arange(2, 4), np.arange(len(row) - 2, len(row))]) if number % 2 else np.arange(3, len(row))
        for number, row in enumerate(inputs)
    ]
    with Writer(folder, VOCABULARY) as writer:
        writer.add(inputs, learned)
        writer.finish({"train": np.arange(ROWS), "validation": np.arange(0)}, dataset_summary())
    return PreparedDataset.open(folder).train


def gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def plain(model: PreTrainedModel, rows: Rows) -> tuple[float, dict[str, torch.Tensor]]:
    """Each row by itself through the model's own forward pass; the mean over all learned tokens."""
    model.zero_grad()
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row in range(len(rows)):
        ids = torch.from_numpy(rows.input(row).astype(np.int64))
        learned = torch.from_numpy(rows.target(row).astype(np.int64))
        labels = torch.full_like(ids, -100)
        labels[learned] = ids[learned]
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        total = total + F.cross_entropy(logits, labels[1:], reduction="sum")
        count += len(learned)
    (total / count).backward()
    return float(total.detach()) / count, gradients(model)


@pytest.fixture
def _norms_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma's compute in fp32 whatever the dtype is."""

    def forward(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1 + self.weight)  # type: ignore[operator]

    for kind in (GemmaRMSNorm, Gemma2RMSNorm, Gemma3RMSNorm):
        monkeypatch.setattr(kind, "forward", forward)


@pytest.mark.usefixtures("_norms_in_float64")
@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_is_that_of_plain_transformers_however_it_is_cut(family: str, is_fused: bool, rows: Rows) -> None:
    model = model_of(family).train()
    configure(model, fused=is_fused, dropout=0.0)
    model.train()
    expected, wanted = plain(model, rows)
    bound = 1e-7 if family == "gemma2" else 1e-12  # its attention takes the softmax in fp32, whatever the dtype
    for micro_batch in (1, 3, ROWS):
        model.zero_grad()
        batches = CausalLimit.of(rows, micro_batch).batches(rows, [np.arange(ROWS)], 0)
        assert len(batches) > 1 or micro_batch == ROWS
        fused = accumulate(model, batches)
        assert float(fused) == pytest.approx(expected, rel=bound)
        found = gradients(model)
        assert found.keys() == wanted.keys()
        for name, gradient in wanted.items():
            difference = float((found[name] - gradient).norm())
            assert difference <= bound * max(1e-3, float(gradient.norm())), (name, micro_batch)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_an_evaluation_sees_the_loss_and_the_right_tokens_of_each_row(family: str, rows: Rows) -> None:
    model = model_of(family).eval()
    with torch.no_grad():
        for batch in CausalLimit.of(rows, 4).batches(rows, [np.arange(ROWS)], 0):
            seen = batch.evaluated(model)
            assert float(seen.loss_sum) == pytest.approx(float(batch.loss_sum(model)), rel=1e-12)
            losses, right = batch.by_row(seen)
            assert losses.sum() == pytest.approx(float(seen.loss_sum), rel=1e-12)
            for place, row in enumerate(batch.rows.tolist()):
                ids = torch.from_numpy(rows.input(row).astype(np.int64))
                learned = torch.from_numpy(rows.target(row).astype(np.int64))
                logits = model(input_ids=ids[None], use_cache=False).logits[0, learned - 1]
                expected = F.cross_entropy(logits, ids[learned], reduction="sum")
                assert losses[place] == pytest.approx(float(expected), rel=1e-7)  # gemma2 takes the softmax in fp32
                assert right[place] == int((logits.argmax(-1) == ids[learned]).sum())


def test_logits_that_are_more_than_a_product_take_the_models_own_way() -> None:
    assert not has_plain_head(model_of("gemma2")), "its logits are capped"
    assert all(has_plain_head(model_of(family)) for family in FAMILIES if family != "gemma2")


def test_a_model_that_looks_ahead_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    whole = model.model.forward

    def looking_ahead(*arguments: object, **options: object) -> object:
        found = whole(*arguments, **options)
        found.last_hidden_state = found.last_hidden_state + found.last_hidden_state.mean(1, keepdim=True)
        return found

    monkeypatch.setattr(model.model, "forward", looking_ahead)
    with pytest.raises(Rejected, match="the loss of a row is") as caught:
        configure(model, fused=False, dropout=None)
    assert caught.value.detail_code == "self_check_failed"


def test_norms_gates_and_the_embedding_of_every_family_that_can_be_are_fused() -> None:
    assert {family: fused.fuse(model_of(family)) for family in ("qwen2", "qwen3", "llama", "mistral", "phi3")} == {
        "qwen2": 5 + 2 + 1, "qwen3": 9 + 2 + 1, "llama": 5 + 2 + 1, "mistral": 5 + 2 + 1, "phi3": 9 + 1,
    }  # fmt: skip
    assert fused.fuse(model_of("gemma")) == 0, (
        "its norm multiplies by 1 + weight, its gate is a GELU, its embedding one that scales"
    )
    assert fused.fuse(model_of("llama", hidden_act="gelu")) == 5 + 1


def test_short_rows_on_a_cpu_have_their_own_attention(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    widths = []

    def attended(query: torch.Tensor, *others: Any) -> torch.Tensor:
        widths.append(query.shape[2])
        return causal_attention(query, *others)

    monkeypatch.setattr(fused, "causal_attention", attended)
    model = model_of("qwen2").train()
    batch = CausalLimit.of(rows, ROWS).batches(rows, [np.arange(ROWS)], 0)[0]
    batch.loss_sum(model)
    assert widths == 2 * [batch.input_ids.shape[1]], "in each layer"
    monkeypatch.setattr(fused, "LONGEST", batch.input_ids.shape[1] - 1)
    batch.loss_sum(model)
    assert len(widths) == 2
    monkeypatch.setattr(fused, "LONGEST", 512)
    set_dropout(model, 0.5)
    batch.loss_sum(model)
    assert len(widths) == 2, "it has no dropout"


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_bf16_passes_the_check_of_every_family(family: str) -> None:
    configure(model_of(family, torch.bfloat16), fused=True, dropout=None)


def test_every_dropout_is_set() -> None:
    model = model_of("gpt2", attn_pdrop=0.1).train()
    configure(model, fused=True, dropout=0.25)
    rates = {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)}
    assert rates == {0.25}
    llama = model_of("llama", attention_dropout=0.1)
    configure(llama, fused=True, dropout=0.5)
    assert {layer.self_attn.attention_dropout for layer in llama.model.layers} == {0.5}
    assert config_of("llama")["attention_dropout"] == 0.0


@pytest.mark.parametrize("family", ["seed_oss", "gpt_bigcode", "falcon", "phi3"])
def test_no_dropout_is_left_on(family: str) -> None:
    """Those of Seed-OSS and GPT-BigCode are numbers that the other families do not have."""
    keys = ("attention_dropout", "residual_dropout", "hidden_dropout", "resid_pdrop", "attn_pdrop", "embd_pdrop")
    rates: dict[str, Any] = dict.fromkeys(keys, 0.5)
    model = model_of(family, **rates).train()
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        assert not torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)
        set_dropout(model, 0.0)
        assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits), "something is still dropped"


@pytest.mark.parametrize("family", ["qwen2", "llama", "mistral"])
def test_recomputed_layers_give_the_same_gradients(family: str, rows: Rows) -> None:
    found = []
    for every in (0, 1, 2):
        model = model_of(family)
        configure(model, fused=True, dropout=0.0)
        model.train()
        if every:
            model.activation_checkpointing_enable({"use_reentrant": False}, every_n_layers=every)
        accumulate(model, CausalLimit.of(rows, 3).batches(rows, [np.arange(ROWS)], 0))
        found.append(gradients(model))
    for other in found[1:]:
        for name, gradient in found[0].items():
            assert float((other[name] - gradient).norm()) <= 1e-12 * max(1e-3, float(gradient.norm())), name
