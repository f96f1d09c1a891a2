"""`longhaul plan --hours`: what fits into so many hours: the job as it is, as LoRA, or with the next smaller model.

Each is checked by a dry run of its own, on the GPU that the job is planned for.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from rich.console import Console

from jobs.plan import Plan
from jobs.text.units import format_duration
from longhaul.answers import JobDict, JsonObject
from longhaul.api import ApiError, Longhaul
from longhaul.columns import Column, print_facts, print_table
from longhaul.jobfile import apply_changes
from longhaul.plan import DryRun, dry_run

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
    def of(cls, name: str, job: JobDict, plan: Plan | None, hours: float) -> Fit:
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
