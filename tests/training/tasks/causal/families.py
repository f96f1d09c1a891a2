"""A tiny real checkpoint of each family of causal models, random, with the families' own settings in small."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCABULARY = 96
_SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
    "llama": {"tie_word_embeddings": False},
    "mistral": {"sliding_window": 8},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16},
    "gemma3_text": {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16},
    "phi3": {"tie_word_embeddings": False},
    # Not in the list of the task: accepted by its architecture.
    "gpt2": {"n_positions": 128, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "gpt_neox": {"tie_word_embeddings": False},
}

OTHERS: dict[str, dict[str, Any]] = {
    "falcon": {"alibi": True},
    "llama4_text": {"attention_chunk_size": 16, "head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 48},
    "mamba": {"state_size": 8},
    "gpt_bigcode": {"n_positions": 128, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "seed_oss": {"head_dim": 8},
    "codegen": {"n_positions": 128, "n_ctx": 128, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                  "shared_expert_intermediate_size": 16},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip
"""Each does something as no other does: biases in the mask, another name of the base model, fp32 between layers, rates
of dropout that are numbers, experts in one tensor, a gate of width 1."""


def config_of(family: str, **more: Any) -> dict[str, Any]:
    """config.json."""
    config = CONFIG_MAPPING[family](**_SMALL | (FAMILIES | OTHERS).get(family, {}) | more).to_dict()
    return {key: value for key, value in config.items() if value is not None} | {"model_type": family}


def model_of(family: str, dtype: torch.dtype = torch.float64, **more: Any) -> PreTrainedModel:
    """With random weights, large enough that tokens matter."""
    config = config_of(family, **more)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        kind = CONFIG_MAPPING[family].from_dict(config)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(kind, dtype=torch.float64)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.1)
    torch.nn.Module.to(model, dtype)
    return model
