"""Mixtures of experts as the hub has them, one expert a tensor: merged on the way in, and apart again in the result."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from jobs.disk.rundir import RunDir
from jobs.errors import Rejected
from tests.training.attempts import attempt, logged, same_tensors, trained
from tests.training.stepping import Noting
from tests.training.tasks.causal.families import config_of, model_of
from tests.training.workplace import Workplace
from tests.training.workplace import of_rows as of_rows
from worker.training.checkpoints.checkpoint import WEIGHTS
from worker.training.checkpoints.tensorfile import write_tensors
from worker.training.models.model_files import CONFIG, SINGLE, validate_folder
from worker.training.models.model_store import convert
from worker.training.tasks.causal import builtin
from worker.training.tasks.causal.fused import learned_loss_sum
from worker.training.tasks.causal.layout import layout_of
from worker.training.tasks.causal.task import Causal
from worker.training.trained import load_trained

MIXTURES = ("qwen3_moe", "mixtral", "olmoe", "qwen2_moe")
SETTINGS: dict[str, Any] = {
    "model": "./moe",
    "training": {"epochs": 2, "batch_size": 8, "learning_rate": 3e-3},
    "memory": {"micro_batch": 4},
    "evaluation": {"every_steps": 3, "samples": 1, "sample_tokens": 8},
    "checkpoint": {"every_steps": 3},
    "log": {"every_steps": 1},
}
SMALL = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16}
Tensors = dict[str, torch.Tensor]


def mixture(workplace: Workplace, family: str, *, router_logits: bool = False, **saved: Any) -> Path:
    """A model folder as `save_pretrained` writes it, and rows."""
    folder = workplace.data / "moe"
    model = model_of(family, torch.bfloat16, vocab_size=512, output_router_logits=router_logits)
    model.save_pretrained(folder, **saved)
    builtin.learn_tokenizer(["question 1, answer 1"]).save_pretrained(folder)
    workplace.rows("rows.jsonl", [{"prompt": f"question {n}", "completion": f"answer {n}"} for n in range(40)])
    return folder


def job(workplace: Workplace, **parts: Any) -> RunDir:
    return workplace.job(**SETTINGS | parts, data={"validation": 0.2, "max_tokens": 64})


def weights_in(folder: Path) -> Tensors:
    return {name: each for file in folder.glob("*.safetensors") for name, each in load_file(file).items()}


def shapes(tensors: Tensors) -> dict[str, torch.Size]:
    return {name: each.shape for name, each in tensors.items()}


@pytest.mark.parametrize("family", MIXTURES)
def test_a_mixture_is_trained_from_the_files_of_the_hub_and_delivered_as_such(family: str, tmp_path: Path) -> None:
    workplace = Workplace(tmp_path, planned=family == "qwen3_moe")
    source = weights_in(mixture(workplace, family))
    assert sum(".experts.0." in name for name in source) == 2 * 3, "of two layers"
    whole, stopped = job(workplace), job(workplace)
    for run in (whole, stopped):
        workplace.prepare(run)
    assert whole.plan().model.parameters == sum(each.numel() for each in source.values())
    stored = weights_in(Path(str(whole.plan().model.folder)))
    assert not any(".experts.0." in name for name in stored)
    assert attempt(whole) == 0
    assert attempt(stopped, stop_at=6) == 75 and attempt(stopped, 2) == 0
    assert logged(whole) == logged(stopped)
    assert same_tensors(whole.model / SINGLE, stopped.model / SINGLE)
    assert (trained(whole).loss or 9.0) < (trained(whole).first_loss or 0.0)
    delivered = load_file(whole.model / SINGLE)
    assert shapes(delivered) == shapes(source)
    found: Any = AutoModelForCausalLM.from_pretrained(whole.model, output_loading_info=True)
    opened, info = found
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    kept = load_file(sorted(whole.checkpoints.iterdir())[-1] / WEIGHTS)
    assert all(torch.equal(opened.state_dict()[name], kept[name]) for name in layout_of(config_of(family)).shapes)
    ids = torch.arange(3, 30)[None]
    again = load_trained(whole, Causal(), None, torch.device("cpu")).model
    with torch.no_grad():
        assert torch.equal(opened(input_ids=ids).logits, again(input_ids=ids).logits)


@pytest.mark.parametrize("merge", [True, False])
def test_adapters_leave_router_and_experts_as_the_hub_has_them(merge: bool, workplace: Workplace) -> None:
    folder = mixture(workplace, "mixtral", router_logits=merge)
    source = weights_in(folder)
    run = job(workplace, method={"type": "lora", "rank": 4, "merge": merge})
    workplace.prepare(run)
    assert ["output_router_logits" in each for each in run.preview().model_noticed] == [True] * merge
    assert attempt(run) == 0
    ids = torch.arange(3, 30)[None]
    said = load_trained(run, Causal(), None, torch.device("cpu")).model
    if merge:
        delivered = load_file(run.model / SINGLE)
        assert shapes(delivered) == shapes(source)
        changed = {name for name, each in delivered.items() if not torch.equal(each, source[name])}
        attention = {f"{layer}.self_attn.{part}_proj.weight" for layer in (0, 1) for part in "qkvo"}
        assert changed == {f"model.layers.{name}" for name in attention}
        opened: Any = AutoModelForCausalLM.from_pretrained(run.model)
    else:  # beside the model as the hub has it
        base = AutoModelForCausalLM.from_pretrained(folder)
        opened = PeftModel.from_pretrained(base, str(run.model), autocast_adapter_dtype=False).eval()
    with torch.no_grad():
        assert torch.equal(opened(input_ids=ids).logits, said(input_ids=ids).logits)


# Whose experts stand under other names, or beside layers without any; and three convolutions that become one.
OTHERS: dict[str, dict[str, Any]] = {
    "phimoe": {"num_local_experts": 4},
    "deepseek_v3": {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "jamba": {"num_experts": 4},
    "minimax": {"num_local_experts": 4},
    "ernie4_5_moe": {"moe_num_experts": 4},
    "olmo_hybrid": {},
}


def converted(source: Path, target: Path, noting: Noting) -> Path:
    """The folder of the model store."""
    target.mkdir()
    convert(source, target, "x", Causal(), noting)
    return target


@pytest.mark.parametrize("family", [*MIXTURES, *OTHERS])
def test_what_nobody_has_trained_is_delivered_bit_for_bit(family: str, tmp_path: Path, noting: Noting) -> None:
    more = OTHERS.get(family)
    model = model_of(family, torch.bfloat16, **more | SMALL if more is not None else {})
    model.save_pretrained(tmp_path / "hub")
    builtin.learn_tokenizer(["some text"]).save_pretrained(tmp_path / "hub")
    stored = load_file(converted(tmp_path / "hub", tmp_path / "store", noting) / SINGLE)
    own = model.state_dict()
    assert all(torch.equal(each, own[name].to(each.dtype)) for name, each in stored.items())
    layout = layout_of(json.loads((tmp_path / "store" / CONFIG).read_text()))
    assert layout.merged and not layout.merged_on_load
    write_tensors(tmp_path / SINGLE, layout.as_on_the_hub(stored))
    assert same_tensors(tmp_path / SINGLE, tmp_path / "hub" / SINGLE)


def test_experts_that_are_merged_already_are_taken_as_they_are(workplace: Workplace, noting: Noting) -> None:
    merged = mixture(workplace, "mixtral", save_original_format=False)
    assert not any(".experts.0." in name for name in weights_in(merged))
    one = converted(merged, workplace.root / "one", noting)
    other = converted(mixture(workplace, "mixtral"), workplace.root / "other", noting)
    assert same_tensors(one / SINGLE, other / SINGLE)


def test_experts_of_several_shards_and_types_are_rounded_once(workplace: Workplace, noting: Noting) -> None:
    folder = mixture(workplace, "mixtral")
    source = load_file(folder / SINGLE)
    wide = {name: each.float() * (1 + 1e-3) if ".w3." in name else each for name, each in source.items()}
    shards = {
        f"model-0000{number}-of-00002.safetensors": dict(list(wide.items())[number - 1 :: 2]) for number in (1, 2)
    }
    (folder / SINGLE).unlink()
    for name, held in shards.items():
        save_file(held, folder / name, metadata={"format": "pt"})
    index = {"weight_map": {name: file for file, held in shards.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    stored = load_file(converted(folder, workplace.root / "store", noting) / SINGLE)
    layout = layout_of(json.loads((folder / CONFIG).read_text()))
    expected = {name: each.bfloat16() for name, each in wide.items()}
    found = layout.as_on_the_hub(stored)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"
FIFTH = EXPERT.replace("2", "4")
MERGED = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.mark.parametrize(
    ("code", "named", "change"),
    [
        ("missing_keys", EXPERT, lambda held: held.pop(EXPERT)),
        ("mismatched_shapes", EXPERT, lambda held: held.update({EXPERT: held[EXPERT].T.contiguous()})),
        ("unexpected_keys", FIFTH, lambda held: held.update({FIFTH: held[EXPERT].clone()})),
        ("unexpected_keys", "experts.0.gate_proj.weight", lambda held: held.update({MERGED: torch.zeros(4, 32, 32)})),
        ("wrong_dtype", EXPERT, lambda held: held.update({EXPERT: held[EXPERT].to(torch.int8)})),
        ("weights_not_finite", MERGED, lambda held: held.update({EXPERT: held[EXPERT] / 0})),
    ],
)
def test_experts_that_are_not_those_of_the_config_are_refused_by_name(
    code: str, named: str, change: Callable[[Tensors], object], workplace: Workplace, noting: Noting
) -> None:
    folder = mixture(workplace, "qwen3_moe")
    held = load_file(folder / SINGLE)
    change(held)
    save_file(held, folder / SINGLE, metadata={"format": "pt"})
    with pytest.raises(Rejected, match=re.escape(named)) as caught:
        converted(folder, workplace.root / "store", noting)
    assert caught.value.detail_code == code


def test_what_transformers_makes_of_other_tensors_is_refused(tmp_path: Path, workplace: Workplace) -> None:
    model_of("hrm_text", torch.bfloat16, **SMALL).save_pretrained(tmp_path / "hub")
    builtin.learn_tokenizer(["some text"]).save_pretrained(tmp_path / "hub")
    with pytest.raises(Rejected, match="of which transformers makes others") as caught:
        validate_folder(tmp_path / "hub", "./hub", Causal())
    assert caught.value.detail_code == "merged_on_load"


@pytest.mark.parametrize("family", MIXTURES)
def test_the_loss_of_a_batch_is_that_of_transformers(family: str, tmp_path: Path, noting: Noting) -> None:
    model_of(family, torch.bfloat16).save_pretrained(tmp_path / "hub")
    builtin.learn_tokenizer(["some text"]).save_pretrained(tmp_path / "hub")
    own = AutoModelForCausalLM.from_pretrained(
        converted(tmp_path / "hub", tmp_path / "store", noting), dtype=torch.float32
    )
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "hub", dtype=torch.float32)
    ids = torch.arange(3, 63).view(2, 30)
    places = torch.tensor([place for place in range(59) if place != 29])  # the last of a row has nothing to learn
    with torch.no_grad():
        expected = float(whole(input_ids=ids, labels=ids).loss)
        loss = float(learned_loss_sum(own, ids, places, ids.flatten()[places + 1])) / len(places)
    assert loss == pytest.approx(expected, rel=1e-6)
