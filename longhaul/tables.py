"""Jobs, one job and its events as tables."""

from __future__ import annotations

import math
import re
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from jobs.answers import Checkpoint, Job, JobList, MetricDict, ShownEvent
from jobs.evaluation_metrics import chosen_text
from jobs.plan import limit_words
from jobs.state import is_open
from jobs.text.units import format_number, format_share, one_line
from jobs.verdict import ConfidenceInterval, measured, warns
from longhaul.figures import clock, duration, largest_units, loss, memory_needed, size, time_needed

# -- columns -----------------------------------------------------------------------------------------------------------
# Tables: where the terminal is too narrow, ids get short, then columns go, and then texts are folded.

GAP, INDENT = 2, 2
FOLDED = 8
"""Characters of a line of a folded text, at least."""
SHORT_ID = 8
"""Digits of an id: those of its second, more or less."""
Row = Mapping[str, str | Text]


@dataclass(frozen=True)
class Column:
    """A column, and what becomes of it where there is no room for all of them."""

    title: str
    right: bool = False
    goes: int = 0
    """Its turn to be left out, from 1; 0: never."""
    folds: int | None = None
    """Folded to as many characters before another column goes."""
    short: Callable[[Sequence[str]], Sequence[str]] | None = None
    """Shorter cells, for where there is no room for all columns."""


def print_table(columns: Sequence[Column], rows: Sequence[Row], console: Console) -> None:
    """One line a row, or more where a text is folded. Where nothing else helps, lines are wider than the terminal."""
    if _total(min(width, each.folds or width) for each, width in _widths(columns, rows)) > console.width:
        rows = _shortened(columns, rows)
    for shown in _choices(columns):
        if _total(min(width, each.folds or width) for each, width in _widths(shown, rows)) <= console.width:
            break
    least = _total(min(width, FOLDED) if each.folds else width for each, width in _widths(shown, rows))
    table = Table(box=None, pad_edge=False, width=least if least > console.width else None)
    spare = console.width - _total(min(width, each.folds or width) for each, width in _widths(shown, rows))
    for each, width in _widths(shown, rows):
        side: Literal["left", "right"] = "right" if each.right else "left"
        if each.folds:  # the first of them gets what is left, or gives what is missing
            folded = min(width, max(FOLDED, each.folds + spare))
            spare -= folded - min(width, each.folds)
            table.add_column(each.title, overflow="fold", justify=side, width=folded)
        else:
            table.add_column(each.title, no_wrap=True, justify=side)
    for row in rows:
        cells = zip(shown, table.columns, strict=True)
        table.add_row(*(_broken(row[each.title], column.width) for each, column in cells))
    console.print(table, crop=False)


def short_ids(ids: Sequence[str]) -> list[str]:
    """Of each the first digits, as many as tell all of them apart, `SHORT_ID` at least."""
    digits = [each.partition("-")[2] for each in ids]
    most = max(map(len, digits), default=0)
    short = next((n for n in range(SHORT_ID, most) if len({each[:n] for each in digits}) == len(digits)), most)
    return [each[:short] for each in digits]


def _shortened(columns: Sequence[Column], rows: Sequence[Row]) -> Sequence[Row]:
    for column in columns:
        if column.short:
            cells = column.short([str(row[column.title]) for row in rows])
            rows = [{**row, column.title: cell} for row, cell in zip(rows, cells, strict=True)]
    return rows


def _broken(cell: str | Text, width: int | None) -> str | Text:
    """A text whose lines are no wider, broken after a space or a mark between words where there is one."""
    if width is None or cell_len(str(cell)) <= width:
        return cell
    lines, rest = [], cell if isinstance(cell, Text) else Text(cell)
    while cell_len(rest.plain) > width:
        fits = next(at for at in range(len(rest), 0, -1) if cell_len(rest.plain[:at]) <= width)
        last = re.match(r".*\s", rest.plain[:fits]) or re.match(r".*[-_./:]", rest.plain[:fits])
        line, rest = rest.divide([last.end() if last else fits])
        lines.append(line)
    return Text("\n").join([*lines, rest])


