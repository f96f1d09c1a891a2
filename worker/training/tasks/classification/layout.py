"""Which tensors a classifier has, which of them a pretrained encoder lacks, and the values with which those begin."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from jobs.errors import Rejected
from worker.training.steps.shape import Lengths
from worker.training.tasks.flops import TokenFlops, of_matrices, width_of
from worker.training.tasks.layout import Layout, within

CLASSIFIER = "ForSequenceClassification"
PRETRAINING = (
    r"^(lm_head|cls|decoder|head|vocab_transform|vocab_layer_norm|vocab_projector|lm_predictions|mask_predictions)\.",
    r"^(generator_predictions|generator_lm_head|discriminator_predictions|deberta\.embeddings\.mask_)",
    r"(^|\.)pooler\.",
    r"(^|\.)(position_ids|token_type_ids)$",
)
"""Heads for other purposes, a pooler that the classifier does not ask, and what is computed from config.json."""
RENAMES = {r"\.gamma$": ".weight", r"\.beta$": ".bias"}
"""As norms were called when TensorFlow wrote them."""
_MOST_LAYERS = 1000
_POSITIONS = "embeddings.position_embeddings.weight"
_TOKEN_TYPES = "embeddings.token_type_embeddings.weight"
_COUNTED_FROM_PADDING = frozenset({"roberta", "xlm-roberta", "camembert", "mpnet", "xlm-roberta-xl"})
"""`model_type` of families whose first place has the number behind that of padding."""


def is_classifier(config: Mapping[str, Any]) -> bool:
    """Whether the model of this config.json has a head for labels already."""
    return any(str(name).endswith(CLASSIFIER) for name in config.get("architectures") or [])


def labels_of(config: Mapping[str, Any]) -> list[str]:
    """The labels that config.json names, by number. Raises Rejected (`bad_config`)."""
    named = config.get("id2label") or {}
    try:
        by_number = {int(number): str(label) for number, label in named.items()}
        return [by_number[number] for number in range(len(by_number))]
    except (AttributeError, TypeError, ValueError, KeyError):
        raise _bad(f"id2label does not number labels from 0: {json.dumps(named)[:100]}") from None


def adapted(config: Mapping[str, Any], labels: Sequence[str], problem_type: str) -> dict[str, Any]:
    """The config.json of a classifier with these labels. `problem_type`: as transformers names what it learns."""
    name = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(str(config.get("model_type")))
    if name is None:
        raise _bad(f"transformers has no classifier of type {config.get('model_type')!r}")
    return {
        **config,
        "architectures": [name],
        "id2label": {str(number): label for number, label in enumerate(labels)},
        "label2id": {label: number for number, label in enumerate(labels)},
        "num_labels": len(labels),
        "problem_type": problem_type,
    }


def layout_of(config: Mapping[str, Any]) -> Layout:
    """The tensors of this model. Raises Rejected (`bad_config`)."""
    return _layout(json.dumps(config, sort_keys=True))


def layers_of(config: Mapping[str, Any]) -> int:
    """How many layers the model has."""
    found = next((config[key] for key in ("num_hidden_layers", "n_layers", "num_layers") if key in config), None)
    if not isinstance(found, int):
        raise ValueError("it does not say how many layers the model has")
    return found


def positions_of(config: Mapping[str, Any]) -> int | None:
    """Tokens of a text at most, where the model has an embedding for each place; None: any number."""
    found = [shape[0] for name, shape in layout_of(config).shapes.items() if name.endswith(_POSITIONS)]
    if not found:
        return None
    before = int(config.get("pad_token_id", 1)) + 1 if config.get("model_type") in _COUNTED_FROM_PADDING else 0
    return found[0] - before


def token_types_of(config: Mapping[str, Any]) -> int:
    """Types that a token may have, by the model's embedding of them; 0: it has none. Raises Rejected (`bad_config`)."""
    shapes = layout_of(config).shapes
    return max((shape[0] for name, shape in shapes.items() if name.endswith(_TOKEN_TYPES)), default=0)


def build(config: Mapping[str, Any], dtype: Any) -> PreTrainedModel:
    """The model that config.json describes, on the device in use. Raises whatever transformers does."""
    kind = CONFIG_MAPPING[config["model_type"]]
    model: PreTrainedModel = AutoModelForSequenceClassification.from_config(kind.from_dict(dict(config)), dtype=dtype)
    return model


