"""Who owns which weights, and when a pass needs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.oom_exactness import CONFIGS
from worker.training.checkpoints.tensorfile import write_tensors
from worker.training.planning.bare_model import bare_model
from worker.training.ranks.gathered import Brought
from worker.training.ranks.schedule import Direction, Exchange, Schedule
from worker.training.ranks.sharding import Sharding, in_order, layers_of, shard
from worker.training.tasks.causal.task import Causal
from worker.training.tasks.seq2seq.task import Seq2Seq
from worker.training.tasks.task import Task

T5: dict[str, Any] = CONFIGS["seq2seq"] | {"num_layers": 3, "num_decoder_layers": 2}
QWEN: dict[str, Any] = CONFIGS["causal"] | {"num_hidden_layers": 5}


def model_of(task: Task, config: dict[str, Any]) -> nn.Module:
    return bare_model(config, task, torch.float32, fused=True, dropout=0.0)


def owners(model: nn.Module, sharding: Sharding) -> dict[str, int]:
    names = {id(weight): name for name, weight in model.named_parameters()}
    return {names[id(weight)]: owner for layer in sharding.layers for weight, owner in layer.weights}


@pytest.mark.parametrize(("task", "config"), [(Seq2Seq(), T5), (Causal(), QWEN)])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_every_matrix_of_a_layer_has_one_owner_and_all_own_about_as_much(
    task: Task, config: dict[str, Any], ranks: int
) -> None:
    one, other = (model_of(task, config) for _ in range(2))
    sharding = shard(one, ranks, trained=True)
    found = owners(one, sharding)
    assert found == owners(other, shard(other, ranks, trained=True)), "every rank must come to the same"
    outside = {name for name, weight in one.named_parameters() if weight.ndim < 2 or name not in found}
    assert all(
        "norm" in name or "bias" in name or "embed" in name or "shared" in name or "head" in name for name in outside
    )
    assert "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight" not in found
    assert sum(sharding.owned_bytes(rank) for rank in range(ranks)) == sharding.sharded_bytes
    updates = [sharding.updates(rank) for rank in range(ranks)]
    assert sorted(id(weight) for each in updates for weight in each) == sorted(map(id, one.parameters())), (
        "one rank updates each weight"
    )
    held = [sum(weight.nbytes for weight in each) for each in updates]
    assert max(held) - min(held) <= max(weight.nbytes for weight in one.parameters())
    assert all(sharding.slot_bytes(rank) <= sharding.sharded_bytes / 5 * 1.8 for rank in range(ranks))


def test_a_frozen_model_is_sharded_evenly_in_every_layer() -> None:
    model = model_of(Causal(), QWEN).requires_grad_(False)
    sharding = shard(model, 2, trained=False)
    assert not sharding.others
    for layer in sharding.layers:
        assert {owner for _, owner in layer.weights} == {0, 1}
        assert abs(layer.missing_bytes(0) - layer.missing_bytes(1)) <= max(weight.nbytes for weight, _ in layer.weights)


def test_what_is_trained_beside_a_frozen_model_is_not_sharded() -> None:
    model = model_of(Causal(), QWEN).requires_grad_(False)
    layers = dict(layers_of(model))
    adapter = next(iter(layers.values())).get_parameter("self_attn.q_proj.weight").requires_grad_(True)
    assert id(adapter) not in {
        id(weight) for layer in shard(model, 2, trained=False).layers for weight, _ in layer.weights
    }


def test_layers_that_run_twice_are_not_in_order() -> None:
    model = model_of(Causal(), QWEN)
    layers = [layer for _, layer in layers_of(model)]
    assert in_order(model, lambda: _run(layers))
    assert not in_order(model, lambda: _run([*layers, layers[0]]))
    assert not in_order(model, lambda: _run(layers[::-1]))
    assert in_order(model, lambda: _run(layers[::2])), "some may be left out"
    assert not in_order(nn.Linear(2, 2), lambda: None), "there are no layers"
    assert not in_order(model, lambda: None), "layers whose weights are computed with elsewhere would not wait for them"


def test_a_part_that_two_layers_share_is_not_sharded() -> None:
    model = model_of(Causal(), QWEN)
    first, second, *_ = (layer for _, layer in layers_of(model))
    second.mlp = first.mlp
    names = owners(model, shard(model, 2, trained=True))
    assert "model.layers.0.self_attn.q_proj.weight" in names
    assert not [name for name in names if name.startswith(("model.layers.0.mlp", "model.layers.1.mlp"))]


def _run(layers: list[nn.Module]) -> None:
    """As far as the hooks that run before each."""
    for layer in layers:
        for hook in layer._forward_pre_hooks.values():
            hook(layer, ())


@pytest.mark.parametrize("layers", [1, 2, 3, 6])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("trained", [False, True])
def test_whatever_is_needed_lies_in_its_slot_and_nothing_takes_it_away(
    layers: int, micro_batches: int, trained: bool
) -> None:
    schedule = Schedule(layers, micro_batches, [None, None], trained=trained)
    slots: list[int | None] = [None, None]
    made = 0

    reduced: list[int] = []
    went_back: list[int] = []

    def exchange_until(count: int) -> None:
        nonlocal made
        for kind, layer in schedule.exchanges[made:count]:
            if kind is Exchange.FETCH:
                slots[layer % 2] = layer
            else:
                reduced.append(layer)
        made = max(made, count)

    order = [(Direction.FORWARD, layer) for layer in range(layers)]
    order += [(Direction.BACKWARD, layer) for layer in reversed(range(layers))]
    for direction, layer in order * micro_batches:
        use = schedule.next(direction, layer)
        exchange_until(use.ready)
        assert slots[layer % 2] == layer
        exchange_until(use.ahead)
        assert slots[layer % 2] == layer, "what comes next goes into the other slot"
        assert reduced == (went_back if trained else []), "gradients of layers through which the pass has gone back"
        if direction is Direction.BACKWARD:
            went_back.append(layer)
    exchange_until(len(schedule.exchanges))
    assert reduced == (went_back if trained else [])
    if layers > 2:
        again = layers - 2  # all but those that the slots still have where a pass turns round
        assert made - len(reduced) == 2 + (2 * again) * micro_batches


def test_layers_that_are_left_out_are_passed_and_what_never_comes_is_a_fault() -> None:
    schedule = Schedule(4, 1, [None, None], trained=False)
    assert schedule.next(Direction.FORWARD, 0).ready == 1
    assert schedule.next(Direction.FORWARD, 3).ready == 4
    assert schedule.next(Direction.BACKWARD, 3).ready == 4
    with pytest.raises(AssertionError, match="layer 1 runs where no pass"):
        schedule.next(Direction.FORWARD, 1)


def test_a_file_of_weights_that_are_brought_brings_each_once(tmp_path: Path) -> None:
    brought: list[str] = []
    weights = {name: torch.ones(2) for name in ("a", "b")}
    write_tensors(tmp_path / "model.safetensors", Brought(weights, brought.append))
    assert brought == ["a", "b"]
