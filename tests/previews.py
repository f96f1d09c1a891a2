"""preview.json of a job with one source of rows, for tests of what is made of it."""

from __future__ import annotations

from collections.abc import Sequence

from jobs.preview import DataPreview, RowPreview, SourcePreview


def preview(rows: Sequence[RowPreview] = (), *, read_as: str | None = None) -> DataPreview:
    """These rows, of columns `a` and `b`."""
    source = SourcePreview(name="rows.jsonl", weight=1.0, read_as=read_as, input="{a}", target="{b}", rows=[*rows])
    return DataPreview(sources=[source])
