"""`dataset.png`: how long the inputs and targets are, and where they are cut.

It has no background, and inks that can be read on a white page as on a black one.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jobs.text.png import png
from worker.training.dataset.data import SIDES, Int64
from worker.training.dataset.report import Lengths

_BINS = 64
_NEAR = 1.25
"""A limit further from the longest bar than this factor is said in words: to show it would make the bars thin."""
INK, GRID, BARS, CUT = "#7a808a", "#7a808a55", "#4f8fe8", "#d98218"


def draw(lengths: Mapping[str, Lengths]) -> bytes:
    """A PNG of 1000 × 420 pixels; the bar at the right end holds all that is longer.

    A side whose texts are all equally long, as labels are, is left out unless it is all there is.
    """
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
        axes.grid(color=GRID, linewidth=0.6, axis="y")
        axes.set_axisbelow(True)
        for spine in axes.spines.values():
            spine.set_color(GRID)
    return png(figure)


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
