"""A tiny real checkpoint of each family of encoder-decoders, random, with the families' own settings in small."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from worker.training.tasks.seq2seq.layout import build

VOCABULARY = 96
_T5 = {
    "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2,
    "num_heads": 4, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "pad_token_id": 0,
    "eos_token_id": 1, "decoder_start_token_id": 0,
}  # fmt: skip
_BART = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 40, "max_position_embeddings": 64,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "t5": _T5,
    "mt5": _T5,
    "bart": {**_BART, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2},
    "pegasus": {**_BART, "scale_embedding": True, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0},
    # Not in the list of the task: accepted by their architecture.
    "umt5": _T5,
    "marian": {**_BART, "pad_token_id": 95, "eos_token_id": 0, "decoder_start_token_id": 95},
    "mvp": {**_BART, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2},
}  # fmt: skip


def config_of(family: str, **more: Any) -> dict[str, Any]:
    """config.json."""
    given = FAMILIES[family] | more
    config = CONFIG_MAPPING[family](**given).to_dict() | given
    return {key: value for key, value in config.items() if value is not None} | {"model_type": family}


def model_of(family: str, dtype: torch.dtype = torch.float64, **more: Any) -> PreTrainedModel:
    """With random weights, large enough that tokens matter; buffers of logits are random, too."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build(config_of(family, **more), torch.float64)
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if tensor.ndim > 1 and "embed_positions" not in name:
                    tensor.normal_(std=0.1)
    torch.nn.Module.to(model, dtype)
    return model
