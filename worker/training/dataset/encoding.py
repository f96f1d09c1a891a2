"""From the columns of a block of rows to tokens: the work of one process of the pool, and its result."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from worker.training.dataset.tokens import EncodedTexts, Encoder, TokenizerState
from worker.training.rows.characters import Rewriter
from worker.training.rows.row import Block
from worker.training.rows.row_counts import RowCounts
from worker.training.rows.row_filter import EXCERPT, Rejection, UInt64, parse_rows
from worker.training.rows.text import RowReader, Template, Texts


@dataclass(frozen=True)
class Recipe:
    """How rows become tokens. Can be sent to another process."""

    input: Template
    target: Template
    tokenizer: TokenizerState
    max_input_tokens: int
    max_target_tokens: int
    rewrites: dict[str, str] | None
    """Characters to write differently; None: nothing is normalized."""


@dataclass(frozen=True)
class EncodedBlock:
    """The rows of a block. Usable ones are numbered from 0; duplicates are still among them."""

    file: str
    counts: RowCounts
    """What is known of it before duplicates are: read, rejected, first, normalized, noticed, rewritten, examples."""
    rejected: list[Rejection]
    numbers: list[int]
    """[rows] of each in its file."""
    excerpts: list[str]
    """[rows] its beginning."""
    keys: UInt64
    """[rows] equal rows have equal ones."""
    split_keys: UInt64
    """[rows] rows that belong on the same side of a split have equal ones."""
    texts: dict[str, EncodedTexts]
    """By side: input, target."""


class BlockEncoder:
    """Encodes blocks, one after the other."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._encoder = Encoder(recipe.tokenizer)
        self._rewrite = None if recipe.rewrites is None else Rewriter(recipe.rewrites)

    def encode(self, block: Block) -> EncodedBlock:
        """Parse, check and tokenize all rows of a block."""
        recipe = self._recipe
        reader = RowReader(recipe.input, recipe.target, self._rewrite)
        counts = reader.counts()
        rejected: list[Rejection] = []
        numbers: list[int] = []
        excerpts: list[str] = []
        texts: list[Texts] = []
        for row, found in parse_rows(block.rows(), reader):
            counts.read += 1
            if isinstance(found, Rejection):
                counts.reject(row.number, found.reason)
                rejected.append(found)
            else:
                numbers.append(row.number)
                excerpts.append(row.text[:EXCERPT])
                texts.append(found)
        return EncodedBlock(
            file=block.file,
            counts=counts,
            rejected=rejected,
            numbers=numbers,
            excerpts=excerpts,
            keys=np.array([one.key for one in texts], np.uint64),
            split_keys=np.array([one.split_key for one in texts], np.uint64),
            texts={
                "input": self._encoder.encode([one.input for one in texts], recipe.max_input_tokens),
                "target": self._encoder.encode([one.target for one in texts], recipe.max_target_tokens),
            },
        )
