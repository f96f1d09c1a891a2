"""Which tensors a causal model has: those of the model that transformers builds of its config.json, without values."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from worker.training.tasks.built import built_layout
from worker.training.tasks.layout import Layout

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[config["model_type"]]
    model: PreTrainedModel = AutoModelForCausalLM.from_config(kind.from_dict(dict(config)), dtype=dtype)
    return model


@functools.lru_cache(maxsize=8)
def _layout(config: str) -> Layout:
    return built_layout(json.loads(config), build, layers_of, [ROTARY])
