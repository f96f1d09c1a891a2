"""Which tensors a causal model has: those of the model that transformers builds of its config.json, without values."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jobs.errors import Rejected
from worker.training.tasks.layout import Layout

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROTARY = r"rotary_emb\.inv_freq$"
"""Files of early versions hold what is computed from config.json."""
_MOST_LAYERS = 1000
_POSITIONS = re.compile(r"\.(?:wpe|embed_positions|positions_embed)\.weight$")
"""Embeddings of places, as in GPT-2 and OPT."""


def layout_of(config: Mapping[str, Any]) -> Layout:
    """The tensors of this model. Raises Rejected (`bad_config`)."""
    return _layout(json.dumps(config, sort_keys=True))


def layers_of(config: Mapping[str, Any]) -> int:
    """How many layers the model has."""
    found = next((config[key] for key in ("num_hidden_layers", "n_layer", "num_layers") if key in config), None)
    if not isinstance(found, int):
        raise ValueError("it does not say how many layers the model has")
    return found


def positions_of(config: Mapping[str, Any]) -> int | None:
    """Tokens of a row at most, where the model has an embedding for each place; None: any number."""
    found = [shape[0] for name, shape in layout_of(config).shapes.items() if _POSITIONS.search(name)]
    named = [config[key] for key in ("max_position_embeddings", "n_positions") if isinstance(config.get(key), int)]
    return min(found + named) if found else None  # OPT has two embeddings more than places


def build(config: Mapping[str, Any], dtype: Any) -> PreTrainedModel:
    """The model that config.json describes, on the device in use. Raises whatever transformers does."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[config["model_type"]]
    model: PreTrainedModel = AutoModelForCausalLM.from_config(kind.from_dict(dict(config)), dtype=dtype)
    return model


@functools.lru_cache(maxsize=8)
def _layout(config: str) -> Layout:
    import torch

    try:
        if layers_of(json.loads(config)) > _MOST_LAYERS:
            raise ValueError(f"no model has more than {_MOST_LAYERS} layers")
        with torch.device("meta"):
            model = build(json.loads(config), torch.bfloat16)
        head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    except MemoryError:
        raise
    except Exception as error:  # whatever transformers raises on a value it did not expect
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
        raise Rejected(
            f"model: config.json cannot be understood: {reason}", code="bad_config", param="model",
            hint="take the original file",
        ) from None  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {}
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
        if len(names[id(tensor)]) == 1:
            shapes[name] = tuple(tensor.shape)
    return Layout(
        shapes,
        head=names[id(head)][-1],
        embedding=names[id(embedding)][0],
        patterns=(*(model._keys_to_ignore_on_load_unexpected or ()), ROTARY),
        prefix=f"{model.base_model_prefix}.",
    )
