"""The report on a prepared dataset: `dataset.json`, and the summary that goes into the job's record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
from jobs.text.png import png
from worker.training.dataset.data import SIDES, Int32, Int64
from worker.training.rows.row import RowCounts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# -- histogram ---------------------------------------------------------------------------------------------------------
# `dataset.png`: how long the inputs and targets are, and where they are cut.
#
# It has no background, and inks that can be read on a white page as on a black one.

_BINS = 64
_NEAR = 1.25
"""A limit further from the longest bar than this factor is said in words: to show it would make the bars thin."""
INK, GRID, BARS, CUT = "#7a808a", "#7a808a55", "#4f8fe8", "#d98218"


def draw(lengths: Mapping[str, Lengths]) -> bytes:
    """A PNG of 1000 × 420 pixels; the bar at the right end holds all that is longer.

    A side whose texts are all equally long, as labels are, is left out unless it is all there is.
    """
    return png(figure_of(lengths))


def figure_of(lengths: Mapping[str, Lengths]) -> Figure:
    """The picture before it is rendered."""
    from matplotlib.figure import Figure  # half a second: only where something is drawn

    figure = Figure(figsize=(10, 4.2), dpi=100, facecolor="none", layout="constrained")
    sides = [side for side in SIDES if len(lengths[side].values) > 1] or SIDES[:1]
    for side, axes in zip(sides, figure.subplots(1, len(sides), squeeze=False)[0], strict=True):
        of_side = lengths[side]
        edges, counts = bins(of_side)
        axes.set_facecolor("none")
        axes.bar(edges[:-1], counts, width=np.diff(edges), align="edge", color=BARS)
        cut = int(of_side.counts[of_side.values > of_side.limit].sum())
        if near := of_side.limit <= _NEAR * edges[-1]:
            axes.axvline(of_side.limit, color=CUT)
        axes.set_xlim(0, max(edges[-1], 1.02 * of_side.limit if near else 0))
        axes.set_title(f"{side}s", color=INK, fontsize=14, loc="left")
        axes.set_title(f"limit {of_side.limit:,}: {cut:,} cut", color=CUT if near else INK, fontsize=11, loc="right")
        axes.set_xlabel(f"tokens (longest {of_side.values[-1]:,})", color=INK)
        axes.set_ylabel("rows", color=INK)
        axes.tick_params(colors=INK)
        for axis in (axes.xaxis, axes.yaxis):  # whole tokens, whole rows
            axis.get_major_locator().set_params(integer=True)
        axes.grid(color=GRID, linewidth=0.6, axis="y")
        axes.set_axisbelow(True)
        for spine in axes.spines.values():
            spine.set_color(GRID)
    return figure


def bins(lengths: Lengths) -> tuple[Int64, Int64]:
    """Edges of equal bins up to a little above the limit or the 99th percentile, and texts in each.

    The last bin also holds the longer ones.
    """
    usual = int(lengths.values[np.searchsorted(np.cumsum(lengths.counts), 0.99 * lengths.counts.sum())])
    end = min(int(lengths.values[-1]), max(5 * lengths.limit // 4, usual)) + 1
    width = -(-end // _BINS)
    edges = np.arange(0, end + width, width)
    places = np.minimum(lengths.values // width, len(edges) - 2)
    return edges, np.bincount(places, weights=lengths.counts, minlength=len(edges) - 1).astype(np.int64)


# -- report ------------------------------------------------------------------------------------------------------------

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
        examples=total.became,
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
