"""A tiny real checkpoint of each family of encoders, random, with the families' own settings in small."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from worker.training.tasks.classification import builtin, layout

VOCABULARY = 96
LABELS = ("refund", "delivery", "other")
_SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 66, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
_DISENTANGLED = {"relative_attention": True, "position_buckets": 8, "max_relative_positions": 32, "share_att_key": True,
                 "pos_att_type": ["p2c", "c2p"], "position_biased_input": False, "norm_rel_ebd": "layer_norm",
                 "pooler_hidden_size": 32}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {},
    "deberta-v2": _DISENTANGLED,
    "modernbert": {"local_attention": 8, "global_attn_every_n_layers": 2, "cls_token_id": 0, "sep_token_id": 2},
    "distilbert": {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
    "electra": {"embedding_size": 16},
    "mpnet": {},
}


def config_of(family: str, labels: tuple[str, ...] | None = LABELS, **more: Any) -> dict[str, Any]:
    """config.json: of a classifier, or without labels of a masked language model."""
    config = CONFIG_MAPPING[family](**_SMALL | FAMILIES.get(family, {}) | more).to_dict()
    config = {key: value for key, value in config.items() if value is not None} | {"model_type": family}
    if labels is None:
        for key in ("id2label", "label2id", "num_labels"):
            config.pop(key, None)
        kind: Any = AutoModelForMaskedLM._model_mapping[CONFIG_MAPPING[family]]
        return config | {"architectures": [kind.__name__]}
    return layout.adapted(config, labels, "regression" if len(labels) == 1 else "single_label_classification")


def model_of(family: str, dtype: torch.dtype = torch.float64, **more: Any) -> PreTrainedModel:
    """A classifier with random weights, large enough that tokens matter."""
    return _model(AutoModelForSequenceClassification, config_of(family, **more), dtype)


def write_pretrained(folder: Path, family: str, labels: tuple[str, ...] | None = None, **more: Any) -> Path:
    """A folder with such a checkpoint, in fp32, and a tokenizer; without labels as pretraining leaves it."""
    folder.mkdir(parents=True)
    tokenizer = builtin.learn_tokenizer(["where is my parcel, i want my money back", "a kettle that leaks"] * 3)
    tokenizer.save_pretrained(folder)
    config = config_of(family, labels, vocab_size=len(tokenizer), **more)
    kind = AutoModelForMaskedLM if labels is None else AutoModelForSequenceClassification
    model = _model(kind, config, torch.float32)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: each.clone() for name, each in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _model(kind: Any, config: dict[str, Any], dtype: torch.dtype) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        described = CONFIG_MAPPING[config["model_type"]].from_dict(config)
        model: PreTrainedModel = kind.from_config(described, dtype=torch.float64)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.1)
    torch.nn.Module.to(model, dtype)
    return model
