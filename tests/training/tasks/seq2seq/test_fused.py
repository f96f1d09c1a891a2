"""Fused modules: the same function and gradients as the stock ones, each by itself, and undone without a trace.

The stock side is transformers' own model and torch's own loss, untouched.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import T5ForConditionalGeneration
from transformers.activations import NewGELUActivation
from transformers.models.t5.modeling_t5 import T5LayerNorm

from tests.training.conftest import tiny_model
from tests.training.tasks.seq2seq.comparison import (
    Tensors,
    by_transformers,
    by_us,
    distances,
    make_batch,
    make_model,
)
from tests.training.tasks.seq2seq.families import model_of
from worker.training.network import guards
from worker.training.tasks.compiled import set_dropout
from worker.training.tasks.seq2seq import attention as t5_attention
from worker.training.tasks.seq2seq.fused import ALL, PATCHES, Patch, fuse, unfuse
from worker.training.tasks.seq2seq.loss import token_loss_sum


def outputs_and_gradients(module: nn.Module, dtype: torch.dtype) -> list[torch.Tensor]:
    module = module.to(dtype)
    generator = torch.Generator().manual_seed(1)
    values = (4 * torch.randn(64, 48, generator=generator)).to(dtype).requires_grad_()
    weights = torch.randn(64, 48, generator=generator).to(dtype)
    result = module(values)
    (result * weights).sum().backward()
    assert values.grad is not None
    return [
        result.detach(),
        values.grad,
        *(parameter.grad for parameter in module.parameters() if parameter.grad is not None),
    ]


def norm() -> nn.Module:
    return T5LayerNorm(48)


# T5LayerNorm takes its mean of squares in fp32 even for float64 input, hence the wider bound for float64 there. In bf16
# both are within a few roundings (2^-8 each) of the exact value.
@pytest.mark.parametrize(
    ("stock", "dtype", "bound"),
    [
        (NewGELUActivation, torch.float64, 1e-12),
        (NewGELUActivation, torch.float32, 1e-5),
        (NewGELUActivation, torch.bfloat16, 0.05),
        (norm, torch.float64, 1e-6),
        (norm, torch.float32, 1e-5),
        (norm, torch.bfloat16, 0.05),
    ],
)
def test_fused_and_stock_modules_agree(stock: Callable[[], nn.Module], dtype: torch.dtype, bound: float) -> None:
    def make() -> nn.Module:
        module = stock()
        for parameter in module.parameters():
            nn.init.uniform_(parameter, 0.5, 1.5)
        return module

    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    fused = make()
    assert fuse(fused) == 1
    for one, other in zip(outputs_and_gradients(plain, dtype), outputs_and_gradients(fused, dtype), strict=True):
        torch.testing.assert_close(one, other, rtol=bound, atol=bound)


def test_fused_bf16_is_at_least_as_near_to_the_exact_value_as_the_stock_modules() -> None:
    for make in (NewGELUActivation, norm):
        exact, plain, fused = (module_outputs(make(), kind) for kind in ("exact", "plain", "fused"))
        assert (fused - exact).abs().mean() <= (plain - exact).abs().mean()


def module_outputs(module: nn.Module, kind: str) -> torch.Tensor:
    if kind == "fused":
        fuse(module)
    module = module.to(torch.float64 if kind == "exact" else torch.bfloat16)
    values = torch.randn(256, 48, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    with torch.no_grad():
        result: torch.Tensor = module(values.double() if kind == "exact" else values)
    return result.double()


# -- the whole model -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("patches", [*((patch,) for patch in ALL), ALL])
def test_every_patch_gives_the_loss_and_gradients_of_unpatched_transformers(
    patches: tuple[Patch, ...], gated: bool, tied: bool, padded: bool
) -> None:
    model, batch = make_model(gated=gated, tied=tied), make_batch(padded)
    expected = by_transformers(model, batch)
    fuse(model, patches)
    # The stock norm computes a part in fp32, always: with ours in float64 the results differ by so much.
    bound = 1e-6 if "norm" in patches else 1e-12
    assert max(distances(by_us(model, batch), expected).values()) < bound


@pytest.mark.parametrize("padded", [True, False])
def test_what_gpus_compute_in_one_kernel_is_the_same(padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(*tensors: torch.Tensor, scale: float) -> tuple[torch.Tensor]:  # CUDA's, which no CPU has
        query, key, value, bias, _, rate = tensors
        return (F.scaled_dot_product_attention(query, key, value, bias, float(rate), scale=scale),)

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_efficient_attention", kernel)
    monkeypatch.setattr(t5_attention, "_in_steps", t5_attention._in_one)
    model, batch = make_model(gated=True, tied=False), make_batch(padded)
    expected = by_transformers(model, batch)
    fuse(model, ["attention", "head"])
    assert max(distances(by_us(model, batch), expected).values()) < 1e-12


def test_in_bf16_all_patches_together_are_as_near_to_the_truth_as_the_stock_model() -> None:
    model, batch = make_model(gated=True, tied=False).bfloat16(), make_batch(True)
    exact = by_transformers(copy.deepcopy(model).double(), batch)
    for module in model.modules():
        if config := getattr(module, "config", None):
            config._attn_implementation = "eager"  # which rounds where ours on the CPU does
    stock = distances(by_transformers(model, batch), exact)
    fuse(model)
    ours = distances(by_us(model, batch), exact)
    assert ours["loss"] < 1e-3
    assert max(ours.values()) < 0.05
    assert sum(ours.values()) < 1.15 * sum(stock.values())


@pytest.mark.parametrize("patches", [(), ALL])
def test_recomputed_layers_and_dropout_give_the_same_gradients(patches: tuple[Patch, ...]) -> None:
    model, batch = make_model(gated=True, tied=False), make_batch(True)
    set_dropout(model, 0.3)
    fuse(model, patches)
    torch.manual_seed(5)
    expected = by_us(model, batch)
    assert abs(by_us(model, batch)["loss"] - expected["loss"]) > 1e-4, "other masks, another loss"
    model.activation_checkpointing_enable({"use_reentrant": False}, every_n_layers=1)
    torch.manual_seed(5)
    assert max(distances(by_us(model, batch), expected).values()) < 1e-12


@pytest.mark.parametrize("patches", [*((patch,) for patch in ALL), ALL])
def test_generation_and_evaluation_are_the_stock_ones(patches: tuple[Patch, ...]) -> None:
    model, batch = make_model(gated=True, tied=False), make_batch(True)
    set_dropout(model, 0.3)
    model.eval()
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "num_beams": 2}
    generate: Any = model.generate  # type: ignore[misc]  # typed for subclasses that are none

    def texts() -> list[torch.Tensor]:
        return [generate(**inputs, **options, use_cache=cache) for cache in (True, False)]

    with torch.no_grad():
        expected, loss = texts(), by_transformers_loss(model, batch)
        fuse(model, patches)
        assert all(torch.equal(one, other) for one, other in zip(texts(), expected, strict=True))
        assert float(token_loss_sum(model, **batch)) == pytest.approx(loss, rel=1e-6)
        assert by_transformers_loss(model, batch) == pytest.approx(loss, rel=1e-6)


def by_transformers_loss(model: T5ForConditionalGeneration, batch: Tensors) -> float:
    counted = int((batch["labels"] != -100).sum())
    return float(model(**batch).loss) * counted


def test_options_that_only_the_stock_code_knows_still_work() -> None:
    model, batch = make_model(gated=True, tied=False), make_batch(True)
    expected = model(**batch)
    fuse(model)
    ours = model(**batch, return_dict=False)  # a loss of the model's own, a cache, a tuple
    torch.testing.assert_close(ours[0], expected.loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(ours[1], expected.logits, rtol=1e-5, atol=1e-5)


# -- the switch ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["t5", "mt5"])
def test_fusing_moves_nothing_and_is_undone_without_a_trace(family: str) -> None:
    model: Any = model_of(family, torch.float32)
    before = [type(module) for module in model.modules()], model.config.to_dict(), list(model.state_dict())
    pointers = guards.pointers_of(model)
    fuse(model)
    kinds = {type(module) for module in model.modules()}
    exchanged = {stock: fused for patch in PATCHES.values() for stock, fused in patch.items()}
    assert not (exchanged.keys() - {nn.Linear}) & kinds
    assert {exchanged[kind] for kind in set(before[0]) & exchanged.keys()} <= kinds
    assert len(set(before[0]) & exchanged.keys()) == 7
    assert list(model.state_dict()) == before[2]
    by_us(model, make_batch(True))
    guards.check_not_copied(model, pointers)
    assert model.config.to_dict() == before[1]
    unfuse(model)
    assert [type(module) for module in model.modules()] == before[0]


@pytest.mark.parametrize(
    ("patches", "count"),
    [
        (["gelu"], 2),
        (["norm"], 7),  # 2 in the encoder's layer, 3 in the decoder's, 1 at the end of each
        (["attention"], 7),  # 3 of attention, 2 layers, 2 stacks
        (["dropout"], 9),  # 2 and 3 after what a layer adds, 1 within each feed-forward, 1 in each stack
        (["head"], 1),
        (["gelu", "head"], 3),
    ],
)
def test_each_patch_is_a_switch_of_its_own(patches: Collection[Patch], count: int) -> None:
    model = tiny_model()
    stock = [type(module) for module in model.modules()]
    counted = fuse(model, patches)
    assert counted == sum(type(module) is not kind for module, kind in zip(model.modules(), stock, strict=True))
    assert counted == count


def test_other_kinds_of_modules_are_left_alone() -> None:
    assert fuse(nn.Sequential(nn.GELU(), nn.LayerNorm(3), nn.RMSNorm(3), nn.Linear(3, 3))) == 0
