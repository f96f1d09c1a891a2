"""A folder with a model in it, looked at without loading a weight: config.json, tokenizer, safetensors headers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jobs.errors import Refused

CONFIG = "config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZERS = ("tokenizer.json", "spiece.model")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_MAX_HEADER = 100 << 20  # the limit of the format


def refuse_unusable(config: Mapping[str, Any], files: Iterable[str], source: str) -> list[str]:
    """The weight files (or their index) among `files` of a model; raises Refused unless all that is needed is there.

    Codes: `model_not_supported`, `no_tokenizer`, `no_safetensors`.
    """
    names = set(files)
    if config.get("model_type") != "t5":
        raise _refused(
            "model_not_supported",
            f"{source} is of type {config.get('model_type')!r}, which is not supported yet",
            "today: T5, T5 1.1 and FLAN-T5 in any size",
        )
    if not names.intersection(TOKENIZERS):
        raise _refused("no_tokenizer", f"{source} has no tokenizer", f"it needs {' or '.join(TOKENIZERS)}")
    if SINGLE in names:
        return [SINGLE]
    shards = sorted(name for name in names if name.startswith("model-") and name.endswith(".safetensors"))
    if INDEX in names and shards:
        return [INDEX, *shards]
    pickles = sorted(name for name in names if name.endswith(PICKLES))
    raise _refused(
        "no_safetensors",
        f"{source} has no {SINGLE}"
        + (f", only {pickles[0]}: pickles can run code and are not read" if pickles else ""),
        "save the model with save_pretrained, which writes safetensors; on the hub, look for a revision that has them",
    )


def read_config(folder: Path, source: str) -> dict[str, Any]:
    """config.json. Raises Refused (`no_config`)."""
    try:
        config = json.loads((folder / CONFIG).read_bytes())
    except (OSError, ValueError) as error:
        raise _refused(
            "no_config", f"{source} has no readable {CONFIG}: {error}", "is it the folder of a transformers model?"
        ) from None
    if not isinstance(config, dict):
        raise _refused("no_config", f"the {CONFIG} of {source} is not a JSON object", "take the original file")
    return config


def count_parameters(folder: Path, source: str) -> int:
    """Weights in a folder, from the headers of its safetensors. Raises Refused: as above, and `bad_safetensors`."""
    config = read_config(folder, source)
    weights = refuse_unusable(config, (file.name for file in folder.iterdir()), source)
    if weights[0] == INDEX:
        try:
            named = set(json.loads((folder / INDEX).read_bytes())["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise _refused(
                "bad_safetensors", f"{source}: {INDEX} cannot be read: {error}", "take the original file"
            ) from None
        if missing := sorted(named - set(weights)):
            raise _refused(
                "bad_safetensors", f"{source} lacks {missing[0]}, which its index names", "copy it completely"
            )
        weights = sorted(named)
    shapes: dict[str, list[int]] = {}
    for name in weights:
        shapes |= _shapes(folder / name, source)
    if "shared.weight" in shapes:
        # Written by some versions beside the tensor that they are.
        for alias in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"):
            shapes.pop(alias, None)
    return sum(math.prod(shape) for shape in shapes.values())


def t5_parameters(config: Mapping[str, Any]) -> int:
    """Weights of a T5 of this config.json, by arithmetic: takes no time, no memory and no torch."""
    width, inner, hidden = config["d_model"], config["num_heads"] * config["d_kv"], config["d_ff"]
    gated = str(config.get("feed_forward_proj", "relu")).startswith("gated")
    attention = 4 * width * inner + width  # with its norm
    feed_forward = (3 if gated else 2) * width * hidden + width
    encoders = config["num_layers"]
    decoders = config.get("num_decoder_layers") or encoders
    stacks = encoders * (attention + feed_forward) + decoders * (2 * attention + feed_forward)
    position_bias = config.get("relative_attention_num_buckets", 32) * config["num_heads"]
    # The truth about the head is in either key: transformers 5 saves the first as true for every T5.
    tied = config.get("tie_word_embeddings", True) and config.get("scale_decoder_outputs", True)
    embeddings = (1 if tied else 2) * config["vocab_size"] * width
    return int(embeddings + stacks + 2 * (position_bias + width))


def _shapes(file: Path, source: str) -> dict[str, list[int]]:
    """Tensor name → shape, from the header; the file must be as long as the header says."""
    try:
        with open(file, "rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            if length > _MAX_HEADER:
                raise ValueError("no safetensors header")
            header = json.loads(handle.read(length))
        header.pop("__metadata__", None)
        expected = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if (size := file.stat().st_size) != expected:
            raise ValueError(f"{size} bytes long instead of {expected}")
        return {name: entry["shape"] for name, entry in header.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _refused(
            "bad_safetensors", f"{source}: {file.name} is damaged: {error}", "copy it again, completely"
        ) from None


def _refused(code: str, message: str, hint: str) -> Refused:
    return Refused(f"model: {message}", code=code, param="model", hint=hint)
