"""Loading once and writing a folder that opens again, with the truth in its config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, T5Config
from transformers.models.t5.modeling_t5 import T5Attention, T5ForConditionalGeneration

from tests.training.conftest import CONFIG
from worker.training.adapters.method import BaseModel
from worker.training.checkpoints.tensorfile import write_tensors
from worker.training.network.model import LoadedModel, load, write_model
from worker.training.tasks.seq2seq.task import Seq2Seq

CPU = torch.device("cpu")


def write(loaded: LoadedModel, target: Path, **facts: Any) -> None:
    generation = {"max_new_tokens": 9, "decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    facts = {"generation": generation, "readme": "# Job\n", "base": BaseModel("x"), **facts}
    write_model(loaded, target, {".": (loaded.method, lambda file: write_tensors(file, loaded.weights))}, **facts)


@pytest.mark.parametrize("tied", [False, True])
def test_what_is_written_opens_again_with_every_tensor(model_folder: Path, tmp_path: Path, tied: bool) -> None:
    if tied:
        T5ForConditionalGeneration(T5Config(**CONFIG | {"tie_word_embeddings": True})).save_pretrained(model_folder)
    loaded = load(model_folder, CPU, task=Seq2Seq(), dropout=0.3, fused=True, activation_checkpointing=2)
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.mul_(1.5)
    write(loaded, tmp_path / "out")

    folder = tmp_path / "out"
    again, info = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not any(info.values())
    old, new = loaded.model.state_dict(), again.state_dict()
    assert old.keys() == new.keys()
    assert all(torch.equal(old[name], new[name]) and new[name].dtype == torch.bfloat16 for name in old)
    assert (again.lm_head.weight is again.shared.weight) is tied
    config = json.loads((folder / "config.json").read_text())
    assert config["tie_word_embeddings"] is tied
    assert again.config.scale_decoder_outputs is tied
    assert (config["dropout_rate"], config["dtype"]) == (0.1, "bfloat16")
    assert "gelu_pytorch_tanh" not in json.dumps(config)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert ("lm_head.weight" in file.keys()) is not tied  # noqa: SIM118 - safe_open is no dict

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("w1 w2 w3", return_tensors="pt").input_ids
    assert again.generate(ids, max_new_tokens=4).shape[0] == 1
    assert again.generation_config.max_new_tokens == 9
    assert (folder / "README.md").read_text() == "# Job\n"


def test_an_older_model_is_replaced_whole(model_folder: Path, tmp_path: Path) -> None:
    loaded = load(model_folder, CPU, task=Seq2Seq(), dropout=None, fused=False, activation_checkpointing=0)
    target = tmp_path / "out"
    write(loaded, target)
    (target / "stale").touch()
    write(loaded, target, readme="# Another\n")
    assert not (target / "stale").exists()
    assert (target / "README.md").read_text() == "# Another\n"
    assert [path.name for path in tmp_path.glob("tmp-*")] == []


def test_dropout_is_set_wherever_there_is_some(model_folder: Path) -> None:
    def rates(dropout: float | None) -> set[float]:
        model = load(model_folder, CPU, task=Seq2Seq(), dropout=dropout, fused=True, activation_checkpointing=0).model
        modules = {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)}
        return modules | {module.dropout for module in model.modules() if isinstance(module, T5Attention)}

    assert rates(None) == {0.1}
    assert rates(0.0) == {0.0}


def test_nothing_is_held_twice_while_loading(tmp_path: Path, model_folder: Path) -> None:
    big = CONFIG | {"vocab_size": 32_000, "d_model": 512, "d_ff": 2048, "d_kv": 64}
    model = T5ForConditionalGeneration(T5Config(**big))
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    model.bfloat16().save_pretrained(model_folder)
    del model
    loaded = load(model_folder, CPU, task=Seq2Seq(), dropout=None, fused=True, activation_checkpointing=0)
    assert loaded.parameters == sum(parameter.numel() for parameter in loaded.model.parameters())
    assert loaded.parameter_bytes == 2 * loaded.parameters
    assert 0.9 < loaded.peak_ratio < 1.3  # some MB of the interpreter's own on 90 MB of weights
