"""The built-in model `builtin:qwen-tiny`: Qwen2's shape in miniature, random weights, a tokenizer trained on the data.

Made by *prepare*, once per (data, seed), in the model store; needs no hub. The same data and seed give the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from worker.training.tasks.causal.chat import ChatFormat

NAME = "builtin:qwen-tiny"
VERSION = 1
"""Goes up whenever the same data and seed would give another model."""
VOCABULARY = 2048
"""Rows of the embedding; the tokenizer has at most as many pieces, and fewer on very little text."""
TOKENIZER_ROWS = 20_000
"""Rows that the tokenizer is learned from, at most."""
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHAT = ChatFormat(CHAT_TEMPLATE, {"pad_token": PAD, "eos_token": END}, (END, PAD), (PAD, START, END))
CONFIG: dict[str, Any] = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "attention_dropout": 0.0,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}


def build(folder: Path, texts: Iterable[str], seed: int) -> None:
    """Write tokenizer, config and weights into `folder`, which exists and is empty."""
    learn_tokenizer(texts).save_pretrained(str(folder))
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2, sort_keys=True) + "\n")
    generation = {"pad_token_id": 0, "eos_token_id": [2, 0]}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2, sort_keys=True) + "\n")
    (folder / "model.safetensors").write_bytes(_random_weights(seed))


def learn_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer in Qwen's manner, with its chat format: no character is unknown."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["user\n", "assistant\n", "system\n", *texts], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, chat_template=CHAT_TEMPLATE
    )


def _random_weights(seed: int) -> bytes:
    """A safetensors file of bf16 weights, drawn as Qwen2 draws them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(Qwen2Config(**CONFIG))
    weights = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # it is the embedding
    }
    return save(weights, metadata={"format": "pt"})
