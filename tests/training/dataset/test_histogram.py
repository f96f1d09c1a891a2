"""The picture of lengths: what it shows, and that it can be read on any page."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from jobs.text.png import png
from worker.training.dataset import report
from worker.training.dataset.report import Lengths

SHORT = np.arange(5, 14, dtype=np.int32)


def shown(monkeypatch: pytest.MonkeyPatch, lengths: Mapping[str, Lengths]) -> list[Any]:
    """The plots of the picture."""
    drawn: list[Figure] = []

    def noted(figure: Figure) -> bytes:
        drawn.append(figure)
        return png(figure)

    monkeypatch.setattr(report, "png", noted)
    picture = Image.open(io.BytesIO(report.draw(lengths)))
    assert picture.size == (1000, 420)
    assert picture.mode == "RGBA" and picture.getchannel("A").getpixel((2, 2)) == 0, "the page shows through"
    return drawn[0].axes


def test_the_axis_ends_at_the_longest_row_and_a_far_limit_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, targets = shown(monkeypatch, {"input": Lengths.of(SHORT, 2048), "target": Lengths.of(SHORT * 2, 24)})
    assert inputs.get_xlim() == (0, 14) and not inputs.lines
    assert inputs.get_title(loc="right") == "limit 2,048: 0 cut"
    assert [line.get_xdata()[0] for line in targets.lines] == [24]
    assert targets.get_xlim()[1] > 26 and targets.get_title(loc="right") == "limit 24: 1 cut"


def test_labels_have_no_histogram_of_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = Lengths.of(np.ones(9, np.int32), 1)
    assert [
        one.get_title(loc="left") for one in shown(monkeypatch, {"input": Lengths.of(SHORT, 64), "target": labels})
    ] == ["inputs"]
    assert [one.get_title(loc="left") for one in shown(monkeypatch, {"input": labels, "target": labels})] == ["inputs"]
