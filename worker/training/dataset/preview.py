"""Some rows as the model gets them, for people to look at before the job is queued."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import NamedTuple

from jobs.preview import RowPreview, TextPreview
from jobs.spec import DataSpec
from worker.training.dataset.encoding import RowTask
from worker.training.dataset.tokens import TokenizerState
from worker.training.rows.characters import Rewriter
from worker.training.rows.row import Defect, Row
from worker.training.rows.row_filter import parse_rows
from worker.training.rows.text import RowReader, Templates, Texts

Preview = Callable[[int, Texts, Mapping[str, int]], RowPreview]
SHOWN = 2_000
"""Characters of a text."""
_FIRST = 2
"""Rows shown from the beginning."""
_MOST_FIRST, _MOST_LONGEST = 100, 20
"""Rows held to show these, and the longest: the tokenizer may reject some."""


class Candidates:
    """Rows of a source that may be shown: the first ones, the longest of all that were added, and the last one."""

    def __init__(self) -> None:
        self.first: list[Row] = []
        self.last: list[Row] = []
        self._added = 0
        self._longest: list[tuple[int, int, Row]] = []

    def add(self, row: Row, characters: int) -> None:
        """The next usable row, and how long its texts are."""
        if len(self.first) < _MOST_FIRST:
            self.first.append(row)
        self.last = [row]
        self._added += 1
        heapq.heappush(self._longest, (characters, -self._added, row))
        if len(self._longest) > _MOST_LONGEST:
            heapq.heappop(self._longest)

    @property
    def longest(self) -> list[Row]:
        """The longest first; of equally long ones, the earliest."""
        return [row for _, _, row in sorted(self._longest, reverse=True)]


class Previews(NamedTuple):
    """Rows for people, and why others that would have been shown in their place are rejected."""

    rows: list[RowPreview]
    rejected: Counter[str]
    """Rows by reason."""
    layout: dict[str, bool]
    """What the tokenizer, if it is known, makes of white space, by the fields of `SourcePreview`."""
    examples: float
    """Of a row, on average of the first ones."""


def preview_rows(
    candidates: Candidates,
    templates: Templates,
    data: DataSpec,
    task: RowTask,
    tokenizer: TokenizerState | None,
    rewriter: Rewriter | None,
    embeddings: int,
    *,
    learns_new_tokens: bool,
) -> Previews:
    """The first two rows and the longest of the others; a row that the tokenizer rejects gives way to the next.

    Where it rejects all of these, the last row.

    `tokenizer`: None: the model has none yet; `rewriter` as of `rewriter_of`. `learns_new_tokens`: the model can learn
    a further one.

    Raises Rejected as `RowTask.tried`.
    """
    preview: Preview = partial(_untokenized, task)
    examples = 1.0
    if tokenizer is None:
        rewriter = None  # which characters one that is made of the rows will lack, nobody knows yet
    else:
        tokenizer.check_vocabulary(embeddings)
        limits = task.limits(data)
        read = parse_rows(candidates.first, RowReader(*templates, rewriter))
        texts = [found for _, found in read if isinstance(found, Texts)]
        encoder = task.encoder(task.tried(tokenizer, texts, limits), limits)()
        preview = encoder.preview
        if of_chats := [text for text in texts if text.turns]:
            became = encoder.encode(of_chats).examples or [1]
            examples += (sum(became) / len(became) - 1) * len(of_chats) / len(texts)
    seen: list[Row] = []
    rejected: Counter[str] = Counter()

    def previews(rows: Iterable[Row]) -> Iterator[RowPreview]:
        for row in rows:
            if any(row is one for one in seen):
                continue
            seen.append(row)
            reader = RowReader(*templates, rewriter)
            try:
                yield preview(row.number, reader.read(row.columns or {}), dict(+reader.normalized))
            except Defect as defect:
                rejected[str(defect)] += 1

    shown = [*islice(previews(candidates.first), _FIRST), *islice(previews(candidates.longest), 1)]
    layout = {} if tokenizer is None else tokenizer.layout(embeddings if learns_new_tokens else 0)
    return Previews(shown or list(previews(candidates.last)), rejected, layout, examples)


def rewriter_of(data: DataSpec, tokenizer: TokenizerState | None, *, of_bytes: bool = False) -> Rewriter | None:
    """What normalizes the rows, if anything does. None: the tokenizer is yet to be made of them; `of_bytes`: it will
    know every character, else none of typography."""
    if not data.normalize:
        return None
    if tokenizer is None:
        return Rewriter({}) if of_bytes else Rewriter()
    return Rewriter(tokenizer.rewrites())


def _untokenized(task: RowTask, number: int, texts: Texts, rewritten: Mapping[str, int]) -> RowPreview:
    """A row whose tokens are not known yet. Raises Defect."""
    input, *second, target = (
        TextPreview(text=text[:SHOWN], characters=len(text), tokens=None, cut_characters=None, unknown={})
        for text in (*texts.read, texts.target)
    )
    return RowPreview(
        number=number, input=input, second=second[0] if second else None, target=target, rewritten=dict(rewritten),
        spans=task.builtin_spans(texts),
    )  # fmt: skip
