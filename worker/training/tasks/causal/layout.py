"""Which tensors a causal model has: those of the model that transformers builds of its config.json, without values."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from worker.training.tasks.flops import TokenFlops, of_matrices, width_of
from worker.training.tasks.layout import Layout, built_layout

ROTARY = r"rotary_emb\.inv_freq$"
"""Files of early versions hold what is computed from config.json."""


def layout_of(config: Mapping[str, Any]) -> Layout:
    """The tensors of this model. Raises Rejected (`bad_config`)."""
    return _layout(json.dumps(config, sort_keys=True))


def layers_of(config: Mapping[str, Any]) -> int:
    """How many layers the model has."""
    found = next((config[key] for key in ("num_hidden_layers", "n_layer", "num_layers") if key in config), None)
    if not isinstance(found, int):
        raise ValueError("it does not say how many layers the model has")
    return found


def build(config: Mapping[str, Any], dtype: Any) -> PreTrainedModel:
    """The model that config.json describes, on the device in use. Raises whatever transformers does."""
    kind = CONFIG_MAPPING[config["model_type"]]
    model: PreTrainedModel = AutoModelForCausalLM.from_config(kind.from_dict(dict(config)), dtype=dtype)
    return model


@functools.lru_cache(maxsize=8)
def _layout(config: str) -> Layout:
    return built_layout(json.loads(config), build, layers_of, [ROTARY])


# -- flops -------------------------------------------------------------------------------------------------------------
# FLOPs of a causal model for rows of given lengths: of its matrix products, a multiplication and an addition each one.
#
# An [m, k] x [k, n] product is 2·m·n·k. Of attention scores and values only those count that the causal mask leaves:
# half of all pairs of positions. The head counts for the tokens that are learned, for which alone it is computed.
# Backward is twice forward. Embedding, softmax, norms, activations, optimizer and padding are not counted (see the
# FLOPs of T5).


@dataclass(frozen=True)
class CausalFlops(TokenFlops):
    """`input` are the tokens of a row, `target` those of them that are learned."""

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> CausalFlops:
        """Of a whole model. Raises Rejected (`bad_config`)."""
        layout = layout_of(config)
        head = layout.shapes[layout.embedding if layout.tied else layout.head]
        return cls._of_layers(config, 1, float(2 * head[0] * head[1]))

    @classmethod
    def recomputed(cls, config: Mapping[str, Any], every: int) -> CausalFlops:
        """Of the layers whose activations are recomputed: every n-th; 0: none."""
        return cls._of_layers(config, every, 0.0) if every else cls(0.0, 0.0)

    @classmethod
    def _of_layers(cls, config: Mapping[str, Any], every: int, head: float) -> CausalFlops:
        """Of the matrices in every n-th layer."""
        per_input = of_matrices(layout_of(config).shapes, every, _experts_seen(config))
        layers = -(-layers_of(config) // every)
        return cls(per_input, head, input_pairs=2.0 * _attention_width(config) * layers)


def _experts_seen(config: Mapping[str, Any]) -> int:
    """How many experts of a layer a token goes through, in a mixture of experts."""
    return int(getattr(CONFIG_MAPPING[config["model_type"]].from_dict(dict(config)), "num_experts_per_tok", None) or 1)


def _attention_width(config: Mapping[str, Any]) -> int:
    """Numbers of a position in all heads of a layer's attention."""
    heads, each = config.get("num_attention_heads"), config.get("head_dim")
    return int(heads) * int(each) if heads and each else width_of(config)
