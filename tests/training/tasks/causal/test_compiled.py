"""Compiled layers of causal models: the gradients of those that are not, and the same few graphs for every shape."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

from jobs.spec import LoraMethod
from tests.training.tasks.causal.families import VOCABULARY, model_of
from worker.training.adapters.lora import Lora
from worker.training.journal import Journal
from worker.training.tasks.causal.compiled import compile_layers
from worker.training.tasks.causal.fused import configure, learned_loss_sum
from worker.training.tasks.causal.task import Causal

# Tracing looks at the gradient of everything that goes into a graph.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
SHAPES = ((3, 16), (1, 24), (5, 8), (2, 40), (1, 88))


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    counters.clear()


def make_model(family: str, *, lora: bool = False) -> PreTrainedModel:
    model = model_of(family)
    configure(model, fused=True, dropout=0.0)
    if lora:
        Lora(LoraMethod(type="lora", rank=4)).inject(model, 0)
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.double()
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    model.train()
    return model


def passes(model: PreTrainedModel) -> Iterator[dict[str, torch.Tensor]]:
    """Loss and gradients of every shape."""
    for rows, width in SHAPES:
        draw = torch.Generator().manual_seed(width)
        ids = torch.randint(3, VOCABULARY, (rows, width), generator=draw)
        places = torch.arange(rows * width - 1)[::3]
        model.zero_grad()
        loss = learned_loss_sum(model, ids, places, ids.flatten()[places + 1])
        loss.backward()
        found = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
        yield found | {"loss": loss.detach()}


@pytest.mark.parametrize(("family", "lora", "graphs"), [("qwen2", False, 2), ("qwen3", True, 4)])
def test_a_few_graphs_serve_every_shape_with_the_gradients_of_layers_as_they_are(
    family: str, lora: bool, graphs: int, tmp_path: Path
) -> None:
    """Several rows, and one alone; beside frozen weights also the first layer, whose input needs no gradient."""
    model = make_model(family, lora=lora)
    expected = list(passes(model))
    compiled = compile_layers(model, Journal(tmp_path / "journal.jsonl"), "aot_eager")
    assert compiled.failure is None
    assert counters["stats"]["unique_graphs"] == graphs
    assert all(parameter.grad is None for parameter in model.parameters())
    for found, wanted in zip(passes(model), expected, strict=True):
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert float((found[name] - tensor).norm()) <= 1e-12 * max(1e-3, float(tensor.norm())), name
    model.eval()
    with torch.no_grad():
        model(input_ids=torch.ones(2, 9, dtype=torch.int64))  # evaluation and generation are not compiled
    assert counters["stats"]["unique_graphs"] == graphs, "nothing was compiled after the warm-up"


def test_layers_run_as_they_are_where_some_are_recomputed_or_a_mask_is_needed() -> None:
    def why(model: PreTrainedModel, longest: int = 128, recomputed: bool = False) -> str:
        return str(Causal(positions=longest).uncompiled(model, recomputed=recomputed))

    assert "a mask for rows of up to 9 tokens" in why(make_model("mistral"), longest=9)
    assert "some are recomputed" in why(make_model("qwen2"), recomputed=True)
    assert "float16" in why(model_of("qwen2", torch.float16))
    assert Causal(positions=128).uncompiled(make_model("qwen2"), recomputed=False) is None


def test_any_error_of_the_compiler_leaves_layers_as_they_are(tmp_path: Path) -> None:
    def broken(graph: torch.fx.GraphModule, inputs: list[object]) -> object:
        raise RuntimeError("no such gcc")

    model = make_model("llama")
    expected = list(passes(model))
    compiled = compile_layers(model, Journal(tmp_path / "journal.jsonl"), broken)
    assert compiled.failure == "RuntimeError: no such gcc"
    for found, wanted in zip(passes(model), expected, strict=True):
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
