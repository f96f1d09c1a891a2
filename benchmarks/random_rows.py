"""Rows of random tokens with the lengths of a corpus: for speed on a GPU as good as its text, which need not travel.

`recipe_lengths.npy` is a histogram: how many of the 19,972 rows that 20,000 recipes of RecipeNLG leave, when they are
prepared with T5's tokenizer and at most 512 tokens a side, have which padded widths (multiples of 8); no text. A row's
length is drawn below its width, which changes padding by nothing and FLOPs by little. `python -m
benchmarks.gpu_throughput --data FILE --tokenizer FOLDER --write-lengths OUT` writes that of another corpus.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from worker.training.dataset.data import Rows
from worker.training.steps.order import MULTIPLE, rounded

LENGTHS = Path(__file__).with_name("recipe_lengths.npy")
LONGEST = 512
_FIRST_TOKEN, _END = 3, 1
Pairs = npt.NDArray[np.int64]


def read_lengths(file: Path, seed: int = 0) -> Pairs:
    """[rows, 2] input and target tokens, end-of-sequence included, of a histogram as `write_lengths` writes it.

    Raises ValueError for another file.
    """
    cells = np.load(file, allow_pickle=False)
    if cells.ndim != 2 or cells.shape[1] != 3 or cells.dtype.kind not in "iu" or not len(cells) or cells.min() < 1:
        raise ValueError(
            f"{file}: {cells.dtype} {cells.shape} is not [cells, 3] of input width, target width and rows; make it "
            "with --write-lengths"
        )
    widths = np.repeat(cells[:, :2].astype(np.int64), cells[:, 2], axis=0)
    return np.maximum(1, widths - np.random.default_rng(seed).integers(0, MULTIPLE, widths.shape))


def synthetic_lengths(count: int, seed: int = 0) -> Pairs:
    """Log-normal lengths, much like those of recipes: about 128 input and 256 target tokens a row."""
    drawn = np.random.default_rng(seed)
    common, own = drawn.standard_normal(count), drawn.standard_normal((2, count))
    inputs = np.exp(4.7 + 0.45 * (0.6 * common + 0.8 * own[0]))
    targets = np.exp(5.35 + 0.6 * (0.6 * common + 0.8 * own[1]))
    pairs: Pairs = np.clip(np.stack([inputs, targets], 1).round(), 8, LONGEST).astype(np.int64)
    return pairs


def write_lengths(data: Path, tokenizer: Path | None, target: Path) -> Pairs:
    """Prepare a file of rows as a job would and write [cells, 3]: input width, target width, how many rows.

    Returns the lengths. Needs the whole environment.
    """
    from benchmarks.corpus import dataset_of, prepared_job  # a lent machine has not what this imports
    from worker.training.tasks.seq2seq import builtin

    config: dict[str, Any] | None = builtin.CONFIG | {"vocab_size": 32128} if tokenizer else None
    with tempfile.TemporaryDirectory(prefix="longhaul-lengths-") as scratch:
        run = prepared_job(data, Path(scratch), tokenizer=tokenizer, config=config, data={"validation": 0.0})
        rows = dataset_of(run).train
        pairs = np.stack([rows.input_lengths, rows.target_lengths], 1).astype(np.int64)
    widths, counts = np.unique(rounded(pairs), axis=0, return_counts=True)
    cells = np.column_stack([widths, counts])
    with open(target, "wb") as file:  # np.save would add a suffix to a name
        np.save(file, cells.astype(np.min_scalar_type(cells.max())))
    return pairs


def random_rows(lengths: Pairs, vocabulary: int, folder: Path, seed: int = 0) -> Rows:
    """Rows of these lengths, written into `folder` (see worker/training/dataset/data.py) and opened."""
    drawn = np.random.default_rng(seed)
    for number, side in enumerate(("input", "target")):
        offsets = np.concatenate([[0], np.cumsum(lengths[:, number])]).astype("<i8")
        tokens = drawn.integers(_FIRST_TOKEN, vocabulary, offsets[-1]).astype("<u2")
        tokens[offsets[1:] - 1] = _END
        offsets.tofile(folder / f"{side}.offsets")
        tokens.tofile(folder / f"{side}.tokens")
    np.arange(len(lengths), dtype="<i8").tofile(folder / "train.rows")
    return Rows(folder, "train", "<u2")