def print_facts(facts: Sequence[tuple[str, str | Text]], console: Console) -> None:
    """A name and a value in each line. A value wraps between words; one with too long a word starts below its name."""
    label = max((cell_len(name) for name, _ in facts), default=0)
    for name, value in facts:
        text = value if isinstance(value, Text) else Text(value)
        longest = max(map(cell_len, text.plain.split()), default=0)
        if label + GAP + longest <= console.width:
            line = Table.grid(padding=(0, GAP))
            line.add_column(width=label)
            line.add_row(Text(name, style="dim"), text)
            console.print(line)
            continue
        console.print(Text(name, style="dim"))
        whole = INDENT + longest > console.width  # the terminal breaks it, and copies it whole
        console.print(text if whole else Padding(text, (0, 0, 0, INDENT)), soft_wrap=whole)


def width_of(columns: Sequence[Column], rows: Sequence[Row]) -> int:
    """Characters of a line in which nothing is folded."""
    return _total(width for _, width in _widths(columns, rows))


def _choices(columns: Sequence[Column]) -> Iterator[list[Column]]:
    """All columns, then ever fewer."""
    for turn in range(1 + max(each.goes for each in columns)):
        yield [each for each in columns if not 0 < each.goes <= turn]


def _widths(columns: Sequence[Column], rows: Sequence[Row]) -> Iterator[tuple[Column, int]]:
    for each in columns:
        yield each, max(map(cell_len, (each.title, *(str(row[each.title]) for row in rows))))


def _total(widths: Iterable[int]) -> int:
    every = list(widths)
    return sum(every) + GAP * (len(every) - 1)


# -- tables ------------------------------------------------------------------------------------------------------------

_STATUS_STYLES = {
    "succeeded": "green",
    "failed": "red",
    "running": "cyan",
    "paused": "yellow",
    "cancelled": "dim",
    "damaged": "red",
}
_COLUMNS = (
    Column("name", folds=8),
    Column("id", short=short_ids),
    Column("status", folds=19),
    Column("pos.", right=True, goes=3),
    Column("prio.", right=True, goes=2),
    Column("step", right=True, goes=6),
    Column("loss", right=True, goes=4),
    Column("submitted", right=True, goes=1),
    Column("left", right=True, goes=5, short=largest_units),
)


def print_jobs(page: JobList, console: Console, *, filtered: bool = False, options: Sequence[str] = ()) -> None:
    """One line a job. `options` are those of the command that lists the page after this one."""
    if not page["data"]:
        unseen = "" if "--trials" in options else " (--trials shows those of sweeps)"
        console.print("no such jobs" if filtered else f"no jobs yet{unseen}: longhaul submit FILE")
        return
    print_table(_COLUMNS, [_cells(job) for job in page["data"]], console)
    if page["has_more"]:
        more = shlex.join(["longhaul", "list", *options, "--after", str(page["last_id"])])
        console.print(f"more: {more}", style="dim", highlight=False, soft_wrap=True)


def _cells(job: Job) -> dict[str, str | Text]:
    """What stands in each column."""
    before = f" at {job['stage']}" if job["status"] == "failed" and not job["attempt"] else ""
    why = f"{before}: {job['error']['code']}" if job["status"] in ("paused", "failed") and job["error"] else ""
    why += " (dry run)" if job["dry_run"] else ""
    left = job["estimated_finish"] - time.time() if _is_open(job) and job["estimated_finish"] else None
    return {
        "id": job["id"],
        "name": Text(job["name"]),
        "status": Text.assemble(_status(job), why),
        "pos.": "–" if job["queue_position"] is None else f"{job['queue_position']}",
        "prio.": f"{job['priority']}",
        "step": f"{job['progress']['step']:,}/{job['steps']:,}" if job["steps"] else "–",
        "loss": loss(job["best_loss"] if job["final_loss"] is None else job["final_loss"]),
        "submitted": clock(job["created_at"]),
        "left": duration(left),
    }


