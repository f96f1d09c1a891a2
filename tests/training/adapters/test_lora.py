"""Adapters in a real T5: where they are, what is trained, and gradients that equal those of plain peft."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import T5ForConditionalGeneration

from jobs.errors import Rejected
from jobs.spec import LoraMethod
from tests.training.conftest import batches_of, tiny_model
from worker.training.adapters.lora import Lora, adapter_parameters, check, targets_of
from worker.training.adapters.method import BaseModel
from worker.training.dataset.data import PreparedDataset
from worker.training.loop import accumulate
from worker.training.tasks.compiled import set_dropout
from worker.training.tasks.layout import Layout
from worker.training.tasks.seq2seq.fused import fuse
from worker.training.tasks.seq2seq.layout import layout_of
from worker.training.tasks.seq2seq.task import Seq2Seq

ROWS = np.arange(12)
KINDS: list[dict[str, Any]] = [{}, {"rslora": True, "alpha": 32.0}, {"dora": True}]


def lora(**settings: Any) -> Lora:
    return Lora(LoraMethod.model_validate({"type": "lora", "rank": 4} | settings))


def injected(seed: int = 0, **settings: Any) -> T5ForConditionalGeneration:
    model = tiny_model().bfloat16()
    lora(**settings).inject(model, seed)
    return model


@pytest.mark.parametrize("settings", [{}, {"dora": True}, {"adapter_dtype": "float32"}, {"targets": ["q"]}])
def test_adapters_alone_are_trained_and_the_model_stays_where_it_was(settings: dict[str, Any]) -> None:
    model = tiny_model().bfloat16()
    before = {parameter.data_ptr() for parameter in model.parameters()}
    targets = targets_of(model, lora(**settings).settings)
    lora(**settings).inject(model, 0)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    assert trained == dict(adapter_parameters(model))
    assert len(trained) == (3 if "dora" in settings else 2) * len(targets)
    assert {parameter.dtype for parameter in trained.values()} == {
        torch.float32 if "adapter_dtype" in settings else torch.bfloat16
    }
    assert {parameter.data_ptr() for parameter in frozen} == before
    assert {parameter.dtype for parameter in frozen} == {torch.bfloat16}
    assert type(model) is T5ForConditionalGeneration, "nothing is wrapped around it"


def test_the_same_seed_draws_the_same_adapters_and_leaves_no_trace() -> None:
    state = torch.get_rng_state()
    one, same, other = injected(3), injected(3), injected(4)
    assert torch.equal(torch.get_rng_state(), state)
    weights = [lora().weights(model) for model in (one, same, other)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    drawn = [name for name in weights[0] if "lora_A" in name]
    assert drawn and not any(torch.equal(weights[0][name], weights[2][name]) for name in drawn)


@pytest.mark.parametrize("settings", KINDS)
def test_names_are_those_of_peft(tmp_path: Path, settings: dict[str, Any]) -> None:
    get_peft_model(tiny_model(), plain_config(**settings)).save_pretrained(str(tmp_path))
    weights = lora(**settings).weights(injected(**settings))
    theirs = load_file(tmp_path / "adapter_model.safetensors")
    assert {name: tensor.shape for name, tensor in weights.items()} == {
        name: tensor.shape for name, tensor in theirs.items()
    }


def plain_config(**settings: Any) -> LoraConfig:
    return LoraConfig(
        r=4, lora_alpha=settings.get("alpha", 4), target_modules="all-linear", use_dora=settings.get("dora", False),
        use_rslora=settings.get("rslora", False),
    )  # fmt: skip


@pytest.mark.parametrize("settings", KINDS)
@pytest.mark.parametrize("activation_checkpointing", [0, 1])
@pytest.mark.parametrize("micro_batch", [12, 4, 1])
def test_gradients_equal_those_of_plain_peft_on_the_whole_batch(
    dataset: PreparedDataset, settings: dict[str, Any], activation_checkpointing: int, micro_batch: int
) -> None:
    ours = tiny_model()
    set_dropout(ours, 0.0)
    plain = copy.deepcopy(ours)
    fuse(plain, ["norm"])  # T5's own takes its mean in fp32, whatever the weights are
    theirs: Any = get_peft_model(plain, plain_config(**settings)).double()
    fuse(ours)
    method = lora(**settings)
    method.inject(ours, 0)
    ours.double().train()
    if activation_checkpointing:
        ours.activation_checkpointing_enable({"use_reentrant": False}, every_n_layers=activation_checkpointing)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if parameter.requires_grad and "magnitude" not in name:
                parameter.normal_(0, 0.1)  # peft begins with zeros, which have no gradient for half of the adapters
            theirs.base_model.model.get_parameter(name).copy_(parameter)

    accumulate(ours, batches_of(dataset.train, ROWS, micro_batch))

    [whole] = batches_of(dataset.train, ROWS, len(ROWS))
    logits = theirs.train()(
        input_ids=whole.input_ids, attention_mask=whole.attention_mask, labels=whole.labels, use_cache=False
    ).logits
    F.cross_entropy(logits.flatten(0, 1), whole.labels.flatten(), ignore_index=-100).backward()
    compared = 0
    for name, parameter in ours.named_parameters():
        if parameter.requires_grad:
            expected = theirs.base_model.model.get_parameter(name).grad
            assert parameter.grad is not None and expected is not None
            assert float((parameter.grad - expected).abs().max()) <= 1e-12 * max(1.0, float(expected.abs().max()))
            compared += 1
        else:
            assert parameter.grad is None
    assert compared == len(method.weights(ours))


@pytest.mark.parametrize(
    ("code", "damage"),
    [
        ("wrong_trainable", lambda model: model.shared.weight.requires_grad_(True)),
        ("wrong_trainable", lambda model: next(adapter_parameters(model))[1].requires_grad_(False)),
        ("wrong_dtype", lambda model: adapters_to(model, dtype=torch.float32)),
        ("wrong_device", lambda model: adapters_to(model, device="meta")),
    ],
)
def test_guards_refuse_what_is_not_as_it_should_be(code: str, damage: Any) -> None:
    model = injected()
    targets = targets_of(tiny_model(), lora().settings)
    check(model, targets, torch.bfloat16)
    damage(model)
    with pytest.raises(Rejected) as caught:
        check(model, targets, torch.bfloat16)
    assert caught.value.detail_code == code


def adapters_to(model: torch.nn.Module, **where: Any) -> None:
    model.get_submodule("encoder.block.0.layer.0.SelfAttention.q.lora_A").to(**where)


def test_a_module_too_many_is_refused() -> None:
    with pytest.raises(Rejected) as caught:
        check(injected(), ["encoder.block.0.layer.0.SelfAttention.q"], torch.bfloat16)
    assert caught.value.detail_code == "adapters_misplaced"


def test_the_hash_is_that_of_what_is_not_trained() -> None:
    model = injected()
    before = lora().untrained_sha256(model)
    with torch.no_grad():
        next(adapter_parameters(model))[1].add_(1.0)
        assert lora().untrained_sha256(model) == before
        model.shared.weight[3, 4] += 1.0
    assert lora().untrained_sha256(model) != before


def test_the_configuration_says_what_peft_needs() -> None:
    model, base = injected(targets=["SelfAttention.q", "wo"]), BaseModel("org/name", "abc")
    config = model.config.to_dict()
    [(name, content)] = lora(dora=True).configs(model, config, layout_of(config), base).items()
    assert name == "adapter_config.json"
    assert (content["base_model_name_or_path"], content["revision"]) == ("org/name", "abc")
    assert (content["peft_type"], content["r"], content["use_dora"], content["inference_mode"]) == (
        "LORA",
        4,
        True,
        True,
    )
    assert content["target_modules"] == [
        "decoder.block.0.layer.0.SelfAttention.q", "encoder.block.0.layer.0.SelfAttention.q", "wo",
    ]  # fmt: skip


def test_adapters_cost_two_products_of_the_model_and_three_of_their_own() -> None:
    config = tiny_model().config.to_dict()
    whole, lengths = Seq2Seq().flops(config), (np.array([9]), np.array([5]))
    layout = Layout({"body": (10, 9), "classifier.weight": (2, 5)}, "", "", head_modules=["classifier"])
    flops = lora().flops(whole, trained=10 + layout.head_parameters, layout=layout)
    assert flops.rows(*lengths) == pytest.approx(2.3 * whole.forward(*lengths))
    assert flops.forward(*lengths) == pytest.approx(1.1 * whole.forward(*lengths))
