"""The built-in model `builtin:roberta-tiny`: RoBERTa's shape in miniature, random, its tokenizer trained on the data.

Made by *prepare*, once per (data, labels, seed), in the model store; needs no hub. The same give the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from worker.training.tasks.classification.layout import build as build_model

NAME = "builtin:roberta-tiny"
VERSION = 1
"""Goes up whenever the same data and seed would give another model."""
VOCABULARY = 4096
"""Rows of the embedding; the tokenizer has at most as many pieces, and fewer on very little text."""
TOKENIZER_ROWS = 20_000
"""Rows that the tokenizer is learned from, at most."""
START, PAD, END, UNKNOWN = "<s>", "<pad>", "</s>", "<unk>"
CONFIG: dict[str, Any] = {
    "model_type": "roberta",
    "architectures": ["RobertaForMaskedLM"],
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "max_position_embeddings": 514,
    "type_vocab_size": 1,
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}


def write(
    config: Mapping[str, Any],
    folder: Path,
    texts: Iterable[str],
    seed: int,
    begin: Callable[[Mapping[str, torch.Tensor]], object] = lambda tensors: None,
) -> None:
    """Write tokenizer, config and weights into `folder`, which exists and is empty. `config`: with labels. `begin`: may
    change first values in place."""
    learn_tokenizer(texts).save_pretrained(str(folder))
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (folder / "model.safetensors").write_bytes(_random_weights(config, seed, begin))


def learn_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer in RoBERTa's manner: no character is unknown."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[START, PAD, END, UNKNOWN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.RobertaProcessing((END, 2), (START, 0), add_prefix_space=True)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=START,
        cls_token=START,
        eos_token=END,
        sep_token=END,
        pad_token=PAD,
        unk_token=UNKNOWN,
        model_input_names=["input_ids", "attention_mask"],
    )


def _random_weights(
    config: Mapping[str, Any], seed: int, begin: Callable[[Mapping[str, torch.Tensor]], object]
) -> bytes:
    """A safetensors file of bf16 weights, drawn as RoBERTa draws them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build_model(config, torch.float32)
    begin({name: tensor.detach() for name, tensor in model.named_parameters()})
    weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    return save(weights, metadata={"format": "pt"})