def print_job(job: Job, console: Console, checkpoints: Sequence[Checkpoint] = ()) -> None:
    """What matters about one job now; its checkpoints, newest first, where they were asked for."""
    progress, error = job["progress"], job["error"]
    wanted = "" if job["requested"] == "none" else f" ({job['requested']} requested)"
    lines: list[tuple[str, str | Text]] = [
        ("job", Text(f"{job['name']} · {job['id']}", style="bold")),
        ("status", Text.assemble(_status(job), wanted)),
    ]
    if error:
        lines.append(("cause", Text(f"{error['message']} [{error['code']}]", style="red")))
        if hint := error.get("hint"):
            lines.append(("hint", Text(hint)))
    if job["waiting_reason"]:
        lines.append(("waits because", Text(job["waiting_reason"])))
    if job["engine"]:
        lines.append(("engine", job["engine"] + (f", task {job['task']}" if job["task"] else "")))
    lines += gpu_lines(job)
    if job["queue_position"] is not None:
        place = f"{job['queue_position']}, stage {job['stage']}"
        lines.append(("in the queue", f"{place} (priority {job['priority']})" if job["priority"] else place))
    if job["cloned_from"]:
        lines.append(("cloned from", job["cloned_from"]))
    if job["sweep"]:
        lines.append(("trial of", job["sweep"]))
    lines.append(("model", Text(job["model"])))
    lines.append(("data", Text(str(job["training_file"]))))
    if job["steps"]:
        limit = f" ({words})" if (words := limit_words(job["limited_by"])) else ""
        lines.append(("progress", f"step {progress['step']:,} of {job['steps']:,}{limit}, attempt {job['attempt']}"))
    if progress["at"]:
        rate = progress["rows_per_s"]
        speed = [] if rate is None else [f"{format_number(rate, 3)} rows/s"]
        if progress["tokens_per_s"] is not None:
            speed.append(f"{format_number(progress['tokens_per_s'])} tokens/s")
        if progress["mfu"] is not None:
            speed.append(f"MFU {format_share(progress['mfu'])}")
        when = "" if job["status"] == "running" else " in the last steps"
        lines.append(
            ("training loss", f"{loss(progress['loss'])}{when}" + (f" at {', '.join(speed)}" if speed else ""))
        )
    elif needed := time_needed(job):
        lines.append(("time needed", Text(needed)))
    if memory := memory_needed(job):
        lines.append(("memory needed", Text(memory)))
    if job["first_loss"] is not None:
        kept = "" if job["final_loss"] in (None, job["best_loss"]) else f", {loss(job['final_loss'])} of the model"
        figures = f"{loss(job['first_loss'])} at first, best {loss(job['best_loss'])}{kept}"
        lines.append(("validation loss", figures))
    if job["kind"] == "evaluate":
        intervals = {name: ConfidenceInterval(**each) for name, each in job["final_intervals"].items()}
        lines += measured(job["final_loss"], job["final_metrics"], intervals).items()
    if job["verdict"] is not None:
        lines.append(("quality", Text(job["verdict"]["text"], "yellow" if warns(job["verdict"]["outcome"]) else "")))
    for title, at in (("estimated start", job["estimated_start"]), ("estimated finish", job["estimated_finish"])):
        if at and _is_open(job):
            lines.append((title, f"{clock(at)} (in {duration(at - time.time())})"))
    for number, each in enumerate(checkpoints):
        figures = f"{each['path']} (loss {loss(each['metrics'].get('valid_loss'))}, {size(each['bytes'])})"
        lines.append(("" if number else "checkpoints", figures))
    if job["checkpoint"] and not checkpoints:
        lines.append(("checkpoint", job["checkpoint"]))
    if job["fine_tuned_model"]:
        by, place = job["chosen_by"], job["fine_tuned_model"]
        figures_kept = job["final_loss"], job["final_metrics"], job["better_step"], job.get("kept_from")
        chosen = "" if by is None else f" ({chosen_text(by, *figures_kept)})"
        lines.append(("model is in", f"{place}{chosen}"))
    lines.append(("run directory", job["run_dir"]))
    print_facts(lines, console)


