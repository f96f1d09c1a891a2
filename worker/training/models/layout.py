"""Whether weight files hold exactly the tensors of a model: seen before anything is loaded.

The same refusals, with the same codes, as the guards make on the loaded model (`network/guards.py`): here they
cost milliseconds and no GPU.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from jobs.errors import Rejected
from worker.training.models.headers import Stored, damaged
from worker.training.tasks.layout import Layout, MergedTensor

_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


@dataclass(frozen=True)
class StoredParts:
    """One tensor of a model in parts that lie in files by themselves, such as the experts of a layer."""

    shape: tuple[int, ...]
    merged: MergedTensor
    parts: Mapping[str, Stored]
    """By the names that `merged` has for them."""

    @property
    def dtype(self) -> str:
        """Of a part; others may be other floats."""
        return next(iter(self.parts.values())).dtype

    @property
    def place(self) -> tuple[str, int]:
        """Where the first of them lies."""
        return min(each.place for each in self.parts.values())

    @property
    def elements(self) -> int:
        """How many numbers."""
        return math.prod(self.shape)


def check_tensors(tensors: Mapping[str, Stored], layout: Layout, source: str) -> dict[str, Stored | StoredParts]:
    """The tensors of the model under their own names, each once; raises Rejected unless they are those of the layout.

    Codes: `merged_on_load`, `missing_keys`, `unexpected_keys`, `mismatched_shapes`, `wrong_dtype`, `tied_head`,
    `untied_head`, `bad_safetensors`.
    """
    head, embedding = layout.head, layout.embedding
    found = _own_names(tensors, layout, source)
    apart = {layout.parts[part] for part in found.keys() & layout.parts.keys()} - found.keys()
    expected = {name: shape for name, shape in layout.shapes.items() if name not in apart}
    for name in apart:
        expected |= layout.merged[name].shapes
    if layout.tied and head in found and embedding in found:
        if not found[head].same_bytes(found[embedding]):
            raise untied_head(layout)
        del found[head]
    others = [
        name for name in found.keys() - expected.keys() if any(re.search(each, name) for each in layout.merged_on_load)
    ]
    reject_tensors("merged_on_load", others, MERGED, hint=_merge_hint(source))
    new = {name for group in layout.new for name in group}
    if not layout.tied and head not in found and head not in new:
        raise tied_head(layout, "is not among the weights")
    reject_tensors("unexpected_keys", new & {head} & found.keys(), UNNAMED, hint=NAME_HEAD)
    mismatched = [
        f"{name} {found[name].shape} in the file, {shape} in the model"
        for name, shape in expected.items()
        if name in found and found[name].shape != shape
    ]
    reject_tensors("mismatched_shapes", mismatched, "of other shapes than config.json asks for")
    missing = expected.keys() - found.keys() - set(layout.optional)
    for group in layout.new:
        if group <= missing:
            missing -= group
    reject_tensors("missing_keys", missing, MISSING)
    reject_tensors("unexpected_keys", found.keys() - expected.keys(), UNEXPECTED)
    numbers = [f"{name} ({stored.dtype})" for name, stored in found.items() if stored.dtype not in _FLOATS]
    reject_tensors("wrong_dtype", numbers, "not of F32, F16 or BF16: quantized weights cannot be trained")
    if not layout.tied and head in found and found[head].same_bytes(found[embedding]):
        raise tied_head(layout, f"has the same values as {embedding}")
    whole: dict[str, Stored | StoredParts] = {name: each for name, each in found.items() if name in layout.shapes}
    for name in apart:
        merged = layout.merged[name]
        whole[name] = StoredParts(layout.shapes[name], merged, {part: found[part] for part in merged.shapes})
    return whole


MISSING = "missing from the weights, which would train on from random values"
UNEXPECTED = "in the weights, which the model of config.json does not have"


MERGED = "of which transformers makes others as it loads them, in a way that is not known here"


UNNAMED = "in the weights, which those that config.json names in `architectures` do not have"
NAME_HEAD = "name the model's class in `architectures` of its config.json, such as RobertaForSequenceClassification"
FILES_HINT = "the model folder and its config.json do not belong together, or the files are damaged"


def reject_tensors(
    code: str, names: Iterable[str], what: str, *, kind: str = "tensors", hint: str = FILES_HINT
) -> None:
    """Raise Rejected naming them (five, and how many), if there are any."""
    found = sorted(names)
    if found:
        shown = ", ".join(found[:5]) + (", …" if len(found) > 5 else "")
        raise Rejected(
            f"{len(found)} {kind} {what}: {shown}",
            code=code,
            param="model",
            hint=hint,
        )


def _merge_hint(source: str) -> str:
    """The command that writes a model with the tensors that transformers makes."""
    lines = (
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        f"AutoModelForCausalLM.from_pretrained({source!r}, dtype='auto').save_pretrained('merged', "
        "save_original_format=False)",
        f"AutoTokenizer.from_pretrained({source!r}).save_pretrained('merged')",
    )
    return (
        f'in the data directory, write it as transformers holds it: python3 -c "{"; ".join(lines)}"; then name ./merged'
    )


def tied_head(layout: Layout, why: str) -> Rejected:
    """The head is the embedding, and should not be."""
    return Rejected(
        f"config.json says that the head is not tied to the embeddings, but {layout.head} {why}",
        code="tied_head",
        param="model",
        hint="get the complete weights; do not save a model after tie_weights() or resize_token_embeddings()",
    )


def untied_head(layout: Layout) -> Rejected:
    """The head is not the embedding, and should be."""
    return Rejected(
        f"config.json says that the head is tied to the embeddings, but the weights hold a {layout.head} of its own",
        code="untied_head",
        param="model",
        hint='if that is meant (T5 1.1, FLAN-T5), write "tie_word_embeddings": false in config.json',
    )


def _own_names(tensors: Mapping[str, Stored], layout: Layout, source: str) -> dict[str, Stored]:
    others = {*layout.unused, *layout.aliases}
    found: dict[str, Stored] = {}
    for name, stored in tensors.items():
        own = layout.own_name(name)
        if own in found:
            raise damaged(source, f"{name} and another tensor are both {own}")
        if own in layout.shapes or not (own in others or any(re.search(each, own) for each in layout.patterns)):
            found[own] = stored
    for name, stored in tensors.items():
        alias = layout.own_name(name)
        if alias in layout.aliases and not stored.same_bytes(found.setdefault(layout.embedding, stored)):
            raise damaged(source, f"{alias} has other values than {layout.embedding}, which it is in this model")
    return found
