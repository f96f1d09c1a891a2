"""`longhaul plan`: what a job would need, found out by a dry run; nothing is trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rich.bar import Bar
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jobs.memory_plan import MemoryPlan, layers
from jobs.plan import Plan
from jobs.preview import DataPreview
from jobs.spec import JobSpec
from jobs.text.units import bytes_alike, format_bytes
from longhaul.answers import JobDict
from longhaul.api import Longhaul
from longhaul.columns import Column, Row, print_facts, print_table
from longhaul.preview import print_preview
from longhaul.tables import gpu_lines

BAR = 32
"""Characters of the budget."""
_TRIED = (
    Column(""),
    Column("optimizer"),
    Column("recomputation", folds=16),
    Column("micro-batch", right=True),
    Column("peak", right=True),
    Column("time a row", right=True, goes=2),
    Column("score", right=True, goes=1),
)


@dataclass(frozen=True)
class DryRun:
    """A dry run that has ended."""

    job: JobDict
    plan: Plan | None
    """None: the job was rejected."""
    preview: DataPreview | None


def can_check(api: Longhaul) -> bool:
    """Whether a worker is there that checks jobs."""
    return any(worker["stage"] == "check" and worker["healthy"] for worker in api.workers()["data"])


def dry_run(api: Longhaul, make: Callable[..., JobDict], console: Console) -> DryRun:
    """Check a job, to the end of the check; Ctrl-C cancels it. `make` submits or clones it.

    Raises ApiError, Unreachable.
    """
    made = make(dry_run=True)
    try:
        with console.status("checking the job" if can_check(api) else "waiting for a worker that checks the job"):
            for _ in api.events(made["id"], on_trouble=lambda trouble: console.print(trouble, style="yellow")):
                pass
    except KeyboardInterrupt:
        api.cancel(made["id"])
        raise
    ended = api.get(made["id"])
    if ended["status"] != "validated":
        return DryRun(ended, None, None)
    plan, preview = Plan.model_validate(api.plan(made["id"])), DataPreview.model_validate(api.preview(made["id"]))
    return DryRun(ended, plan, preview)


def print_plan(plan: Plan, preview: DataPreview, job: JobDict, console: Console) -> None:
    """Some rows, the parts of the peak, what was tried, and the rest in words. `job`: the dry run."""
    memory = plan.memory
    assert memory is not None, "check has planned it"
    print_preview(preview, console)
    console.print("\nmemory at the peak", style="italic")
    console.print(_parts(memory))
    console.print("\nwhat was tried, the best first", style="italic")
    print_table(_TRIED, _candidates(memory), console)
    console.print()
    lines = [
        ("memory", memory.text),
        ("why", memory.why),
        ("time", plan.time.text if plan.time and plan.time.text else "unknown without a GPU"),
        ("steps", _steps(plan, job)),
        ("host", _host(memory)),
        ("disk", _disk(memory)),
    ]
    print_facts([(name, text) for name, text in lines if text] + gpu_lines(job), console)
    for few in too_few(plan, job):
        console.print(few, style="yellow", highlight=False)


def _steps(plan: Plan, job: JobDict) -> str:
    """How many, what limits them, and how sure that is."""
    estimated = "" if plan.data.complete else "estimated from the first rows"
    return "; ".join(filter(None, (f"{plan.steps:,}", plan.limit_text(max_hours_of(job)), estimated)))


def max_hours_of(job: JobDict) -> float | None:
    """`training.max_hours`, as the job has it."""
    training = (job["spec"] or {}).get("training")
    return training.get("max_hours") if isinstance(training, dict) else None


def too_few(plan: Plan, job: JobDict) -> list[str]:
    """For people, where a model hardly learns in so few steps, or so few rows do not tell how good it is. `job`: the
    dry run."""
    if not job["spec"]:
        return []
    spec = JobSpec.model_validate(job["spec"])
    return [few for few in (plan.few_steps(spec.training), plan.few_held_out(spec)) if few]


def _parts(memory: MemoryPlan) -> Table:
    """Each part beside its place in the budget."""
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right", no_wrap=True)
    table.add_column(width=BAR)
    parts = {**memory.parts, "to spare": memory.budget_bytes - memory.peak_bytes}
    *sizes, budget = bytes_alike(*parts.values(), memory.budget_bytes)
    begin = 0
    for (name, size), shown in zip(parts.items(), sizes, strict=True):
        style = "dim" if name == "to spare" else ""
        place = Bar(memory.budget_bytes, begin, begin + size, width=BAR, color="bright_black" if style else "cyan")
        table.add_row(Text(name, style="dim"), Text(shown, style), place)
        begin += size
    table.add_row(Text("budget", style="dim"), budget)
    return table


def _candidates(memory: MemoryPlan) -> list[Row]:
    rows: list[Row] = []
    peaks = bytes_alike(*(each.peak_bytes for each in memory.candidates))
    for each, peak in zip(memory.candidates, peaks, strict=True):
        chosen = memory.chose(each)
        cells = {
            "": "→" if chosen else "",
            "optimizer": each.optimizer,
            "recomputation": layers(each.activation_checkpointing) if each.parts else "however recomputed",
            "micro-batch": f"{each.micro_batch}" if each.fits else "does not fit",
            "peak": f"{'' if each.parts else '> '}{peak}",
            "time a row": f"x {each.slowdown:.2f}" if each.fits else "–",
            "score": f"{each.score:.2f}" if each.fits else "–",
        }
        style = "bold" if chosen else "" if each.fits else "dim"
        rows.append({name: Text(cell, style) for name, cell in cells.items()})
    return rows


def _host(memory: MemoryPlan) -> str | None:
    host = memory.host
    if host is None:
        return None
    way = "checkpoints are written in the background" if host.fits else "no room: checkpoints are streamed"
    copy, available = bytes_alike(host.copy_bytes, host.available_bytes)
    if host.optimizer_bytes:
        states = format_bytes(host.optimizer_bytes)
        return f"of {available} in all, optimizer states take {states}, a copy for checkpoints {copy}; {way}"
    return f"a copy of weights and states takes {copy} of {available} free; {way}"


def _disk(memory: MemoryPlan) -> str | None:
    disk = memory.disk
    if disk is None:
        return None
    one, model, needed, free = bytes_alike(disk.checkpoint_bytes, disk.model_bytes, disk.needed_bytes, disk.free_bytes)
    return f"at most {disk.checkpoints} checkpoints of {one} and a model of {model}: {needed} of {free} free"
