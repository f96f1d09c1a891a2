"""Some rows as the model gets them, for people to look at before the job is queued."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from jobs.preview import RowPreview, TextPreview
from jobs.spec import DataSpec
from worker.training.dataset.tokens import Encoder, TokenizerState
from worker.training.rows.characters import Rewriter
from worker.training.rows.row import Row
from worker.training.rows.text import RowReader, Template

SHOWN = 2_000
"""Characters of a text."""


def preview_rows(
    rows: Sequence[Row], templates: tuple[Template, Template], data: DataSpec, tokenizer: Path | None, embeddings: int
) -> list[RowPreview]:
    """These rows, all usable. `tokenizer`: the folder of the model; None: it has no tokenizer yet.

    Raises Rejected (`tokenizer_unusable`, `limit_too_small`).
    """
    state = None if tokenizer is None else TokenizerState.read(tokenizer)
    rewriter = Rewriter() if data.normalize else None
    if state is not None:
        state.check_vocabulary(embeddings)
        rewriter = Rewriter(state.rewrites()) if data.normalize else None
    read = []
    for row in rows:
        reader = RowReader(*templates, rewriter)
        read.append((row.number, reader.read(row.columns or {}), reader.normalized))
    limits = {"input": data.max_input_tokens, "target": data.max_target_tokens}
    encoder = None
    if state is not None:
        state = state.tried([text for _, texts, _ in read for text in (texts.input, texts.target)])
        state.check_limits(limits)
        encoder = Encoder(state)
    return [
        RowPreview(
            number=number,
            input=_preview(texts.input, encoder, limits["input"]),
            target=_preview(texts.target, encoder, limits["target"]),
            rewritten=dict(+normalized),
        )
        for number, texts, normalized in read
    ]


def _preview(text: str, encoder: Encoder | None, limit: int) -> TextPreview:
    tokens, cut, unknown = (None, None, Counter[str]()) if encoder is None else encoder.inspect(text, limit)
    return TextPreview(
        text=text[:SHOWN], characters=len(text), tokens=tokens, cut_characters=cut, unknown=dict(unknown)
    )
