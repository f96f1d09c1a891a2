"""Which tensors a T5 of a config.json has, and whether weight files hold exactly these: seen before anything is loaded.

The same refusals, with the same codes, as the guards make on the loaded model (`network/guards.py`): here they
cost milliseconds and no card. Needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from jobs.errors import Refused
from worker.training.models.headers import Stored, damaged

HEAD, EMBEDDING = "lm_head.weight", "shared.weight"
ALIASES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
"""Other names of the embedding, under which some versions wrote it (beside, or in place of, `shared.weight`)."""
UNUSED = frozenset({"decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"})
"""In the files of the first T5s; no version of the model has had a use for it."""
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


def said_untied(config: Mapping[str, Any]) -> bool:
    """Whether config.json says that the head is a tensor of its own.

    transformers 5 saves `tie_word_embeddings` as true for every T5 and leaves the truth in `scale_decoder_outputs`.
    """
    return config.get("tie_word_embeddings") is False or config.get("scale_decoder_outputs") is False


def t5_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Tensor name → shape; what is shared, once. Defaults are those of T5Config. Raises Refused (`bad_config`)."""
    try:
        return _t5_shapes(config)
    except (TypeError, ValueError) as error:
        raise Refused(
            f"model: config.json cannot be understood: {error}", code="bad_config", param="model",
            hint="take the original file",
        ) from None  # fmt: skip


def t5_parameters(config: Mapping[str, Any]) -> int:
    """How many weights these are."""
    return sum(math.prod(shape) for shape in t5_shapes(config).values())


def refuse_unfit(tensors: Mapping[str, Stored], config: Mapping[str, Any], source: str) -> dict[str, Stored]:
    """The tensors of the model under their own names, each once; raises Refused unless they are what config asks for.

    Codes: `missing_keys`, `unexpected_keys`, `mismatched_shapes`, `wrong_dtype`, `tied_head`, `untied_head`,
    `bad_safetensors`.
    """
    expected = t5_shapes(config)
    found = _own_names(tensors, source)
    if HEAD not in expected and HEAD in found and EMBEDDING in found:
        if not found[HEAD].same_bytes(found[EMBEDDING]):
            raise untied_head()
        del found[HEAD]
    if HEAD in expected and HEAD not in found:
        raise tied_head("is not among the weights")
    mismatched = [
        f"{name} {found[name].shape} in the file, {shape} in the model"
        for name, shape in expected.items()
        if name in found and found[name].shape != shape
    ]
    refuse_tensors("mismatched_shapes", mismatched, "of other shapes than config.json asks for")
    refuse_tensors("missing_keys", expected.keys() - found.keys(), MISSING)
    refuse_tensors("unexpected_keys", found.keys() - expected.keys(), UNEXPECTED)
    numbers = [f"{name} ({stored.dtype})" for name, stored in found.items() if stored.dtype not in _FLOATS]
    refuse_tensors("wrong_dtype", numbers, "not of F32, F16 or BF16: quantised weights cannot be trained")
    if HEAD in expected and found[HEAD].same_bytes(found[EMBEDDING]):
        raise tied_head(f"has the same values as {EMBEDDING}")
    return found


MISSING = "missing from the weights, which would train on from random values"
UNEXPECTED = "in the weights, which the model of config.json does not have"


FILES_HINT = "the model folder and its config.json do not belong together, or the files are damaged"


def refuse_tensors(
    code: str, names: Iterable[str], what: str, *, kind: str = "tensors", hint: str = FILES_HINT
) -> None:
    """Raise Refused naming them (five, and how many), if there are any."""
    found = sorted(names)
    if found:
        shown = ", ".join(found[:5]) + (", …" if len(found) > 5 else "")
        raise Refused(
            f"{len(found)} {kind} {what}: {shown}",
            code=code,
            param="model",
            hint=hint,
        )


def tied_head(why: str) -> Refused:
    """The head is the embedding, and should not be."""
    return Refused(
        f"config.json says that the head is not tied to the embeddings, but {HEAD} {why}",
        code="tied_head",
        param="model",
        hint="get the complete weights; do not save a model after tie_weights() or resize_token_embeddings()",
    )


def untied_head() -> Refused:
    """The head is not the embedding, and should be."""
    return Refused(
        f"config.json says that the head is tied to the embeddings, but the weights hold a {HEAD} of its own",
        code="untied_head",
        param="model",
        hint='if that is meant (T5 1.1, FLAN-T5), write "tie_word_embeddings": false in config.json',
    )


def _own_names(tensors: Mapping[str, Stored], source: str) -> dict[str, Stored]:
    found = {name: stored for name, stored in tensors.items() if name not in UNUSED and name not in ALIASES}
    for alias in ALIASES:
        if alias in tensors and not tensors[alias].same_bytes(found.setdefault(EMBEDDING, tensors[alias])):
            raise damaged(source, f"{alias} has other values than {EMBEDDING}, which it is in a T5")
    return found


def _t5_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    def size(key: str, default: int) -> int:
        value = config.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{key} is {value!r}")
        return value

    width, hidden, heads = size("d_model", 512), size("d_ff", 2048), size("num_heads", 8)
    inner, vocabulary = heads * size("d_kv", 64), size("vocab_size", 32128)
    buckets, layers = size("relative_attention_num_buckets", 32), size("num_layers", 6)
    decoders = layers if config.get("num_decoder_layers") is None else size("num_decoder_layers", layers)
    gated = str(config.get("feed_forward_proj", "relu")).startswith("gated")
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (vocabulary, width)}
    for stack, count in (("encoder", layers), ("decoder", decoders)):
        attentions = ["SelfAttention"] if stack == "encoder" else ["SelfAttention", "EncDecAttention"]
        for block in range(count):
            prefix = f"{stack}.block.{block}.layer"
            for number, attention in enumerate(attentions):
                shapes |= {f"{prefix}.{number}.{attention}.{one}.weight": (inner, width) for one in "qkv"}
                shapes[f"{prefix}.{number}.{attention}.o.weight"] = (width, inner)
                shapes[f"{prefix}.{number}.layer_norm.weight"] = (width,)
            last = f"{prefix}.{len(attentions)}"
            shapes |= {
                f"{last}.DenseReluDense.{one}.weight": (hidden, width)
                for one in (("wi_0", "wi_1") if gated else ("wi",))
            }
            shapes[f"{last}.DenseReluDense.wo.weight"] = (width, hidden)
            shapes[f"{last}.layer_norm.weight"] = (width,)
        shapes[f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"] = (buckets, heads)
        shapes[f"{stack}.final_layer_norm.weight"] = (width,)
    if said_untied(config):
        shapes[HEAD] = (vocabulary, width)
    return shapes
