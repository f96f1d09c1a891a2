"""From the columns of a block of rows to tokens: the work of one process of the pool, and its result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from jobs.companions import CompanionColumns
from jobs.dataset_report import ClassSummary, ScoreSummary
from jobs.preview import RowPreview, SpanPreview
from jobs.spec import DataSpec
from worker.training.dataset.data import SIDES, Int64, Tokens
from worker.training.dataset.tokens import EncodedTexts, TokenizerState
from worker.training.rows.characters import Rewriter
from worker.training.rows.row import Block, RowCounts
from worker.training.rows.row_filter import EXCERPT, Rejection, UInt64, parse_rows
from worker.training.rows.text import RowReader, Template, Templates, Texts

Limits = Mapping[str, int]
"""By side: how many numbers a row has at most."""
_MOST_KEPT = 16_384
"""Characters of a target by which a model is scored, where its tokens have lost something."""


@dataclass(frozen=True)
class EncodedRows:
    """Rows as numbers, by side; those with a defect are in none. A row is one example, or several."""

    sides: Mapping[str, EncodedTexts]
    defects: Mapping[int, str] = field(default_factory=dict)
    """Why a row cannot be used after all, by its place among those given."""
    noticed: Counter[str] = field(default_factory=Counter)
    """Rows with something odd that are used as they are."""
    whole_targets: Mapping[int, str] = field(default_factory=dict)
    """Targets that a model writes, as text, of which the numbers have lost something: by place among all examples."""
    examples: Sequence[int] | None = None
    """[rows without a defect] how many examples, one after the other in `sides`, each has become; None: one each."""


class RowEncoder(Protocol):
    """Turns the texts of rows into numbers: what a model reads (input), and what it learns (target)."""

    def encode(self, texts: Sequence[Texts]) -> EncodedRows:
        """Of each row at most as many numbers as the limits allow."""

    def preview(self, number: int, texts: Texts, rewritten: Mapping[str, int]) -> RowPreview:
        """A row for people: what `encode` makes of it, and what is lost. Raises Defect where `encode` finds one."""


class LabelReport(Protocol):
    """Says which labels or scores the rows of a dataset have."""

    def __call__(
        self, numbers: Mapping[str, tuple[Tokens, Int64]], split_keys: UInt64, parts: Mapping[str, Int64], most: int
    ) -> ClassSummary | ScoreSummary | None:
        """`numbers` by side, with where each row begins and ends; [rows] keys; rows of train and validation; classes
        to name at most."""


class RowTask(Protocol):
    """What the dataset asks of a task."""

    @property
    def name(self) -> str:
        """As in `task.type` of a job."""

    @property
    def variant(self) -> object:
        """What else of the job's `task` decides the numbers of a row; JSON."""

    def target_template(self, text: str, companions: CompanionColumns) -> Template:
        """What the target of a row is made of, as `templates` has resolved it, and the columns beside it that the row
        is read by. Raises Rejected (`bad_template`)."""

    @property
    def has_labels(self) -> bool:
        """Whether the labels of all rows must be known before one is encoded."""

    def labels_of(self, texts: Texts) -> Sequence[str]:
        """The labels of a row; none where the task has none."""

    def label_report(self, tokenizer: TokenizerState) -> LabelReport:
        """What is said of the labels of all rows."""

    def limits(self, data: DataSpec) -> Limits:
        """Numbers of each side at most."""

    def tokenizer(self, folder: Path) -> TokenizerState:
        """The tokenizer in a model folder. Raises Rejected (`tokenizer_unusable`)."""

    def tried(self, tokenizer: TokenizerState, texts: Sequence[Texts], limits: Limits) -> TokenizerState:
        """The same, with what these rows, a job's first ones, show of it. Raises Rejected (`tokenizer_unusable`, …)."""

    def encoder(self, tokenizer: TokenizerState, limits: Limits) -> Callable[[], RowEncoder]:
        """What makes one, by a tokenizer that was tried. Can be sent to another process, which imports no task."""

    def builtin_spans(self, texts: Texts) -> tuple[SpanPreview, ...]:
        """A row as the built-in model will read it, which has no tokenizer yet, as one text in parts; none: as an input
        and a target. Raises Defect."""


@dataclass(frozen=True)
class Recipe:
    """How rows become tokens. Can be sent to another process."""

    encoder: Callable[[], RowEncoder]
    templates: Templates
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
    examples: Int64
    """[rows] how many examples, one after the other in `texts`, each has become."""
    texts: Mapping[str, EncodedTexts]
    """By side: input, target."""
    whole_targets: Mapping[int, str]
    """[examples] those of which the numbers have lost something, by number of the example."""


class BlockEncoder:
    """Encodes blocks, one after the other."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._encoder = recipe.encoder()
        self._rewrite = None if recipe.rewrites is None else Rewriter(recipe.rewrites)

    def encode(self, block: Block) -> EncodedBlock:
        """Parse, check and tokenize all rows of a block."""
        reader = RowReader(*self._recipe.templates, self._rewrite)
        counts = reader.counts()
        rejected: list[Rejection] = []
        usable: list[tuple[int, str, Texts]] = []
        for row, found in parse_rows(block.rows(), reader):
            counts.read += 1
            if isinstance(found, Rejection):
                rejected.append(found)
            else:
                usable.append((row.number, row.text[:EXCERPT], found))
        encoded = self._encoder.encode([texts for _, _, texts in usable])
        counts.noticed += encoded.noticed
        for place, defect in encoded.defects.items():
            number, excerpt, _ = usable[place]
            rejected.append(Rejection(number, defect, excerpt))
        rejected.sort(key=lambda one: one.number)
        for one in rejected:
            counts.reject(one.number, one.reason)
        kept = [one for place, one in enumerate(usable) if place not in encoded.defects]
        return EncodedBlock(
            file=block.file,
            counts=counts,
            rejected=rejected,
            numbers=[number for number, _, _ in kept],
            excerpts=[excerpt for _, excerpt, _ in kept],
            keys=np.array([texts.key for _, _, texts in kept], np.uint64),
            split_keys=np.array([texts.split_key for _, _, texts in kept], np.uint64),
            examples=np.array([1] * len(kept) if encoded.examples is None else encoded.examples, np.int64),
            texts={side: encoded.sides[side] for side in SIDES},
            whole_targets={row: text[:_MOST_KEPT] for row, text in encoded.whole_targets.items()},
        )
