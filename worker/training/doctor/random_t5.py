"""T5 of random weights: as a checkpoint of any size on disk, and one of two layers a stack with rows for it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import T5Config, T5ForConditionalGeneration

from worker.training.kernels.head_loss import IGNORED
from worker.training.tasks.seq2seq import builtin
from worker.training.tasks.seq2seq.batches import PairBatch
from worker.training.tasks.seq2seq.layout import t5_shapes

# -- random t5 ---------------------------------------------------------------------------------------------------------
# Random T5 checkpoints of any size, written a piece at a time: for measurements of loading and converting.

_XL: dict[str, Any] = builtin.CONFIG | {
    "vocab_size": 32128, "d_model": 2048, "d_kv": 64, "d_ff": 5120, "num_layers": 24, "num_decoder_layers": 24,
    "num_heads": 32,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "xl": _XL,  # FLAN-T5-XL: 2,849,757,184 parameters
    "large": _XL | {"d_model": 1024, "d_ff": 2816, "num_heads": 16},
    "base": _XL | {"d_model": 768, "d_ff": 2048, "num_layers": 12, "num_decoder_layers": 12, "num_heads": 12},
    "xl-width": _XL | {"num_layers": 6, "num_decoder_layers": 6},
    "tiny": _XL | {"d_model": 512, "d_ff": 2048, "num_heads": 8, "num_layers": 4, "num_decoder_layers": 4},
    "small": builtin.CONFIG | {"num_layers": 1, "num_decoder_layers": 1, "vocab_size": 128},
}
_DTYPES = {torch.bfloat16: "BF16", torch.float32: "F32"}
_PIECE = 1 << 24
Shapes = list[tuple[str, tuple[int, ...]]]


def checkpoint_bytes(config: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> int:
    """Of the weights of such a checkpoint."""
    return dtype.itemsize * sum(math.prod(shape) for shape in t5_shapes(config).values())


def write_checkpoint(
    folder: Path, config: dict[str, Any], dtype: torch.dtype = torch.bfloat16, *, shard_bytes: int | None = None
) -> int:
    """Make `folder` with config, tokenizer and weights; in shards of about `shard_bytes` if given. Returns how many."""
    folder.mkdir(parents=True)
    builtin.learn_tokenizer(["knead and bake the bread"]).save_pretrained(str(folder))
    (folder / "config.json").write_text(json.dumps(config | {"dtype": str(dtype).removeprefix("torch.")}))
    parts = list(_parts(t5_shapes(config).items(), (shard_bytes or 1 << 60) // dtype.itemsize))
    draw = torch.Generator().manual_seed(0)
    pool = torch.randn(2 * _PIECE, generator=draw).mul_(0.02).to(dtype)
    weight_map: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        name = "model.safetensors" if shard_bytes is None else f"model-{number:05}-of-{len(parts):05}.safetensors"
        _write(folder / name, part, pool, draw)
        weight_map |= dict.fromkeys((tensor for tensor, _ in part), name)
    if shard_bytes is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return len(parts)


def _parts(shapes: Iterable[tuple[str, tuple[int, ...]]], most: int) -> Iterable[Shapes]:
    part: Shapes = []
    filled = 0
    for name, shape in shapes:
        if part and filled + math.prod(shape) > most:
            yield part
            part, filled = [], 0
        part.append((name, shape))
        filled += math.prod(shape)
    yield part


def _write(file: Path, shapes: Shapes, pool: torch.Tensor, draw: torch.Generator) -> None:
    header: dict[str, object] = {}
    offset = 0
    for name, shape in shapes:
        end = offset + math.prod(shape) * pool.itemsize
        header[name] = {"dtype": _DTYPES[pool.dtype], "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "wb") as handle:
        handle.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes:
            left = math.prod(shape)
            while left:
                count = min(left, _PIECE)
                start = int(torch.randint(_PIECE, (), generator=draw))
                piece = pool[start : start + count]
                if "layer_norm" in name:
                    piece = torch.ones_like(piece)
                handle.write(piece.view(torch.uint8).numpy().data)
                left -= count


# -- small t5 ----------------------------------------------------------------------------------------------------------

VOCABULARY = 4096
_SIZES: dict[str, dict[str, Any]] = {
    "cuda": {"d_model": 1024, "d_kv": 64, "d_ff": 2816, "num_heads": 16},  # FLAN-T5-large's layers
    "cpu": {"d_model": 64, "d_kv": 16, "d_ff": 160, "num_heads": 4},
}
INPUT_LENGTHS, TARGET_LENGTHS = (37, 64, 11, 52), (96, 43, 80, 17)


def make_model(device: torch.device, dtype: torch.dtype) -> T5ForConditionalGeneration:
    """In training mode, without dropout. The same on every call: weights are rounded to bf16 first."""
    config = builtin.CONFIG | _SIZES[device.type] | {"vocab_size": VOCABULARY, "dropout_rate": 0.0}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = T5ForConditionalGeneration(T5Config(**config))
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight) * 0.02)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:  # norms: no 1 behind which an error could hide
                    parameter.mul_(1 + 0.1 * torch.randn_like(parameter))
    model.bfloat16().to(device=device, dtype=dtype)  # type: ignore[call-arg]  # wrapped by transformers
    model.train()
    return model


def draw_batch() -> PairBatch:
    """Four padded rows; the same on every call. On the CPU, as batches are."""
    generator = torch.Generator().manual_seed(4)

    def tokens(lengths: tuple[int, ...], fill: int) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = torch.randint(3, VOCABULARY, (len(lengths), max(lengths)), generator=generator)
        inside = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        return drawn.masked_fill(~inside, fill), inside.long()

    ids, mask = tokens(INPUT_LENGTHS, 0)
    labels, _ = tokens(TARGET_LENGTHS, IGNORED)
    return PairBatch(ids, mask, labels, sum(TARGET_LENGTHS), np.arange(len(INPUT_LENGTHS)), input_padded=True)
