"""Models as they lie on the hub: files and names of their repositories, tiny and random, from a job to its result."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedModel,
)

from jobs.errors import Rejected
from tests.training.attempts import attempt, trained
from tests.training.dataset.test_conversion import DEBERTA, LLAMA, T5, byte_level, pieces, wordpiece
from tests.training.hub_server import NAME, Hub, running_hub
from tests.training.workplace import Workplace, pairs

__all__ = ["pieces"]  # a fixture
_SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_BERT = {**_SMALL, "max_position_embeddings": 130, "pad_token_id": 0}
_ROBERTA = {**_SMALL, "max_position_embeddings": 130, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
_LLAMA = {**_SMALL, "num_key_value_heads": 2, "tie_word_embeddings": False, "max_position_embeddings": 512}
_MT5 = {
    "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
    "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "pad_token_id": 0, "eos_token_id": 1,
    "decoder_start_token_id": 0, "tokenizer_class": "T5Tokenizer", "model_type": "mt5",
    "architectures": ["MT5ForConditionalGeneration"],
}  # fmt: skip
_BART = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": 2,
    "forced_bos_token_id": 0, "num_beams": 4, "no_repeat_ngram_size": 3, "early_stopping": True, "min_length": 3,
}  # fmt: skip


class Repository:
    """A folder, as the hub would serve it."""

    def __init__(self, folder: Path, train: Any) -> None:
        self.folder, self._train = folder, train

    def write(self, **files: Any) -> None:
        """Names have `__` for a dot; JSON, text or bytes."""
        for name, content in files.items():
            data = json.dumps(content) if isinstance(content, dict) else content
            (self.folder / name.replace("__", ".")).write_bytes(data.encode() if isinstance(data, str) else data)

    def model(self, kind: Any, config: dict[str, Any], vocabulary: int) -> tuple[PreTrainedModel, dict[str, Any]]:
        """A random one in fp32, and its tensors as its names have them; config.json is written."""
        config = {**config, "vocab_size": vocabulary}
        self.write(config__json=config)
        torch.manual_seed(0)
        model = kind.from_config(AutoConfig.from_pretrained(self.folder))
        return model, {name: tensor.clone() for name, tensor in model.state_dict().items()}


def deberta_v3(repository: Repository) -> None:
    """microsoft/deberta-v3-base: pytorch_model.bin and spm.model, neither tokenizer.json nor safetensors."""
    repository.write(
        spm__model=repository._train(**DEBERTA), tokenizer_config__json={"do_lower_case": False, "vocab_type": "spm"}
    )
    config = {
        **_BERT, "model_type": "deberta-v2", "relative_attention": True, "position_buckets": 8, "share_att_key": True,
        "max_relative_positions": -1, "pos_att_type": "p2c|c2p", "position_biased_input": False,
        "norm_rel_ebd": "layer_norm", "type_vocab_size": 0, "pooler_hidden_size": 32,
    }  # fmt: skip
    _, tensors = repository.model(AutoModelForMaskedLM, config, 400)
    tensors["deberta.embeddings.position_embeddings.weight"] = torch.zeros(130, 32)
    tensors["mask_predictions.dense.weight"] = torch.zeros(32, 32)
    tensors = {name: each for name, each in tensors.items() if "position_embeddings" not in name}
    torch.save(tensors, repository.folder / "pytorch_model.bin")


def bert(repository: Repository) -> None:
    """An old fine-tune of bert-base-uncased: vocab.txt alone, names and file as before torch 1.6."""
    repository.write(**{name.replace(".", "__"): content for name, content in wordpiece().items()})
    _, tensors = repository.model(
        AutoModelForMaskedLM, {**_BERT, "model_type": "bert", "architectures": ["BertForMaskedLM"]}, 200
    )
    tensors = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): each
        for name, each in tensors.items()
    }
    tensors["bert.embeddings.position_ids"] = torch.arange(130)[None]
    torch.save(tensors, repository.folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def roberta(repository: Repository) -> None:
    """roberta-base without its tokenizer.json: vocab.json and merges.txt."""
    files = byte_level()
    repository.write(vocab__json=files["vocab.json"], merges__txt=files["merges.txt"])
    config = {**_ROBERTA, "model_type": "roberta", "architectures": ["RobertaForMaskedLM"], "type_vocab_size": 1}
    _, tensors = repository.model(AutoModelForMaskedLM, config, 400)
    save_file(tensors_once(tensors), repository.folder / "model.safetensors", metadata={"format": "pt"})


def modernbert(repository: Repository) -> None:
    """answerdotai/ModernBERT-base: tokenizer.json and safetensors."""
    _fast(repository, wordpiece())
    config = {
        **_BERT, "model_type": "modernbert", "architectures": ["ModernBertForMaskedLM"], "local_attention": 8,
        "global_attn_every_n_layers": 2, "cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3,
    }  # fmt: skip
    _, tensors = repository.model(AutoModelForMaskedLM, config, 200)
    save_file(tensors_once(tensors), repository.folder / "model.safetensors", metadata={"format": "pt"})


def mt5(repository: Repository) -> None:
    """google/mt5-base: pytorch_model.bin and spiece.model; every name of the embedding is in the file."""
    repository.write(
        spiece__model=repository._train(**T5),
        tokenizer_config__json={
            "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>", "extra_ids": 0,
            "additional_special_tokens": None, "sp_model_kwargs": {}, "tokenizer_class": "T5Tokenizer",
        },
        special_tokens_map__json={"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
    )  # fmt: skip
    _, tensors = repository.model(AutoModelForSeq2SeqLM, _MT5, 320)
    tensors["lm_head.weight"] = torch.randn(320, 32) * 0.05
    tensors["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = torch.zeros(32, 4)
    torch.save(tensors, repository.folder / "pytorch_model.bin")


def bart(repository: Repository) -> None:
    """facebook/bart-base: vocab.json, merges.txt, and the tensors of a model without a head."""
    files = byte_level()
    repository.write(vocab__json=files["vocab.json"], merges__txt=files["merges.txt"])
    _, tensors = repository.model(
        AutoModelForSeq2SeqLM, {**_BART, "model_type": "bart", "architectures": ["BartModel"]}, 400
    )
    named = {name.removeprefix("model."): each for name, each in tensors.items() if name.startswith("model.")}
    save_file(named, repository.folder / "model.safetensors", metadata={"format": "pt"})


def gpt2(repository: Repository) -> None:
    """gpt2: every kind of tokenizer file; masks as buffers in the weights; names without `transformer.`."""
    files = byte_level()
    repository.write(
        vocab__json=files["vocab.json"],
        merges__txt=files["merges.txt"],
        tokenizer_config__json={"model_max_length": 128},
    )
    config = {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_positions": 128, "n_embd": 32, "n_layer": 2,
        "n_head": 4, "bos_token_id": 4, "eos_token_id": 4,
    }  # fmt: skip
    _, tensors = repository.model(AutoModelForCausalLM, config, 400)
    named = {name.removeprefix("transformer."): each for name, each in tensors.items() if name != "lm_head.weight"}
    for layer in range(2):
        named[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 128, 128)
    save_file(named, repository.folder / "model.safetensors", metadata={"format": "pt"})


def llama(repository: Repository) -> None:
    """A Llama of before: tokenizer.model, and shards of pytorch_model.bin."""
    repository.write(
        tokenizer__model=repository._train(**LLAMA),
        tokenizer_config__json={
            "tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
            "add_bos_token": True, "add_eos_token": False, "legacy": False,
        },
    )  # fmt: skip
    config = {
        **_LLAMA,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    _, tensors = repository.model(AutoModelForCausalLM, config, 520)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    shards = {f"pytorch_model-0000{n + 1}-of-00002.bin": sorted(tensors)[n::2] for n in range(2)}
    for file, names in shards.items():
        torch.save({name: tensors[name] for name in names}, repository.folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, names in shards.items() for name in names}}
    (repository.folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def phi3(repository: Repository) -> None:
    """microsoft/Phi-3-mini-4k-instruct: code of its own beside that of transformers; shards of safetensors."""
    _fast(repository, byte_level())
    config = {
        **_LLAMA, "model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "pad_token_id": 1, "bos_token_id": 0,
        "eos_token_id": 2, "auto_map": {
            "AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
        },
    }  # fmt: skip
    _, tensors = repository.model(AutoModelForCausalLM, config, 400)
    repository.write(
        modeling_phi3__py="raise SystemExit('this code must not run')", configuration_phi3__py="raise SystemExit"
    )
    shards = {f"model-0000{n + 1}-of-00002.safetensors": sorted(tensors)[n::2] for n in range(2)}
    for file, names in shards.items():
        save_file({name: tensors[name] for name in names}, repository.folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, names in shards.items() for name in names}}
    (repository.folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _fast(repository: Repository, files: dict[str, Any]) -> None:
    """A tokenizer.json, and what it was made from beside it."""
    repository.write(**{name.replace(".", "__"): content for name, content in files.items()})
    repository.write(config__json={"model_type": "bert" if "vocab.txt" in files else "roberta"})
    AutoTokenizer.from_pretrained(repository.folder).save_pretrained(repository.folder)


def tensors_once(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without heads that are the embedding."""
    return {name: each for name, each in tensors.items() if name not in ("lm_head.decoder.weight", "decoder.weight")}


