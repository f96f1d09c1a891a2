"""The report on a prepared dataset: `dataset.json`, and the summary that goes into the job's record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jobs.dataset_report import (
    DatasetReport,
    DatasetSummary,
    LengthSummary,
    Percentiles,
    RejectedRows,
    Rewriting,
    RewrittenTexts,
    SideLengths,
    SourceReport,
)
from worker.training.dataset.data import Int32, Int64
from worker.training.rows.row_counts import RowCounts

_PERCENTILES = (50, 90, 95, 99)
IN_SUMMARY = 20
OTHERS = "(others)"
IN_FULL = 1000
"""Entries of a list, the commonest first: a corpus may have every character there is."""


@dataclass(frozen=True)
class Lengths:
    """How long texts are, in tokens, end-of-sequence included, before they were cut to `limit`."""

    limit: int
    values: Int64
    """Each length that occurs, ascending."""
    counts: Int64
    """Texts of each."""

    @classmethod
    def of(cls, full_lengths: Int32, limit: int) -> Lengths:
        """Of [texts] lengths."""
        values, counts = np.unique(full_lengths, return_counts=True)
        return cls(limit, values.astype(np.int64), counts)

    def summary(self) -> LengthSummary:
        """The limit, and percentiles before and after cutting."""
        reached = np.cumsum(self.counts)
        places = [np.searchsorted(reached, np.ceil(share * reached[-1] / 100)) for share in _PERCENTILES]
        names = [*(f"p{share}" for share in _PERCENTILES), "max"]
        before = [int(self.values[place]) for place in (*places, -1)]
        after = [min(value, self.limit) for value in before]
        return LengthSummary(
            limit=self.limit,
            before=Percentiles(**dict(zip(names, before, strict=True))),
            after=Percentiles(**dict(zip(names, after, strict=True))),
        )


def summary(
    source_counts: Sequence[RowCounts],
    lengths: Mapping[str, Lengths],
    rows: Mapping[str, int],
    validation: float | str,
    shared_inputs: int,
) -> DatasetSummary:
    """A few KB at most. `source_counts`: one a source; `rows`: of train and validation; `validation`: as in the job."""
    total = RowCounts()
    for counts in source_counts:
        total.add(counts)
    return DatasetSummary(
        rows_read=total.read,
        kept=total.kept,
        rejected=commonest(total.rejected, IN_SUMMARY),
        duplicates=total.duplicates,
        train_rows=rows["train"],
        validation_rows=rows["validation"],
        validation_asked=validation,
        validation_share=round(rows["validation"] / max(1, rows["train"] + rows["validation"]), 6),
        validation_inputs_in_training=shared_inputs,
        truncated_inputs=total.truncated["input"],
        truncated_targets=total.truncated["target"],
        input_tokens=total.tokens["input"],
        target_tokens=total.tokens["target"],
        unknown_inputs=total.unknown_texts["input"],
        unknown_targets=total.unknown_texts["target"],
        unknown_tokens=total.unknown_tokens,
        unknown_token_rate=round(total.unknown_tokens / max(1, total.tokens.total()), 8),
        unknown_characters=commonest(total.unknown, IN_SUMMARY),
        normalized=commonest(total.normalized, IN_SUMMARY),
        noticed=commonest(total.noticed, IN_SUMMARY),
        rewritten=commonest(total.rewritten, IN_SUMMARY),
        lengths=SideLengths(input=lengths["input"].summary(), target=lengths["target"].summary()),
    )


def full_report(names: Sequence[str], source_counts: Sequence[RowCounts], short: DatasetSummary) -> DatasetReport:
    """The summary, then what is known of each source by itself, in full."""
    sources = [source_report(name, counts) for name, counts in zip(names, source_counts, strict=True)]
    return DatasetReport(**dict(short), sources=sources)


def source_report(name: str, counts: RowCounts) -> SourceReport:
    """What is known of the rows of one source."""
    rewritten = {}
    for what, count in counts.rewritten.most_common():
        before, after = counts.examples[what]
        rewritten[what] = RewrittenTexts(texts=count, example=Rewriting(before=before, after=after))
    return SourceReport(
        name=name,
        rows_read=counts.read,
        kept=counts.kept,
        duplicates=counts.duplicates,
        rejected={
            reason: RejectedRows(rows=count, first=counts.first.get(reason, []))
            for reason, count in commonest(counts.rejected, IN_FULL).items()
        },
        unknown_characters=commonest(counts.unknown, IN_FULL),
        normalized=commonest(counts.normalized, IN_FULL),
        noticed=commonest(counts.noticed, IN_FULL),
        rewritten=rewritten,
    )


def commonest(counts: Counter[str], most: int) -> dict[str, int]:
    """The `most` commonest, the commonest first, and how often all `OTHERS` occur together.

    The result does not depend on the order of the counts.
    """
    ordered = sorted((+counts).items(), key=lambda entry: (-entry[1], entry[0]))
    rest = sum(count for _, count in ordered[most:])
    return dict(ordered[:most]) | ({OTHERS: rest} if rest else {})
