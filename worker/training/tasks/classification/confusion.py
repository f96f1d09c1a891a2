"""`confusion.png`: which class is taken for which other, of the commonest classes; the others together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jobs.text.colours import INK, PAGE, PLOT
from jobs.text.png import png
from worker.training.dataset.data import Int64

MOST = 20
OTHERS = "(others)"
_LONGEST = 24
"""Characters of a label."""


def of_the_commonest(truth: Int64, guessed: Int64, labels: Sequence[str]) -> tuple[Int64, list[str]]:
    """[K, K] rows of a class (first index) by the class that they are taken for, and the K labels.

    `truth`, `guessed`: [rows] numbers of labels.
    """
    counts = np.bincount(truth, minlength=len(labels))
    shown = np.argsort(-counts, kind="stable")[:MOST]
    place = np.full(len(labels), len(shown), np.int64)
    place[shown] = np.arange(len(shown))
    size = len(shown) + (len(shown) < len(labels))
    cells = np.bincount(place[truth] * size + place[guessed], minlength=size * size).reshape(size, size)
    return cells.astype(np.int64), [*(labels[number] for number in shown), *([OTHERS] if size > len(shown) else [])]


def draw(cells: Int64, labels: Sequence[str]) -> bytes:
    """A PNG: the share of a class's rows as shade, their number as text."""
    from matplotlib.figure import Figure  # half a second: only where something is drawn

    size = 3.0 + 0.42 * len(labels)
    figure = Figure(figsize=(size + 1, size), dpi=100, facecolor=PAGE, layout="constrained")
    axes = figure.subplots()
    axes.set_facecolor(PLOT)
    shares = cells / np.maximum(1, cells.sum(1, keepdims=True))
    axes.imshow(shares, cmap="Blues_r", vmin=0, vmax=1)
    names = [label if len(label) <= _LONGEST else label[: _LONGEST - 1] + "…" for label in labels]
    names = [name.replace("$", r"\$") for name in names]  # no formula
    axes.set_xticks(range(len(names)), names, rotation=90, color=INK)
    axes.set_yticks(range(len(names)), names, color=INK)
    for row, column in np.argwhere(cells).tolist():
        dark = shares[row, column] < 0.6
        axes.text(
            column, row, f"{cells[row, column]}", ha="center", va="center", color=INK if dark else PLOT, fontsize=8,
            in_layout=False,
        )  # fmt: skip
    axes.set_xlabel("taken for", color=INK)
    axes.set_ylabel("class", color=INK)
    axes.tick_params(colors=INK)
    return png(figure)
