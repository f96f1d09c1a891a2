"""Jobs, one job and its events as tables."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from jobs.evaluation_metrics import chosen_text
from jobs.plan import limit_words
from jobs.state import is_open
from jobs.text.printable import one_line
from jobs.text.units import format_number, format_share
from jobs.verdict import ConfidenceInterval, measured, warns
from longhaul.answers import CheckpointDict, EventDict, JobDict, PageDict
from longhaul.columns import Column, print_facts, print_table, short_ids
from longhaul.figures import clock, duration, largest_units, loss, memory_needed, size, time_needed

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


def print_jobs(
    page: PageDict[JobDict], console: Console, *, filtered: bool = False, options: Sequence[str] = ()
) -> None:
    """One line a job. `options` are those of the command that lists the page after this one."""
    if not page["data"]:
        unseen = "" if "--trials" in options else " (--trials shows those of sweeps)"
        console.print("no such jobs" if filtered else f"no jobs yet{unseen}: longhaul submit FILE")
        return
    print_table(_COLUMNS, [_cells(job) for job in page["data"]], console)
    if page["has_more"]:
        more = shlex.join(["longhaul", "list", *options, "--after", str(page["last_id"])])
        console.print(f"more: {more}", style="dim", highlight=False, soft_wrap=True)


def _cells(job: JobDict) -> dict[str, str | Text]:
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


def print_job(job: JobDict, console: Console, checkpoints: Sequence[CheckpointDict] = ()) -> None:
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


def gpu_lines(job: JobDict) -> list[tuple[str, str | Text]]:
    """Which GPUs can take it, and why the others cannot; nothing where there is no choice."""
    gpus = job["gpus"]
    if len(gpus) < 2 and all(gpu["can_take"] for gpu in gpus):
        return []
    told = [gpu["why"] or f"{gpu['name']} ({size(gpu['memory_bytes'])}) can take it" for gpu in gpus]
    return [("" if number else "GPUs", Text(line)) for number, line in enumerate(told)]


def print_events(events: Sequence[EventDict], console: Console) -> None:
    """One line an event."""
    for event in events:
        console.print(Text(f"{event['number']:>5}  {clock(event['at'])}  {one_line(event['message'])}"), soft_wrap=True)


def _is_open(job: JobDict) -> bool:
    return is_open(job["status"])


def _status(job: JobDict) -> Text:
    doubtful = job["verdict"] is not None and warns(job["verdict"]["outcome"])
    return Text(job["status"], style="yellow" if doubtful else _STATUS_STYLES.get(job["status"], ""))