def gpu_lines(job: Job) -> list[tuple[str, str | Text]]:
    """Which GPUs can take it, and why the others cannot; nothing where there is no choice."""
    gpus = job["gpus"]
    if len(gpus) < 2 and all(gpu["can_take"] for gpu in gpus):
        return []
    told = [gpu["why"] or f"{gpu['name']} ({size(gpu['memory_bytes'])}) can take it" for gpu in gpus]
    return [("" if number else "GPUs", Text(line)) for number, line in enumerate(told)]


def print_events(events: Sequence[ShownEvent], console: Console) -> None:
    """One line an event."""
    for event in events:
        console.print(Text(f"{event['number']:>5}  {clock(event['at'])}  {one_line(event['message'])}"), soft_wrap=True)


def _is_open(job: Job) -> bool:
    return is_open(job["status"])


def _status(job: Job) -> Text:
    doubtful = job["verdict"] is not None and warns(job["verdict"]["outcome"])
    return Text(job["status"], style="yellow" if doubtful else _STATUS_STYLES.get(job["status"], ""))


# -- sparklines --------------------------------------------------------------------------------------------------------
# Rows of metrics as small curves, a line a field.

WIDTH = 48
NARROWEST = 12
"""Characters of a curve, before a column of figures goes."""
FIELDS = ("loss", "learning_rate", "grad_norm", "rows_per_s", "tokens_per_s", "memory_bytes")
_BLOCKS = "▁▂▃▄▅▆▇█"
_FIGURES = (
    Column(""),
    Column("first", right=True, goes=1),
    Column("last", right=True),
    Column("lowest", right=True, goes=3),
    Column("highest", right=True, goes=2),
)


def sparkline(values: Sequence[float | None]) -> str:
    """One character a value between the lowest and the highest; a space where there is none."""
    known = [value for value in values if value is not None]
    low = min(known, default=0.0)
    span = max(known, default=0.0) - low
    return "".join(
        " " if value is None else _BLOCKS[round((value - low) / span * (len(_BLOCKS) - 1)) if span else 0]
        for value in values
    )


def print_metrics(rows: Sequence[MetricDict], fields: Sequence[str], console: Console) -> None:
    """First, curve, last, lowest and highest of each field, from one row or more."""
    title = f"steps {rows[0]['step']:,} to {rows[-1]['step']:,}"
    curves = [[_finite(row.get(field)) for row in rows] for field in fields]
    lines = [_figures(field, values) for field, values in zip(fields, curves, strict=True)]
    room = max(NARROWEST, console.width - width_of(_FIGURES, lines) - GAP)
    for line, values in zip(lines, curves, strict=True):
        line[title] = sparkline(_thinned(values, room))
    print_table((*_FIGURES[:2], Column(title), *_FIGURES[2:]), lines, console)


def _figures(field: str, values: Sequence[float | None]) -> dict[str, str | Text]:
    known = [value for value in values if value is not None]
    shown = _wording(field)
    figures = [shown(each) for each in (known[0], known[-1], min(known), max(known))] if known else ["–"] * 4
    return {"": Text(field)} | dict(zip(("first", "last", "lowest", "highest"), figures, strict=True))


def _thinned(values: Sequence[float | None], points: int) -> list[float | None]:
    """At most so many, each the mean of its stretch."""
    count = min(points, len(values))
    stretches = [values[at * len(values) // count : (at + 1) * len(values) // count] for at in range(count)]
    known = [[value for value in stretch if value is not None] for stretch in stretches]
    return [sum(each) / len(each) if each else None for each in known]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _wording(field: str) -> Callable[[float], str]:
    return size if field.endswith("_bytes") else format_number
