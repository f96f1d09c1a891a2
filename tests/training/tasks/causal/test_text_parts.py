"""Multimodal models as the hub has them: their text part is trained, and delivered as a causal model by itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from jobs.disk.rundir import RunDir
from jobs.errors import Rejected
from tests.training.attempts import attempt, trained
from tests.training.stepping import Noting
from tests.training.workplace import Workplace
from tests.training.workplace import of_rows as of_rows
from worker.training.models.model_files import SINGLE, validate_folder
from worker.training.models.model_store import convert
from worker.training.tasks.causal import builtin
from worker.training.tasks.causal.fused import learned_loss_sum
from worker.training.tasks.causal.layout import text_part
from worker.training.tasks.causal.task import Causal
from worker.training.trained import load_trained

TEXT = {
    "vocab_size": 512, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 8, "depth": 1, "num_heads": 2, "out_hidden_size": 32, "vision_output_dim": 32,
    "projector_input_dim": 32, "projector_output_dim": 32,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_hidden_layers": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3": {"sliding_window": 8},
    "mistral3": {},
    "llama4": {"num_local_experts": 2, "intermediate_size_mlp": 48},
    "qwen3_5": {"num_hidden_layers": 4},
    "qwen3_5_moe": EXPERTS | {"shared_expert_intermediate_size": 16},
    "llava": {},
    "internvl": {},
    "idefics3": {},
}
HEADS = {"gemma3": "Gemma3ForCausalLM", "mistral3": "MistralForCausalLM"}


def multimodal(folder: Path, family: str) -> dict[str, Any]:
    """A model as `save_pretrained` writes it, with a tokenizer; its config.json."""
    kind: Any = CONFIG_MAPPING[family]
    text, vision = (getattr(kind(), each).model_type for each in ("text_config", "vision_config"))
    parts = {
        "text_config": TEXT | FAMILIES[family] | {"model_type": text},
        "vision_config": VISION | {"model_type": vision},
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = AutoModelForImageTextToText.from_config(kind(**parts), dtype=torch.bfloat16)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    builtin.learn_tokenizer(["question 1, answer 1"]).save_pretrained(folder)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def job(workplace: Workplace, **parts: Any) -> RunDir:
    workplace.rows("rows.jsonl", [{"prompt": f"question {n}", "completion": f"answer {n}"} for n in range(40)])
    settings: dict[str, Any] = {
        "model": "./multimodal",
        "training": {"epochs": 2, "batch_size": 8, "learning_rate": 3e-3},
        "memory": {"micro_batch": 4},
        "evaluation": {"every_steps": 4, "samples": 1, "sample_tokens": 8},
    }
    return workplace.job(**settings | parts, data={"validation": 0.2, "max_tokens": 64})


@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_part_has_the_loss_of_the_whole_model(family: str, tmp_path: Path, noting: Noting) -> None:
    hub, store = tmp_path / "hub", tmp_path / "store"
    config = multimodal(hub, family)
    assert Causal().takes(config)
    store.mkdir()
    convert(hub, store, "x", Causal(), noting)
    found: Any = AutoModelForCausalLM.from_pretrained(store, dtype=torch.float32, output_loading_info=True)
    text, info = found
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    whole = AutoModelForImageTextToText.from_pretrained(hub, dtype=torch.float32)
    ids = torch.arange(3, 30)[None]
    with torch.no_grad():
        expected = float(whole(input_ids=ids, labels=ids).loss)
        loss = float(learned_loss_sum(text, ids, torch.arange(26), ids[0, 1:])) / 26
    assert loss == pytest.approx(expected, rel=1e-6)
    assert type(text).__name__ in text_part(config)["architectures"]  # type: ignore[index]


@pytest.mark.parametrize("family", HEADS)
def test_the_text_part_is_trained_and_delivered_as_a_text_model(family: str, workplace: Workplace) -> None:
    config = multimodal(workplace.data / "multimodal", family)
    run, adapted = job(workplace), job(workplace, method={"type": "lora", "rank": 4, "merge": True})
    workplace.prepare(run)
    [noticed] = run.preview().model_noticed
    assert noticed.startswith(f"the text part alone is trained, and delivered as a {HEADS[family]}")
    assert attempt(run) == 0
    assert (trained(run).loss or 9.0) < (trained(run).first_loss or 0.0)
    written = json.loads((run.model / "config.json").read_text())
    assert (written["architectures"], written["model_type"]) == ([HEADS[family]], config["text_config"]["model_type"])
    opened: Any = AutoModelForCausalLM.from_pretrained(run.model)
    again = load_trained(run, Causal(), None, torch.device("cpu")).model
    ids = torch.arange(3, 30)[None]
    with torch.no_grad():
        assert torch.equal(opened(input_ids=ids).logits, again(input_ids=ids).logits)
    workplace.prepare(adapted)
    assert attempt(adapted) == 0
    source = load_file(workplace.data / "multimodal" / SINGLE)
    same = {
        name
        for name, each in load_file(adapted.model / SINGLE).items()
        if any(key.endswith(name.removeprefix("model.")) and torch.equal(each, source[key]) for key in source)
    }
    assert "model.embed_tokens.weight" in same and "model.layers.1.input_layernorm.weight" in same
    assert not any("_proj." in name for name in same)


def test_a_model_without_a_causal_text_part_is_left_to_others() -> None:
    config = {"model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"], "text_config": {}}
    assert text_part(config) is None and not Causal().takes(config)


def test_adapters_alone_are_refused_for_others_would_open_them_beside_the_multimodal_model(
    workplace: Workplace,
) -> None:
    multimodal(workplace.data / "multimodal", "mistral3")
    with pytest.raises(Rejected, match="text part of a multimodal model") as caught:
        workplace.check(job(workplace, method={"type": "lora", "rank": 4}))
    assert (caught.value.detail_code, caught.value.param) == ("text_part", "method.merge")


@pytest.mark.parametrize(
    ("code", "name"), [("missing_keys", None), ("unexpected_keys", "language_model.model.layers.7.mlp.up_proj.weight")]
)
def test_tensors_of_the_text_part_must_be_those_of_its_config(code: str, name: str | None, tmp_path: Path) -> None:
    multimodal(tmp_path, "mistral3")
    tensors = load_file(tmp_path / SINGLE)
    if name is None:
        del tensors["language_model.model.layers.1.mlp.up_proj.weight"]
    else:
        tensors[name] = torch.zeros(4, 4)
    save_file(tensors, tmp_path / SINGLE, metadata={"format": "pt"})
    with pytest.raises(Rejected) as caught:
        validate_folder(tmp_path, "x", Causal())
    assert caught.value.detail_code == code
