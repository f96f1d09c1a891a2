"""The memory plan in the stages check and prepare: made, drawn, and not made twice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jobs.disk.files import write_atomically
from jobs.disk.rundir import RunDir
from jobs.errors import DoesNotFit
from jobs.gpus import short_name
from jobs.memory_plan import PICTURE, Candidate, DType, MemoryPlan, OptimizerName, layers
from jobs.spec import JobSpec
from jobs.text.png import GRID, INK, LIMIT, MEMORY, PAGE, PLOT, png
from jobs.text.units import ByteUnit, byte_unit, format_bytes
from worker.training.journal import Journal
from worker.training.planning.budget import Budget, find_budget, plan_disk, plan_host
from worker.training.planning.memory_plan import plan_memory
from worker.training.settings import TrainerSettings
from worker.training.tasks.task import Task


def plan_stage(
    run: RunDir,
    spec: JobSpec,
    task: Task,
    config: Mapping[str, Any],
    longest: tuple[int, int],
    settings: TrainerSettings,
    journal: Journal,
    earlier: MemoryPlan | None = None,
    *,
    optimizer: OptimizerName | None = None,
    dtype: DType = "bfloat16",
) -> MemoryPlan:
    """The plan for rows of these lengths, with `memory.png` of it in the run directory, unless it is a trial's.

    `earlier`: that of check, which is as good for the same lengths and budget. `optimizer`: the one that a run began
    with; None: there is no run yet. `dtype`: of the model. Raises DoesNotFit, with the picture drawn, Rejected,
    DiskFull.
    """
    picture, trial = run.path / PICTURE, run.record().sweep is not None
    budget = find_budget(spec.memory, settings.device, settings.gpu, spec.resources)
    if earlier is not None and earlier.dtype == dtype and is_current(earlier, longest, budget, spec.resources.gpus):
        assert earlier.host is not None and earlier.disk is not None, "a plan of this stage has both"
        kept, on_host = earlier.host.copy_bytes, earlier.host.optimizer_bytes
        disk = plan_disk(run.path, spec, kept, earlier.disk.model_bytes)
        plan = earlier.model_copy(
            update={"host": plan_host(kept, on_host, earlier.host.available_bytes if on_host else None), "disk": disk}
        )
        drawn = picture.exists()  # and nothing in it has changed
    else:
        try:
            plan = plan_memory(
                spec,
                task,
                config,
                longest,
                device=settings.device,
                budget=budget,
                run=run.path,
                traces=settings.traces,
                optimizer=optimizer,
                dtype=dtype,
                offload=not trial,  # trials share a host, and nothing reserves its memory
                progress=journal.progress,
            )
        except DoesNotFit as refused:
            write_atomically(picture, draw(refused.memory))
            raise
        drawn = False
    if trial:
        picture.unlink(missing_ok=True)  # of a check that was refused, and lost before it could say so
    elif not drawn:
        write_atomically(picture, draw(plan))
    return plan


def is_current(plan: MemoryPlan, longest: tuple[int, int], budget: Budget, gpus: int) -> bool:
    """Whether a plan made now would be the same. A host's free memory changes by itself: there, whether it fits."""
    same = (plan.input_tokens, plan.target_tokens, plan.budget_source, plan.gpu, plan.gpus) == (
        *longest, budget.source, budget.gpu_name, gpus,
    )  # fmt: skip
    if plan.host is not None and plan.host.optimizer_bytes:
        host = None if budget.gpu is None else budget.gpu.host_memory_bytes
        same = same and host in (None, plan.host.available_bytes)
    return same and (plan.peak_bytes <= budget.limit if budget.source == "host" else plan.budget_bytes == budget.bytes)


# -- the picture ---------------------------------------------------------------------------------------------


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

UNTRACED, CHOSEN = "#6b4a4a", "#ffffff"
GAP = 8
"""Pixels between a text and the frame."""


def draw(plan: MemoryPlan) -> bytes:
    """A PNG, 1000 pixels wide: a bar for each candidate, the best on top, the chosen one framed; budget and limit."""
    return png(figure_of(plan))


