"""The loss curve as a PNG: a file of the run directory, and a picture in chat."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from itertools import pairwise

from jobs.events import Event, JobCancelled, JobFailed, JobSubmitted, JobSucceeded
from jobs.metrics import MetricRow
from jobs.text.png import GRID, INK, PAGE, PLOT, png
from jobs.text.units import format_figure
from worker.sinks.base import DONE, Outcome, SinkJob

FILE_NAME = "loss.png"
MOST_POINTS = 2000
FAINT, TRAINING, VALIDATION, ATTEMPT = "#435677", "#7fb2ff", "#ffb454", "#b48ef0"
SETTLED = 0.05
"""Share of all steps after which the loss has left its first values."""
MARGIN = 0.12
"""Around everything, inches."""

# matplotlib is not thread-safe, and two sinks draw from two threads.
_drawing = threading.Lock()


class CurveSink:
    """Leaves `loss.png` in the run directory when a job with anything to show ends."""

    name = "curve"
    follows_metrics = False

    def accepts(self, submitted: JobSubmitted) -> bool:
        """All but dry runs, and trials: many at a time, for which somebody waits."""
        return not submitted.dry_run and submitted.sweep is None

    def event(self, event: Event, job: SinkJob) -> Outcome:
        """Draws at the terminal event."""
        if isinstance(event.fact, JobSucceeded | JobFailed | JobCancelled):
            picture = draw_job(job)
            if picture is not None:
                job.write(FILE_NAME, picture)
        return DONE

    def metrics(self, rows: Sequence[MetricRow], job: SinkJob) -> Outcome:
        """All rows are read at the end."""
        return DONE

    def close(self, job: SinkJob) -> None:
        """Nothing is held."""


def draw_job(job: SinkJob) -> bytes | None:
    """The curve of this job; None when there is nothing to show."""
    rows = job.rows()
    if not rows and not job.evaluations:
        return None
    later = [row.step for before, row in pairwise(rows) if row.attempt != before.attempt]
    return draw(job.submitted.name, [(row.step, row.loss) for row in rows], job.evaluations, later)


def draw(
    title: str, training: Sequence[tuple[int, float]], validation: Mapping[int, float], later: Sequence[int] = ()
) -> bytes:
    """A PNG of 1000 × 560 pixels: training loss (faint, and smoothed on top), validation points, attempts.

    `later`: the first steps of the attempts after the first. Where the first steps would take most of the scale, it
    ends below them, and the title says so.
    """
    from matplotlib.figure import Figure  # half a second: only where something is drawn
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    points = [(step, loss) for step, loss in training if math.isfinite(loss)]
    points = points[:: max(1, math.ceil(len(points) / MOST_POINTS))]
    held_out = sorted((step, loss) for step, loss in validation.items() if math.isfinite(loss))
    with _drawing:
        figure = Figure(figsize=(6.25, 3.5), dpi=160, facecolor=PAGE)
        figure.set_layout_engine("constrained", w_pad=MARGIN, h_pad=MARGIN)
        axes = figure.add_subplot(facecolor=PLOT)
        if points:
            steps, losses = zip(*points, strict=True)
            window = max(1, len(points) // 50)
            axes.plot(steps, losses, color=TRAINING if window == 1 else FAINT, linewidth=1.8 if window == 1 else 1.0,
                      label="training" if window == 1 else None)  # fmt: skip
            if window > 1:
                axes.plot(steps, _smooth(losses, window), color=TRAINING, linewidth=2.0, label="training")
        if held_out:
            steps, losses = zip(*held_out, strict=True)
            best_step, best = min(held_out, key=lambda point: point[1])
            label = f"validation (best {format_figure(best)} at step {best_step:,})"
            axes.plot(steps, losses, color=VALIDATION, marker="o", markersize=5, linewidth=1.4, label=label)
        for number, step in enumerate(later):
            axes.axvline(step, color=ATTEMPT, linestyle=":", linewidth=1.2, label=None if number else "next attempt")
        title += " · loss"
        if (scale := settled([*points, *held_out])) is not None:
            axes.set_ylim(*scale)
            title += f", from {format_figure(max(loss for _, loss in [*points, *held_out]))}"
        if points or held_out:
            axes.set_xlim(left=0)
            axes.set_ylim(bottom=max(0.0, axes.get_ylim()[0]))
        axes.set_title(title.replace("$", r"\$"), color=INK, fontsize=11, loc="left", wrap=True)
        axes.set_xlabel("step", color=INK)
        axes.set_ylabel("loss", color=INK)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.tick_params(colors=INK)
        axes.grid(color=GRID, linewidth=0.6)
        for spine in axes.spines.values():
            spine.set_color(GRID)
        if points or held_out:
            axes.legend(facecolor=PLOT, edgecolor=GRID, labelcolor=INK, fontsize="small")
        return png(figure)


def settled(points: Sequence[tuple[int, float]]) -> tuple[float, float] | None:
    """The scale without the first steps, if they alone would take most of it."""
    last = max((step for step, _ in points), default=0)
    settled = [loss for step, loss in points if step >= SETTLED * last]
    if not settled:
        return None
    low, high = min(settled), max(settled)
    highest = max(loss for _, loss in points)
    space = 0.08 * (high - low)
    return (low - space, high + space) if highest - low > 2 * (high - low) > 0 else None


def _smooth(values: Sequence[float], window: int) -> list[float]:
    """Mean over the last `window` values."""
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    return [(sums[i + 1] - sums[max(0, i + 1 - window)]) / min(i + 1, window) for i in range(len(values))]
