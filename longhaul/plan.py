"""`longhaul plan`: what a job would need, found out by a dry run; nothing is trained."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from rich.bar import Bar
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jobs.answers import Job, JsonObject
from jobs.memory_plan import MemoryPlan, layers
from jobs.plan import Plan
from jobs.preview import DataPreview
from jobs.spec import JobSpec
from jobs.text.units import bytes_alike, format_bytes, format_duration
from longhaul.api import ApiError, Longhaul
from longhaul.jobfile import apply_changes
from longhaul.preview import print_preview
from longhaul.tables import Column, Row, gpu_lines, print_facts, print_table

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

    job: Job
    plan: Plan | None
    """None: the job was rejected."""
    preview: DataPreview | None


def can_check(api: Longhaul) -> bool:
    """Whether a worker is there that checks jobs."""
    return any(worker["stage"] == "check" and worker["healthy"] for worker in api.workers()["data"])


def dry_run(api: Longhaul, make: Callable[..., Job], console: Console) -> DryRun:
    """Check a job, to the end of the check; Ctrl-C cancels it. `make` submits or clones it.

    Raises ApiError, Unreachable.
    """
    made = make(dry_run=True)
    try:
        with console.status("checking the job" if can_check(api) else "waiting for a worker that checks the job"):
            for _ in api.events(made["id"], on_trouble=lambda trouble: console.print(trouble, style="yellow")):
                pass
    except KeyboardInterrupt:
        with suppress(ApiError):  # its check has ended by now
            api.cancel(made["id"])
        raise
    ended = api.get(made["id"])
    if ended["status"] != "validated":
        return DryRun(ended, None, None)
    plan, preview = Plan.model_validate(api.plan(made["id"])), DataPreview.model_validate(api.preview(made["id"]))
    return DryRun(ended, plan, preview)


def print_plan(plan: Plan, preview: DataPreview, job: Job, console: Console) -> None:
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


def _steps(plan: Plan, job: Job) -> str:
    """How many, what limits them, and how sure that is."""
    estimated = "" if plan.data.complete else "estimated from the first rows"
    return "; ".join(filter(None, (f"{plan.steps:,}", plan.limit_text(max_hours_of(job)), estimated)))


def max_hours_of(job: Job) -> float | None:
    """`training.max_hours`, as the job has it."""
    training = (job["spec"] or {}).get("training")
    return training.get("max_hours") if isinstance(training, dict) else None


def too_few(plan: Plan, job: Job) -> list[str]:
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


# -- within hours ------------------------------------------------------------------------------------------------------
# `longhaul plan --hours`: what fits into so many hours: the job as it is, as LoRA, or with the next smaller model.
#
# Each is checked by a dry run of its own, on the GPU that the job is planned for.

FAMILIES = (
    tuple(f"google/flan-t5-{size}" for size in ("small", "base", "large", "xl", "xxl")),
    tuple(f"google-t5/t5-{size}" for size in ("small", "base", "large", "3b")),
    tuple(f"google/mt5-{size}" for size in ("small", "base", "large", "xl")),
    tuple(f"Qwen/Qwen2.5-{size}" for size in ("0.5B", "1.5B", "3B", "7B", "14B")),
    tuple(f"Qwen/Qwen2.5-{size}-Instruct" for size in ("0.5B", "1.5B", "3B", "7B", "14B")),
    tuple(f"Qwen/Qwen3-{size}" for size in ("0.6B", "1.7B", "4B", "8B", "14B")),
    ("meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-3B", "meta-llama/Llama-3.1-8B"),
    ("meta-llama/Llama-3.2-1B-Instruct", "meta-llama/Llama-3.2-3B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"),
    ("google-bert/bert-base-uncased", "google-bert/bert-large-uncased"),
    ("FacebookAI/roberta-base", "FacebookAI/roberta-large"),
    tuple(f"microsoft/deberta-v3-{size}" for size in ("xsmall", "small", "base", "large")),
    ("answerdotai/ModernBERT-base", "answerdotai/ModernBERT-large"),
)
"""Models that differ in size alone, the smallest first."""
_COLUMNS = (
    Column("job", folds=30),
    Column("steps", right=True, goes=1),
    Column("rows", right=True),
    Column("epochs", right=True),
    Column("all of it takes", right=True, folds=20),
)
_LORA = "method=lora"


@dataclass(frozen=True)
class Fit:
    """What fits of one job; null: no GPU's speed is known, or the job was refused (`error`)."""

    job: str
    """What is changed."""
    steps: int | None = None
    rows: int | None = None
    epochs: float | None = None
    hours_for_all: float | None = None
    """Of all steps that the job has without the limit."""
    error: str | None = None

    @classmethod
    def of(cls, name: str, job: Job, plan: Plan | None, hours: float) -> Fit:
        """By a dry run that has ended."""
        if plan is None:
            return cls(name, error=job["error"]["message"] if job["error"] else f"the check is {job['status']}")
        given = job["hyperparameters"]
        if (expected := known_hours(plan)) is None or not given["batch_size"] or not given["n_epochs"]:
            return cls(name)
        steps = min(plan.steps, int(plan.steps * hours / expected))
        rows = int(min(steps * given["batch_size"], plan.data.rows * given["n_epochs"]))
        return cls(name, steps, rows, rows / plan.data.rows, expected)


