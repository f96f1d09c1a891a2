"""Which tensors a causal model has: those of the model that transformers builds of its config.json, without values."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from worker.training.tasks.flops import TokenFlops, of_matrices, width_of
from worker.training.tasks.layout import Layout, built_layout, not_understood

ROTARY = r"rotary_emb\.inv_freq$"
"""Files of early versions hold what is computed from config.json."""


def layout_of(config: Mapping[str, Any]) -> Layout:
    """The tensors of this model, of a multimodal one those of its text part. Raises Rejected (`bad_config`)."""
    text = text_part(config)
    if text is None:
        return _layout(json.dumps(config, sort_keys=True))
    found = _layout(json.dumps(text, sort_keys=True))
    base = found.embedding.rpartition("embed_tokens.")[0]
    own = {name.removeprefix(base).partition(".")[0] for name in found.shapes} | {"model", "lm_head"}
    return replace(
        found,
        renames={rf"^(?:model\.)?{_TEXT}\.lm_head\.": "lm_head.", rf"^(?:model\.)?{_TEXT}\.(?:model\.)?": base}
        | dict(found.renames),
        patterns=[*found.patterns, rf"^(?:model\.)?(?!(?:{'|'.join(sorted(own))})\.)[^.]+\."],
    )


# -- text part ---------------------------------------------------------------------------------------------------------
# Of a multimodal model (Gemma 3, Mistral 3, Llama 4) the part that reads and writes text is a causal model by itself.
#
# Its settings are `text_config` of config.json. Its tensors have a prefix in files; all others are those of the parts
# that see or hear, and are left out.

_TEXT = r"(?:language_model|text_model)"


def text_part(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """config.json of the text part by itself; None: the model is not multimodal, or transformers has no such part.

    Raises Rejected (`bad_config`).
    """
    own = config.get("text_config")
    if not isinstance(own, dict) or config.get("model_type") not in CONFIG_MAPPING:
        return None
    try:
        text = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config)).get_text_config()
        causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(text.model_type)
        if causal is None:
            return None
        found: dict[str, Any] = json.loads(json.dumps(text.to_dict()))
    except MemoryError:
        raise
    except Exception as error:  # whatever transformers raises on a value it did not expect
        raise not_understood(error) from None
    tied = {"tie_word_embeddings": config["tie_word_embeddings"]} if "tie_word_embeddings" in config else {}
    return found | tied | {"architectures": [causal]}


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
