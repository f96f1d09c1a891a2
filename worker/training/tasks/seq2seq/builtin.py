"""The built-in model `builtin:t5-tiny`: FLAN-T5's shape in miniature, random weights, a tokenizer trained on the data.

Made by *prepare*, once per (data, seed), in the model store; needs no hub. The same data and seed give the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from worker.training.dataset.conversion import add_line_break

NAME = "builtin:t5-tiny"
VERSION = 2
"""Goes up whenever the same data and seed would give another model."""
VOCABULARY = 2048
"""Rows of the embedding; the tokenizer has at most as many pieces, and fewer on very little text."""
TOKENIZER_ROWS = 20_000
"""Rows that the tokenizer is learned from, at most."""
PAD, EOS, UNK = "<pad>", "</s>", "<unk>"
CONFIG: dict[str, Any] = {
    "model_type": "t5",
    "architectures": ["T5ForConditionalGeneration"],
    "is_encoder_decoder": True,
    "vocab_size": VOCABULARY,
    "d_model": 128,
    "d_kv": 32,
    "d_ff": 320,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "dropout_rate": 0.1,
    "layer_norm_epsilon": 1e-6,
    "initializer_factor": 1.0,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
    "dtype": "bfloat16",
}
_HEAD_STD = 0.02
"""Of an untied head. With T5's own 1.0 the first loss is 170; with this it is ln(vocabulary)."""


def build(folder: Path, texts: Iterable[str], seed: int, *, line_breaks: bool = False) -> None:
    """Write tokenizer, config and weights into `folder`, which exists and is empty. `line_breaks`: one of its tokens is
    the line break."""
    tokenizer = learn_tokenizer(texts, VOCABULARY - line_breaks)
    if line_breaks:
        add_line_break(tokenizer.backend_tokenizer)
    tokenizer.save_pretrained(str(folder))
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2, sort_keys=True) + "\n")
    generation = {key: CONFIG[key] for key in ("pad_token_id", "eos_token_id", "decoder_start_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2, sort_keys=True) + "\n")
    (folder / "model.safetensors").write_bytes(_random_weights(seed))


def learn_tokenizer(texts: Iterable[str], pieces: int = VOCABULARY) -> PreTrainedTokenizerFast:
    """A Unigram tokenizer in T5's manner: white space is one character, `</s>` is appended, pad 0, eos 1, unk 2. It has
    at most so many pieces."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=pieces, special_tokens=[PAD, EOS, UNK], unk_token=UNK, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer = Tokenizer.from_str(_reproducible(tokenizer.to_str()))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}", pair=f"$A {EOS} $B {EOS}", special_tokens=[(EOS, tokenizer.token_to_id(EOS))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=UNK)


def _reproducible(tokenizer: str) -> str:
    """The tokenizer (JSON) with scores and order that are the same every time.

    The trainer iterates over hash maps seeded at random: learned scores differ in their last digits, and characters
    that it adds because they occur, without having learned them, get scores 0.0001 apart above the lowest, in random
    order.
    """
    content: dict[str, Any] = json.loads(tokenizer)
    pieces: list[tuple[str, float]] = [(piece, score) for piece, score in content["model"]["vocab"]]
    special, learned = pieces[:3], pieces[3:]
    lowest = min((score for _, score in learned), default=0.0)
    added = lowest + 0.0001 * (1 + sum(len(piece) == 1 for piece, _ in learned))
    fixed = [(piece, round(lowest if len(piece) == 1 and score < added else score, 6)) for piece, score in learned]
    content["model"]["vocab"] = special + sorted(fixed, key=lambda entry: (-entry[1], entry[0]))
    return json.dumps(content, ensure_ascii=False)


def _random_weights(seed: int) -> bytes:
    """A safetensors file of bf16 weights, drawn as T5 draws them, but for the head."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = T5ForConditionalGeneration(T5Config(**CONFIG))
        # transformers 5 ties the head of every T5 that it makes: give it a tensor of its own.
        model.lm_head.weight = torch.nn.Parameter(torch.empty(VOCABULARY, CONFIG["d_model"]).normal_(std=_HEAD_STD))
    aliases = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    weights = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name not in aliases
    }
    return save(weights, metadata={"format": "pt"})