def initialized(config: Mapping[str, Any], names: Collection[str], seed: int) -> dict[str, torch.Tensor]:
    """New values for these tensors, in fp32, drawn as transformers draws them; nothing else of the model is made."""
    with torch.device("meta"):
        model = build(config, torch.float32)
    for name in names:
        module, _, tensor = name.rpartition(".")
        empty = torch.zeros(model.get_parameter(name).shape, dtype=torch.float32, device="cpu")
        setattr(model.get_submodule(module), tensor, torch.nn.Parameter(empty))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model.apply(model._init_weights)  # without effect on what is on the device "meta"
    return {name: model.get_parameter(name).detach() for name in sorted(names)}


@functools.lru_cache(maxsize=8)
def _layout(text: str) -> Layout:
    config = json.loads(text)
    try:
        if layers_of(config) > _MOST_LAYERS:
            raise ValueError(f"no model has more than {_MOST_LAYERS} layers")
        with torch.device("meta"):
            model = build(config, torch.bfloat16)
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        prefix = f"{model.base_model_prefix}."
        outside = [name for name in shapes if not _of_body(name, prefix)]
        head = [name for name in outside if len(shapes[name]) == 2][-1]
        embedding = next(
            f"{name}.weight" for name, module in model.named_modules() if module is model.get_input_embeddings()
        )
    except MemoryError:
        raise
    except Exception as error:  # whatever transformers raises on a value it did not expect
        raise _bad(f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]) from None
    groups: dict[str, set[str]] = {}
    for name in outside:
        parts = re.fullmatch(rf"({re.escape(prefix)})?(\w+)\..*", name)
        groups.setdefault(name if parts is None else f"{parts[1] or ''}{parts[2]}", set()).add(name)
    is_pretrained = not is_classifier(config)
    return Layout(
        shapes,
        head=head,
        embedding=embedding,
        patterns=(*(model._keys_to_ignore_on_load_unexpected or ()), *(PRETRAINING if is_pretrained else ())),
        new=tuple(frozenset(group) for group in groups.values()) if is_pretrained else (),
        head_modules=tuple(groups),
        prefix=prefix,
        renames=RENAMES,
    )


def _of_body(name: str, prefix: str) -> bool:
    return name.startswith(prefix) and not name.startswith(f"{prefix}pooler.")


def _bad(reason: str) -> Rejected:
    return Rejected(
        f"model: config.json cannot be understood: {reason}", code="bad_config", param="model",
        hint="take the original file",
    )  # fmt: skip


# -- flops -------------------------------------------------------------------------------------------------------------
# FLOPs of a classifier for rows of given lengths: of its matrix products, a multiplication and an addition each one.
#
# Backward is twice forward. Every token attends to all of its row, also in layers of ModernBERT that look at a window:
# with a mask the kernel multiplies all. DeBERTa's scores by position come on top of those by content. Embedding,
# softmax, norms, activations, optimizer and padding are not counted.


@dataclass(frozen=True)
class ClassFlops(TokenFlops):
    """`input` are the tokens of a row; of its labels only that they are asked for, once a row."""

    per_row: float = 0.0

    def forward(self, input_lengths: Lengths, target_lengths: Lengths) -> float:
        """One forward pass over these rows."""
        return super().forward(input_lengths, np.zeros_like(input_lengths)) + self.per_row * len(input_lengths)

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> ClassFlops:
        """Of a whole model. Raises Rejected (`bad_config`)."""
        layout = layout_of(config)
        of_head = (shape for name, shape in layout.shapes.items() if within(name, layout.head_modules))
        head = sum(2.0 * shape[0] * shape[1] for shape in of_head if len(shape) == 2)
        return cls._of_layers(config, 1, float(head))

    @classmethod
    def recomputed(cls, config: Mapping[str, Any], every: int) -> ClassFlops:
        """Of the layers whose activations are recomputed: every n-th; 0: none."""
        return cls._of_layers(config, every, 0.0) if every else cls(0.0, 0.0)

    @classmethod
    def _of_layers(cls, config: Mapping[str, Any], every: int, head: float) -> ClassFlops:
        """Of the matrices in every n-th layer."""
        width, layers = width_of(config), -(-layers_of(config) // every)
        per_input = of_matrices(layout_of(config).shapes, every) + layers * 2 * width * _positions(config)
        return cls(per_input, 0.0, input_pairs=4.0 * width * layers, per_row=head)


def _positions(config: Mapping[str, Any]) -> int:
    """Relative positions by which a token of DeBERTa is scored, in all of its ways."""
    ways = config.get("pos_att_type") if config.get("relative_attention") else None
    if not ways:
        return 0
    buckets = int(config.get("position_buckets") or 0)
    farthest = int(config.get("max_relative_positions") or 0)
    span = buckets if buckets > 0 else farthest if farthest > 0 else int(config.get("max_position_embeddings") or 0)
    named = ways.split("|") if isinstance(ways, str) else ways
    return 2 * span * len({"c2p", "p2c"} & set(named))
