"""Which tensors a model has: those of the model that transformers builds of its config.json, without values."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from jobs.errors import Rejected
from worker.training.tasks.layout import Layout

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightTransform

_MOST_LAYERS = 1000
_TABLE = "embed_positions"
_POSITIONS = re.compile(rf"\.(?:wpe|{_TABLE}|positions_embed)\.weight$")
"""Embeddings of places, as in GPT-2, OPT and BART."""


def built_layout(
    config: Mapping[str, Any],
    build: Callable[[Mapping[str, Any], Any], PreTrainedModel],
    layers: Callable[[Mapping[str, Any]], int],
    patterns: Collection[str] = (),
) -> Layout:
    """The tensors of the model that `build` makes of a config.json and a dtype.

    `layers`: how many the config says. `patterns`: what files of early versions hold besides, as in `Layout`.

    Raises Rejected (`bad_config`).
    """
    import torch
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    try:
        if layers(config) > _MOST_LAYERS:
            raise ValueError(f"no model has more than {_MOST_LAYERS} layers")
        with torch.device("meta"):
            model = build(config, torch.bfloat16)
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
    first, *others = names[id(embedding)]
    own_head = names[id(head)][-1]
    by_itself = model._keys_to_ignore_on_load_missing or ()
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    tables = [getattr(module, _TABLE, None) for module in model.modules()]
    return Layout(
        shapes,
        head=own_head,
        embedding=first,
        aliases=[name for name in others if name != own_head],
        patterns=(*(model._keys_to_ignore_on_load_unexpected or ()), *patterns),
        places=min((len(each) for each in tables if isinstance(each, torch.Tensor)), default=None),
        prefix=f"{model.base_model_prefix}.",
        renames={
            old: each.target_patterns[0] for each in conversions if _renames(each) for old in each.source_patterns
        },
        merged_on_load=[
            old for each in conversions if isinstance(each, WeightConverter) for old in each.source_patterns
        ],
        optional=frozenset(name for name in shapes if any(re.search(each, name) for each in by_itself)),
    )


def _renames(conversion: WeightTransform) -> bool:
    """Whether it does nothing but to write other names, wherever they stand."""
    return type(conversion).__name__ == "WeightRenaming" and conversion.scope_prefix is None


def positions_of(config: Mapping[str, Any], layout: Layout) -> int | None:
    """Tokens of a row at most, where the model has a table of places; None: any number."""
    found = [shape[0] for name, shape in layout.shapes.items() if _POSITIONS.search(name)]
    found += [layout.places] if layout.places is not None else []
    named = [config[key] for key in ("max_position_embeddings", "n_positions") if isinstance(config.get(key), int)]
    return min(found + named) if found else None  # OPT and BART have two embeddings more than places