def known_hours(plan: Plan) -> float | None:
    """Of all its steps; None: no worker has reported a GPU for it whose speed is known."""
    return None if plan.time is None or plan.time.assumed else plan.time.hours_expected or None


def smaller(model: str) -> str | None:
    """The next smaller one of the same family; None: it is the smallest, or of none that is known."""
    pairs = (pair for family in FAMILIES for pair in itertools.pairwise(family))
    return next((less for less, larger in pairs if larger == model.partition("@")[0]), None)


def fits(api: Longhaul, job: JsonObject, first: DryRun, hours: float, console: Console) -> Iterator[Fit]:
    """Of the job, and of what trains faster. `first`: its dry run, without `training.max_hours`."""
    yield Fit.of("as it is", first.job, first.plan, hours)
    if first.plan is None or not known_hours(first.plan):
        return
    if first.job["spec"] is not None and first.job["spec"].get("resume_from"):  # its model and method stay
        return
    changes = [] if (first.job["method"] or {}).get("type") == "lora" else [_LORA]
    if (other := smaller(first.job["model"])) is not None:
        changes.append(f"model={other}")
    for change in changes:
        found = dry_run(api, partial(api.submit, apply_changes(copy.deepcopy(job), [change])), console)
        yield Fit.of(change, found.job, found.plan, hours)
        with suppress(ApiError):  # it is in no list in any case
            api.delete(found.job["id"])


def print_fits(found: list[Fit], hours: float, console: Console) -> None:
    """A line each."""
    limit = format_duration(3600 * hours)
    if found[0].steps is None:
        unknown = "what fits is not known: no train worker has reported a GPU for the job whose speed is known"
        print_facts([(f"in {limit}", unknown)], console)
        return
    console.print(f"\nwhat fits into {limit}", style="italic")
    print_table(_COLUMNS, [_cells(each) for each in found], console)
    console.print(
        f"with --set training.max_hours={hours:g} the run ends there, its learning rate scheduled for it", style="dim",
        highlight=False,
    )  # fmt: skip
    for each in found:
        if each.error is not None:
            console.print(f"{each.job}: {each.error}", style="dim", highlight=False)


def _cells(fit: Fit) -> dict[str, str]:
    if fit.steps is None or fit.rows is None or fit.epochs is None or fit.hours_for_all is None:
        return {"job": fit.job, "steps": "–", "rows": "–", "epochs": "–", "all of it takes": "not known"}
    return {
        "job": fit.job,
        "steps": f"{fit.steps:,}",
        "rows": f"{fit.rows:,}",
        "epochs": f"{fit.epochs:.2f}",
        "all of it takes": format_duration(3600 * fit.hours_for_all),
    }
