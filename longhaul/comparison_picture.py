"""The picture of `longhaul compare`: memory by category beside its limit, and the loss of each job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from jobs.comparison.answer import ComparedJob, Comparison
from jobs.text.png import GRID, INK, LIMIT, LINES, MEMORY, PAGE, PLOT, png
from jobs.text.units import byte_unit
from longhaul.comparison import LETTERS
from longhaul.jobfile import BadInput

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POINTS = 400
"""Of a curve, at most."""
Curve = Sequence[tuple[float, float]]
"""Steps and losses."""
_LONGEST = 24
"""Characters of a name."""


def draw(found: Comparison, curves: Mapping[str, Curve]) -> bytes:
    """A PNG, 1000 pixels wide. `curves`: by id of the job. Raises BadInput where matplotlib is not installed."""
    return png(figure_of(found, curves))


def figure_of(found: Comparison, curves: Mapping[str, Curve]) -> Figure:
    """The picture before it is rendered: a bar a job, its limit as a line across; below, a curve a job."""
    try:
        from matplotlib.figure import Figure  # half a second: only where something is drawn
    except ModuleNotFoundError:
        raise BadInput("--png needs matplotlib, which is not installed", hint="pip install matplotlib") from None
    bars = 1.4 + 0.5 * len(found.jobs)
    figure = Figure(figsize=(10, bars + 3.6), dpi=100, facecolor=PAGE)
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.12)
    memory, losses = figure.subplots(2, height_ratios=(bars, 3.6))
    _memory(memory, found.jobs)
    _losses(losses, found.jobs, curves)
    for axes in (memory, losses):
        axes.set_facecolor(PLOT)
        axes.tick_params(colors=INK)
        axes.grid(color=GRID, linewidth=0.6)
        axes.set_axisbelow(True)
        for spine in axes.spines.values():
            spine.set_color(GRID)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(
                loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0, fontsize=9,
                facecolor=PLOT, edgecolor=GRID, labelcolor=INK,
            )  # fmt: skip
    return figure


def _memory(axes: Axes, jobs: Sequence[ComparedJob]) -> None:
    """What the plans predict, and what the first steps took."""
    known = [(place, job.memory) for place, job in enumerate(jobs) if job.memory is not None]
    unit = byte_unit(*(memory.peak_bytes for _, memory in known))
    for place, memory in known:
        start = 0.0
        for part, colour in MEMORY.items():
            width = memory.parts.get(part, 0) / unit.size
            label = part if place == known[0][0] else None
            axes.barh(place, width, left=start, height=0.6, color=colour, label=label)
            start += width
        measured = memory.measured_bytes
        if measured is not None:
            axes.plot(measured / unit.size, place, marker="D", color=INK, markersize=6, label=_once(axes, "measured"))
        if memory.limit_bytes <= 4 * max(each.peak_bytes for _, each in known):  # else the bars would be hairlines
            limit = memory.limit_bytes / unit.size
            axes.plot([limit, limit], [place - 0.42, place + 0.42], color=LIMIT, lw=2.5, label=_once(axes, "limit"))
        fits = "" if memory.fits else ": does not fit"
        axes.annotate(
            f"{unit.format(memory.peak_bytes)}{fits}", (0, place - 0.32), xytext=(3, 1), textcoords="offset points",
            color=INK, fontsize=9, va="bottom",
        )  # fmt: skip
    axes.set_ylim(len(jobs) - 0.5, -0.65)
    axes.set_yticks(range(len(jobs)), [_name(jobs, place) for place in range(len(jobs))])
    axes.set_xlim(left=0)
    axes.set_xlabel(unit.name, color=INK)
    axes.set_title("Memory at the peak, as planned", color=INK, fontsize=12, loc="left")


def _losses(axes: Axes, jobs: Sequence[ComparedJob], curves: Mapping[str, Curve]) -> None:
    """The training loss of each job that has one."""
    for place, job in enumerate(jobs):
        if curve := curves.get(job.id):
            steps, values = zip(*curve, strict=True)
            axes.plot(steps, values, color=LINES[place], linewidth=1.8, label=_name(jobs, place))
    if axes.lines:
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=max(0.0, axes.get_ylim()[0]))
    else:
        axes.text(0.5, 0.5, "no metrics yet", color=INK, ha="center", va="center", transform=axes.transAxes)
    axes.set_xlabel("step", color=INK)
    axes.set_ylabel("loss", color=INK)
    axes.set_title("Training loss", color=INK, fontsize=12, loc="left")


def _name(jobs: Sequence[ComparedJob], place: int) -> str:
    name = jobs[place].name
    return f"{LETTERS[place]} {name if len(name) <= _LONGEST else f'{name[: _LONGEST - 1]}…'}".replace("$", r"\$")


def _once(axes: Axes, label: str) -> str | None:
    """The label, unless the legend has it."""
    return None if label in axes.get_legend_handles_labels()[1] else label