def figure_of(plan: MemoryPlan) -> Figure:
    """The picture before it is rendered."""
    from matplotlib.figure import Figure  # half a second: only where something is drawn

    shown = plan.candidates
    figure = Figure(figsize=(10, 1.9 + 0.5 * len(shown)), dpi=100, facecolor=PAGE)
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.12)
    axes = figure.subplots()
    unit = byte_unit(plan.peak_bytes)
    widest = max(each.peak_bytes for each in shown) / unit.size
    budget = plan.budget_bytes / unit.size
    on_scale = budget <= 4 * widest  # else the bars of a small model would be hairlines
    for place, each in enumerate(shown):
        chosen = plan.chose(each)
        start = 0.0
        for part, colour in MEMORY.items():
            width = each.parts.get(part, 0) / unit.size
            axes.barh(place, width, left=start, height=0.7, color=colour, alpha=1.0 if each.fits else 0.45)
            start += width
        if not each.parts:
            axes.barh(place, each.peak_bytes / unit.size, height=0.7, color=UNTRACED)
        if chosen:
            axes.barh(place, start, height=0.7, fill=False, edgecolor=CHOSEN, linewidth=2.0)
        beside = max(each.peak_bytes / unit.size, budget if on_scale else 0.0) + 0.02 * widest
        weight = "bold" if chosen else "normal"
        axes.text(
            beside, place, _remark(each, chosen, unit), color=INK, va="center", fontweight=weight, in_layout=False
        )
    handles: list[Any] = [axes.barh(0, 0, color=colour, label=part) for part, colour in MEMORY.items()]
    if on_scale:
        limit = budget - plan.margin_bytes / unit.size
        handles.append(axes.axvline(budget, color=LIMIT, linewidth=2.0, label="budget"))
        handles.append(axes.axvline(limit, color=LIMIT, linewidth=1.0, linestyle="--", label="less a margin"))
    axes.set_xlim(0, 1.05 * max(widest, budget if on_scale else 0.0))
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set_yticks(range(len(shown)), [_name(each) for each in shown])
    where = "memory.budget" if plan.budget_source == "job" else short_name(plan.gpu) if plan.gpu else "budget"
    shape = f"{plan.input_tokens}/{plan.target_tokens} tokens"
    title = f"Memory at the peak, {shape} · {where}: {format_bytes(plan.budget_bytes)}"
    axes.set_title(title, color=INK, fontsize=14, loc="left")
    axes.set_xlabel(unit.name, color=INK)
    axes.tick_params(colors=INK)
    axes.grid(color=GRID, linewidth=0.6, axis="x")
    axes.set_axisbelow(True)
    axes.set_facecolor(PLOT)
    for spine in axes.spines.values():
        spine.set_color(GRID)
    figure.legend(
        handles=handles, loc="outside lower center", ncols=len(handles), fontsize=9, handlelength=1.2,
        columnspacing=1.2, facecolor=PLOT, edgecolor=GRID, labelcolor=INK,
    )  # fmt: skip
    _make_room(figure, axes)
    return figure


def _make_room(figure: Figure, axes: Axes) -> None:
    """Widen the scale until everything that is written beside the bars is within the frame."""
    figure.draw_without_rendering()  # lays it out
    frame = axes.get_window_extent().width
    needed = (text.get_position()[0] * frame / (frame - text.get_window_extent().width - GAP) for text in axes.texts)
    axes.set_xlim(0, max(axes.get_xlim()[1], *needed))


def _name(candidate: Candidate) -> str:
    how = layers(candidate.activation_checkpointing) if candidate.parts else "however recomputed"
    return f"{candidate.optimizer}\n{how}"


def _remark(candidate: Candidate, chosen: bool, unit: ByteUnit) -> str:
    least = "" if candidate.parts else "> "
    peak = f"{least}{unit.format(candidate.peak_bytes)}"
    if not candidate.fits:
        return f"{peak}: does not fit"
    rows = f"{peak}, {candidate.micro_batch} rows, time x {candidate.slowdown:.2f}"
    return f"{rows}  ← chosen" if chosen else rows
