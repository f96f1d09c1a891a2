"""Which layers get an adapter, by the names of a real T5, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from jobs.errors import Rejected
from jobs.spec import LoraMethod
from tests.training.conftest import tiny_model
from tests.training.tasks.causal.families import model_of
from worker.training.adapters import lora
from worker.training.adapters.lora import shortened, targets_of
from worker.training.tasks.seq2seq.fused import fuse


def method(**settings: Any) -> LoraMethod:
    return LoraMethod.model_validate({"type": "lora", "rank": 4} | settings)


@pytest.mark.parametrize("fused", [False, True])
def test_all_linear_means_every_linear_layer_but_the_head(fused: bool) -> None:
    model = tiny_model()
    if fused:
        fuse(model)
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    found = targets_of(model, method())
    assert found == [name for name in linear if name != "lm_head"]
    assert len(found) == 3 * 4 + 2 * 3  # two self-attentions, one cross-attention, two gated feed-forwards
    assert shortened(model, found) == ["k", "o", "q", "v", "wi_0", "wi_1", "wo"]


def test_the_log_says_which_matrices_are_left_out_and_how_many_numbers_are_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "longhaul.trainer")
    model = model_of("qwen2_moe")
    found = targets_of(model, method())
    assert not [name for name in found if "experts.gate" in name or name.endswith("shared_expert_gate")]
    [said] = caplog.messages
    assert "model.layers.0.mlp.shared_expert_gate" in said and "model.layers.0.mlp.experts.gate_up_proj" in said
    matrices = {name: each.numel() for name, each in model.model.layers.named_parameters() if each.ndim > 1}
    given = sum(matrices[f"{name}.weight".removeprefix("model.layers.")] for name in found)
    assert f"adapters for {100 * given / sum(matrices.values()):.1f} %" in said
    caplog.clear()
    targets_of(tiny_model(), method())
    assert not caplog.messages, "nothing is left out"


@pytest.mark.parametrize(
    ("family", "router", "more"),
    [("phimoe", "mlp.router", {}), ("afmoe", "mlp.router.gate", {"num_experts": 4, "num_dense_layers": 1})],
)
def test_all_linear_leaves_out_routers_that_are_linear_layers(family: str, router: str, more: dict[str, Any]) -> None:
    model = model_of(family, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8, **more)
    named = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    left = named - set(targets_of(model, method(rank=2))) - {"lm_head"}
    assert left and all(name.endswith(router) for name in left)


def test_a_rank_above_a_gate_that_is_named_is_refused_still() -> None:
    with pytest.raises(Rejected, match=r"shared_expert_gate \(1 × 32\)"):
        targets_of(model_of("qwen2_moe"), method(targets=["shared_expert_gate"]))


def test_a_model_whose_layers_are_of_another_kind_is_refused_by_it() -> None:
    with pytest.raises(Rejected, match="its matrices are in Conv1D") as caught:
        targets_of(model_of("gpt2"), method())
    assert (caught.value.detail_code, caught.value.hint) == ("no_such_target", "train it with method: full")
    with pytest.raises(Rejected, match=r"c_attn \(Conv1D\)") as caught:
        targets_of(model_of("gpt2"), method(targets=["c_attn"]))
    assert caught.value.hint == "train the model with method: full"


def test_a_list_names_the_endings_of_names() -> None:
    model = tiny_model()
    found = targets_of(model, method(targets=["SelfAttention.q", "wo"]))
    assert found == [
        "encoder.block.0.layer.0.SelfAttention.q", "encoder.block.0.layer.1.DenseReluDense.wo",
        "decoder.block.0.layer.0.SelfAttention.q", "decoder.block.0.layer.2.DenseReluDense.wo",
    ]  # fmt: skip
    assert shortened(model, found) == [found[2], found[0], "wo"], "another q is no target"


def test_any_other_text_is_a_regular_expression_for_whole_names() -> None:
    found = targets_of(tiny_model(), method(targets=r"decoder\..*\.(q|v)"))
    assert found and all(name.startswith("decoder.") and name[-2:] in (".q", ".v") for name in found)


@pytest.mark.parametrize(
    ("settings", "code", "said"),
    [
        ({"targets": ["q", "q_proj"]}, "no_such_target", "'q_proj'"),
        ({"targets": "([a-zA-Z0-9._]+)+!"}, "endless_pattern", "it has not ended after 0.2 s"),
        ({"targets": "q"}, "no_such_target", "whole name like 'q'"),
        ({"targets": ["q", "final_layer_norm"]}, "target_not_linear", "encoder.final_layer_norm (T5LayerNorm)"),
        ({"targets": ["shared"]}, "target_not_linear", "shared (Embedding)"),
        ({"targets": ["lm_head"]}, "target_is_head", "the output head gets no adapter"),
        ({"rank": 17}, "rank_too_large", "encoder.block.0.layer.0.SelfAttention.q (16 × 32)"),
    ],
)
def test_what_cannot_have_an_adapter_is_refused_by_name(
    settings: dict[str, Any], code: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lora, "_LONGEST_S", 0.2)
    with pytest.raises(Rejected) as caught:
        targets_of(tiny_model(), method(**settings))
    assert caught.value.detail_code == code
    assert said in str(caught.value) and caught.value.hint
    assert caught.value.param == ("method.rank" if code == "rank_too_large" else "method.targets")


def test_a_misspelt_target_is_answered_with_the_one_that_was_meant() -> None:
    with pytest.raises(Rejected) as caught:
        targets_of(tiny_model(), method(targets=["wi0"]))
    assert caught.value.hint == "did you mean 'wi_0'? its linear layers are q, k, v, o, wi_0, wi_1, wo"
    with pytest.raises(Rejected) as caught:
        targets_of(tiny_model(), method(targets="wi_0"))
    assert caught.value.hint is not None and caught.value.hint.endswith('write a list: ["wi_0"]')