LAYOUTS = {
    "deberta-v3-base": (deberta_v3, "classification"),
    "bert, vocab.txt alone": (bert, "classification"),
    "roberta-base": (roberta, "classification"),
    "ModernBERT-base": (modernbert, "classification"),
    "mt5-base": (mt5, "seq2seq"),
    "bart-base": (bart, "seq2seq"),
    "gpt2": (gpt2, "causal"),
    "llama": (llama, "causal"),
    "Phi-3": (phi3, "causal"),
}
LIMITS = {
    "classification": {"max_input_tokens": 40},
    "seq2seq": {"max_input_tokens": 60, "max_target_tokens": 60},
    "causal": {"max_tokens": 100},
}


@pytest.fixture
def own_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running_hub(monkeypatch) as server:
        yield server


@pytest.mark.parametrize(("layout", "task"), LAYOUTS.values(), ids=LAYOUTS)
def test_a_repository_of_the_hub_is_trained_and_its_result_opens(
    tmp_path: Path, own_hub: Hub, pieces: Any, layout: Any, task: str
) -> None:
    folder = tmp_path / "hub"
    folder.mkdir()
    layout(Repository(folder, pieces))
    own_hub.repositories[f"models/{NAME}"] = folder
    place = Workplace(tmp_path / "place", offline=False)
    rows: list[dict[str, Any]] = pairs(40)
    if task == "classification":
        rows = [{"text": row["input"], "label": ("bread", "cake")[n % 2]} for n, row in enumerate(rows)]
    place.rows("rows.jsonl", rows)
    run = place.job(
        model=NAME, data={"validation": 0.2, **LIMITS[task]},
        training={"epochs": 1, "batch_size": 8, "learning_rate": 1e-3}, memory={"micro_batch": 4},
        evaluation={"every_steps": 4, "samples": 1, "sample_tokens": 8},
    )  # fmt: skip
    assert place.check(run)["plan"]["task"] == task
    place.prepare_only(run)
    attempt(run)
    assert trained(run).loss is not None
    assert not any(name.endswith(".py") for name in own_hub.fetched), "no code is fetched"
    for opened in (Path(str(run.plan().model.folder)), run.model):
        assert (opened / "tokenizer.json").exists() and (opened / "model.safetensors").exists()
    config = json.loads((run.model / "config.json").read_text())
    assert "auto_map" not in config
    original, result = (AutoTokenizer.from_pretrained(one) for one in (folder, run.model))
    for row in rows[:5]:
        text = str(next(iter(row.values())))
        assert result(text)["input_ids"] == original(text)["input_ids"]
    kind: Any = {"seq2seq": AutoModelForSeq2SeqLM, "causal": AutoModelForCausalLM}.get(task)
    if kind is not None:
        _, info = kind.from_pretrained(run.model, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]


def test_rows_whose_tokens_would_be_others_are_refused_at_check(tmp_path: Path, own_hub: Hub, pieces: Any) -> None:
    folder = tmp_path / "hub"
    folder.mkdir()
    mt5(Repository(folder, pieces))
    own_hub.repositories[f"models/{NAME}"] = folder
    place = Workplace(tmp_path / "place", offline=False)
    place.rows("rows.jsonl", [*pairs(30), {"input": "cre\u0300\u0301me", "target": "cream"}])
    with pytest.raises(Rejected, match="makes other tokens") as caught:
        place.check(place.job(model=NAME, data={"normalize": False}))
    assert (caught.value.detail_code, caught.value.param) == ("tokenizer_conversion", "model")
