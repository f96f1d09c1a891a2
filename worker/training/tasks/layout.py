"""Which tensors a model has."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    Interleave,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightTransform,
)

from jobs.errors import Rejected

_LAYER = re.compile(r"\.(?:blocks?|layers?|h)\.(\d+)\.")
_ENCODER, _CROSS = re.compile(r"\bencoder\."), re.compile(r"\.(?:EncDecAttention|encoder_attn)\.")
_KEYS_OR_VALUES = re.compile(r"\.(?:[kv]|[kv]_proj|key|value)\.weight$")
_KEYS_AND_VALUES = re.compile(r"\.(?:\w*qkv\w*|c_attn|query_key_value|kv_b_proj)\.weight$", re.IGNORECASE)
"""Of one matrix, mostly with the queries."""


@dataclass(frozen=True)
class Layout:
    """The tensors of a model whose head may be its embedding."""

    shapes: Mapping[str, tuple[int, ...]]
    """Name → shape; what is shared, once."""
    head: str
    embedding: str
    aliases: Collection[str] = ()
    """Other names of the embedding, under which some versions wrote it (beside, or in place of, its own)."""
    unused: Collection[str] = ()
    """In the files of some versions; the model has no use for them."""
    patterns: Collection[str] = ()
    """Regular expressions, found anywhere in such names; tensors of `shapes` are none of them."""
    new: Collection[frozenset[str]] = ()
    """Tensors that a file may lack, and that the model store then adds: each of these sets whole, or not at all."""
    head_modules: Collection[str] = ()
    """Modules of a classifier's head, which are trained whole also where the rest gets adapters; none holds another."""
    optional: Collection[str] = ()
    """Tensors that a file may lack, and that the model then makes by itself as zeros."""
    places: int | None = None
    """Of a table of positions that is computed and in no file (CodeGen, GPT-J): how many it has."""
    prefix: str = ""
    """What some versions left out at the beginning of names."""
    renames: Mapping[str, str] = field(default_factory=dict)
    """Regular expressions for what some versions wrote in names, and what is written today."""
    merged: Mapping[str, MergedTensor] = field(default_factory=dict)
    """Tensors that files hold in parts, such as the experts of a layer, by name."""
    hub_names: Mapping[str, str] = field(default_factory=dict)
    """Of a model with merged tensors: what files call tensors and parts that have another name here."""
    merged_on_load: Collection[str] = ()
    """Regular expressions for names of other tensors in files of which transformers makes others as it loads them."""

    def own_name(self, name: str) -> str:
        """What a tensor of a file is called in the model."""
        if name in self.shapes:
            return name
        for old, now in self.renames.items():
            name = re.sub(old, now, name)
        whole = f"{self.prefix}{name}"
        known = whole in self.shapes or whole in self.aliases or whole in self.parts
        return whole if name not in self.shapes and known else name

    @cached_property
    def parts(self) -> Mapping[str, str]:
        """Name of each part of a merged tensor → that of the tensor."""
        return {part: name for name, merged in self.merged.items() for part in merged.shapes}

    def as_on_the_hub(self, weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The tensors of the model as files hold them: merged ones in parts, under the names that files have."""
        return InParts(weights, self) if self.merged else weights

    @property
    def head_parameters(self) -> int:
        """How many weights `head_modules` have."""
        return sum(math.prod(self.shapes[name]) for name in self.shapes if within(name, self.head_modules))

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding."""
        return self.head not in self.shapes

    @property
    def parameters(self) -> int:
        """How many weights these are."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    def text_bytes(self, inputs: int, outputs: int) -> int:
        """About what a text of so many tokens takes beside the weights while it is written, of 16 bits a number: keys
        and values of all layers, what one layer computes, and logits in float32."""
        vocabulary, width = self.shapes[self.embedding]
        matrices = {name: shape for name, shape in self.shapes.items() if len(shape) == 2 and _LAYER.search(name)}
        encoder = {name: shape for name, shape in matrices.items() if _ENCODER.search(name)}
        first = [max(shape) for name, shape in (encoder or matrices).items() if _layer(name) == 0]
        cached = {name: _cached(name, shape) for name, shape in matrices.items() if name not in encoder}
        cross = sum(size for name, size in cached.items() if _CROSS.search(name))
        own = sum(cached.values()) - cross or 2 * width * (1 + max(map(_layer, matrices), default=0))
        # Scores of all heads where they get a bias, of T5; else a mask for all of them.
        heads = max((shape[1] for name, shape in encoder.items() if "relative_attention_bias" in name), default=1)
        of_inputs, positions = (cross, max(inputs, outputs)) if encoder else (own, inputs + outputs)
        copies = 4 * max((max(matrices[name]) for name, size in cached.items() if size), default=width)
        reading = inputs * (sum(first) + (0 if encoder else own)) + 3 * heads * inputs**2
        writing = inputs * (of_inputs + width) + outputs * own + copies * positions + 6 * vocabulary
        return 2 * max(reading, writing)


def _layer(name: str) -> int:
    found = _LAYER.search(name)
    return int(found[1]) if found else 0


def _cached(name: str, shape: tuple[int, ...]) -> int:
    """Numbers that `generate` keeps of each token by this matrix."""
    return shape[0] if _KEYS_OR_VALUES.search(name) else max(shape) if _KEYS_AND_VALUES.search(name) else 0


def within(name: str, modules: Collection[str]) -> bool:
    """Whether this tensor or module belongs to one of these, or is one."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def check_positions(param: str, asked: int, known: int | None) -> None:
    """Refuse `limit_too_large`: a model with an embedding for each place takes no longer rows. `known` None: any."""
    if known is not None and asked > known:
        raise Rejected(
            f"{param} is {asked:,}, and the model knows {known:,} positions",
            code="limit_too_large",
            param=param,
            hint=f"set {param} to {known:,} or less; what is longer is cut",
        )


# -- merged ------------------------------------------------------------------------------------------------------------
# Tensors that transformers merges as it loads a model: files hold the experts of a layer one by one, the model in one.
#
# Which they are, and how they are merged, are the rules of transformers (`conversion_mapping`), run on a group of parts
# at a time: what an expert has in the merged tensor is decided by its own parts alone.

_EACH_BY_ITSELF = (Concatenate, Interleave, Transpose)
"""Operations that leave a dimension alone unless they are told its number."""


@dataclass(frozen=True)
class MergedTensor:
    """One that files hold in parts."""

    converter: WeightConverter
    """From parts to tensor."""
    back: WeightConverter
    """From tensor to parts."""
    groups: tuple[Mapping[str, str], ...]
    """Of each group, such as an expert: the converter's patterns, and the names of the parts. Each makes as many
    rows as any other; one after another they are the tensor."""
    shapes: Mapping[str, tuple[int, ...]]
    """Of all parts, by name."""

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...], converter: WeightConverter) -> MergedTensor | None:
        """What this converter merges to the tensor; None: another tensor, or it cannot be taken apart again."""
        [target, *further] = converter.target_patterns
        before, found, behind = name.partition(target)
        if not found or further:
            return None
        back, (first, *others) = converter.reverse_transform(), converter.operations
        assert isinstance(back, WeightConverter), "as what it is made of"
        stacked = isinstance(first, MergeModulelist) and first.dim == 0 and all(map(_spares_first, others))
        if not stacked and any("*" in each for each in back.target_patterns):
            return None
        count = shape[0] if stacked else 1
        groups = tuple(
            {
                pattern: f"{before}{part.replace('*', str(number))}{behind}"
                for pattern, part in zip(converter.source_patterns, back.target_patterns, strict=True)
            }
            for number in range(count)
        )
        if any(converter.rename_source_key(part)[0] != name for group in groups for part in group.values()):
            return None
        merged = cls(converter, back, groups, {})
        whole = torch.empty((1, *shape[1:]) if stacked else shape, device="meta")
        try:
            parts = merged.split(0, whole)
            if merged.join(0, parts).shape != whole.shape:
                return None
        except (ValueError, KeyError, RuntimeError, AttributeError, TypeError):  # what rules raise that need more
            return None
        each = {pattern: tuple(parts[part].shape) for pattern, part in groups[0].items()}
        shapes = {part: each[pattern] for group in groups for pattern, part in group.items()}
        return cls(converter, back, groups, shapes)

    def join(self, group: int, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The rows that a group makes, of its parts by name."""
        given = {pattern: [parts[part]] for pattern, part in self.groups[group].items()}
        [rows] = _converted(self.converter, given).values()
        return rows

    def split(self, group: int, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """The parts of a group by name, of its rows."""
        made = _converted(self.back, {self.back.source_patterns[0]: [rows]})
        named = zip(self.groups[group].values(), self.back.target_patterns, strict=True)
        return {part: made[pattern.replace("*", "0")] for part, pattern in named}


def _spares_first(operation: ConversionOps) -> bool:
    """Whether it treats everything along the first dimension alike, and by itself."""
    dims = [value for key, value in vars(operation).items() if key.startswith("dim")]
    return isinstance(operation, _EACH_BY_ITSELF) and all(dim > 0 for dim in dims)


def _converted(converter: WeightConverter, tensors: dict[str, list[torch.Tensor]]) -> dict[str, torch.Tensor]:
    found: Any = tensors
    for operation in converter.operations:
        found = operation.convert(
            found, source_patterns=converter.source_patterns, target_patterns=converter.target_patterns
        )
    return {pattern: each[0] if isinstance(each, list) else each for pattern, each in found.items()}


class InParts(Mapping[str, torch.Tensor]):
    """Weights of a model as files hold them: each part is made when it is asked for."""

    def __init__(self, weights: Mapping[str, torch.Tensor], layout: Layout) -> None:
        self._weights = weights
        self._places: dict[str, tuple[str, int | None, str]] = {}  # name in files → tensor, group and part
        for name in weights:
            merged = layout.merged.get(name)
            groups: Sequence[tuple[int | None, str]] = (
                [(None, name)]
                if merged is None
                else [(number, part) for number, group in enumerate(merged.groups) for part in group.values()]
            )
            self._places |= {layout.hub_names.get(part, part): (name, number, part) for number, part in groups}
        self._merged = layout.merged
        self._last: tuple[tuple[str, int], dict[str, torch.Tensor]] | None = None

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor, group, part = self._places[name]
        if group is None:
            return self._weights[tensor]
        if self._last is None or self._last[0] != (tensor, group):
            merged, whole = self._merged[tensor], self._weights[tensor]
            rows = len(whole) // len(merged.groups)
            self._last = (tensor, group), merged.split(group, whole[group * rows : (group + 1) * rows])
        return self._last[1][part]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


# -- built -------------------------------------------------------------------------------------------------------------
# Which tensors a model has: those of the model that transformers builds of its config.json, without values.

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
    try:
        if layers(config) > _MOST_LAYERS:
            raise ValueError(f"no model has more than {_MOST_LAYERS} layers")
        with torch.device("meta"):
            model = build(config, torch.bfloat16)
        head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    except MemoryError:
        raise
    except Exception as error:  # whatever transformers raises on a value it did not expect
        raise not_understood(error) from None
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
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    merged = {
        name: made
        for name, shape in shapes.items()
        for each in converters
        if (made := MergedTensor.of(name, shape, each)) is not None
    }
    taken = {id(each.converter) for each in merged.values()}
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
        merged=merged,
        hub_names=_hub_names(shapes, merged, conversions),
        merged_on_load=[old for each in converters if id(each) not in taken for old in each.source_patterns],
        optional=frozenset(name for name in shapes if any(re.search(each, name) for each in by_itself)),
    )


def not_understood(error: Exception) -> Rejected:
    """What transformers says of a config.json."""
    reason = f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
    return Rejected(
        f"model: config.json cannot be understood: {reason}", code="bad_config", param="model",
        hint="take the original file",
    )  # fmt: skip


def _renames(conversion: WeightTransform) -> bool:
    """Whether it does nothing but to write other names, wherever they stand."""
    return type(conversion).__name__ == "WeightRenaming" and conversion.scope_prefix is None


def _hub_names(
    shapes: Collection[str], merged: Mapping[str, MergedTensor], conversions: Sequence[WeightTransform]
) -> dict[str, str]:
    """As in `Layout`."""
    back = [each.reverse_transform() for each in reversed(conversions) if _renames(each)] if merged else []
    found = {}
    for own in (
        *(each for each in shapes if each not in merged),
        *(part for each in merged.values() for part in each.shapes),
    ):
        name = own
        for each in back:
            name, _ = each.rename_source_key(name)
        if name != own:
            found[own] = name
    return found


def positions_of(config: Mapping[str, Any], layout: Layout) -> int | None:
    """Tokens of a row at most, where the model has a table of places; None: any number."""
    found = [shape[0] for name, shape in layout.shapes.items() if _POSITIONS.search(name)]
    found += [layout.places] if layout.places is not None else []
    named = [config[key] for key in ("max_position_embeddings", "n_positions") if isinstance(config.get(key), int)]
    return min(found + named) if found else None  # OPT and BART have two embeddings more than places
