"""Some rows as the model gets them, for people to look at before the job is queued."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from jobs.preview import RowPreview, TextPreview
from jobs.spec import DataSpec
from worker.training.dataset.encoding import RowTask
from worker.training.rows.characters import Rewriter
from worker.training.rows.row import Defect, Row
from worker.training.rows.text import RowReader, Templates, Texts

SHOWN = 2_000
"""Characters of a text."""


def preview_rows(
    rows: Sequence[Row], templates: Templates, data: DataSpec, task: RowTask, tokenizer: Path | None, embeddings: int
) -> list[RowPreview]:
    """These rows, all usable, but for those that the tokenizer's chat template cannot write.

    `tokenizer`: the folder of the model; None: it has no tokenizer yet.

    Raises Rejected as `RowTask.tried`.
    """
    state = None if tokenizer is None else task.tokenizer(tokenizer)
    rewriter = Rewriter() if data.normalize else None
    if state is not None:
        state.check_vocabulary(embeddings)
        rewriter = Rewriter(state.rewrites()) if data.normalize else None
    read = []
    for row in rows:
        reader = RowReader(*templates, rewriter)
        read.append((row.number, reader.read(row.columns or {}), dict(+reader.normalized)))
    if state is None:
        return [plain_preview(*one) for one in read]
    limits = task.limits(data)
    encoder = task.encoder(task.tried(state, [texts for _, texts, _ in read], limits), limits)
    previews = []
    for one in read:
        with suppress(Defect):  # prepare rejects the row, and says why
            previews.append(encoder.preview(*one))
    return previews


def plain_preview(number: int, texts: Texts, rewritten: dict[str, int]) -> RowPreview:
    """A row whose tokens are not known yet."""
    input, target = (
        TextPreview(text=text[:SHOWN], characters=len(text), tokens=None, cut_characters=None, unknown={})
        for text in (texts.input, texts.target)
    )
    return RowPreview(number=number, input=input, target=target, rewritten=rewritten)
