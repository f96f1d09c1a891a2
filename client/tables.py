"""Jobs, one job and workers as tables."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from client.figures import clock, duration, loss, memory_needed, time_needed

_STATUS_STYLES = {"succeeded": "green", "failed": "red", "running": "cyan", "paused": "yellow", "cancelled": "dim"}


def print_jobs(page: dict[str, Any], console: Console) -> None:
    """One line a job."""
    if not page["data"]:
        console.print("no jobs yet: longhaul submit FILE")
        return
    table = Table(box=None, pad_edge=False)
    for title in ("id", "name", "status", "step", "loss", "submitted", "left"):
        table.add_column(title, no_wrap=True, justify="right" if title in ("step", "loss", "left") else "left")
    for job in page["data"]:
        progress = job["progress"]
        table.add_row(
            job["id"],
            Text(job["name"]),
            _status(job),
            f"{progress['step']:,}/{job['steps']:,}" if job["steps"] else "–",
            loss(job["best_loss"] if job["final_loss"] is None else job["final_loss"]),
            clock(job["created_at"]),
            duration(job["estimated_finish"] - time.time()) if job["estimated_finish"] else "–",
        )
    console.print(table)
    if page["has_more"]:
        console.print(f"more: longhaul list --after {page['last_id']}", style="dim", highlight=False)


def print_job(job: dict[str, Any], console: Console) -> None:
    """What matters about one job now."""
    progress, error = job["progress"], job["error"]
    wanted = "" if job["request"] == "none" else f" ({job['request']} requested)"
    lines: list[tuple[str, Any]] = [
        ("job", Text(f"{job['name']} · {job['id']}", style="bold")),
        ("status", Text.assemble(_status(job), wanted)),
    ]
    if error:
        lines.append(("cause", Text(f"{error['message']} [{error['code']}]", style="red")))
        if error.get("hint"):
            lines.append(("way out", Text(error["hint"])))
    if job["waiting"]:
        lines.append(("waits because", Text(job["waiting"])))
    if job["position"] is not None:
        lines.append(("before it", f"{job['position']} jobs in stage {job['stage']}"))
    lines.append(("model", Text(job["model"])))
    lines.append(("data", Text(str(job["training_file"]))))
    if job["steps"]:
        lines.append(("progress", f"step {progress['step']:,} of {job['steps']:,}, attempt {job['attempt']}"))
    if progress["at"]:
        speed = [f"{progress['rows_per_s']:.1f} rows/s"]
        if progress["tokens_per_s"] is not None:
            speed.append(f"{progress['tokens_per_s']:,.0f} tokens/s")
        if progress["mfu"] is not None:
            speed.append(f"MFU {progress['mfu']:.0%}")
        lines.append(("training loss", f"{loss(progress['loss'])} at {', '.join(speed)}"))
    elif needed := time_needed(job):
        lines.append(("time needed", Text(needed)))
    if memory := memory_needed(job):
        lines.append(("memory needed", Text(memory)))
    if job["first_loss"] is not None:
        lines.append(("validation loss", f"{loss(job['first_loss'])} at first, best {loss(job['best_loss'])}"))
    if job["estimated_finish"]:
        left = job["estimated_finish"] - time.time()
        lines.append(("estimated finish", f"{clock(job['estimated_finish'])} (in {duration(left)})"))
    if job["checkpoint"]:
        lines.append(("checkpoint", job["checkpoint"]))
    if job["fine_tuned_model"]:
        lines.append(("model is in", job["fine_tuned_model"]))
    lines.append(("run directory", job["run_dir"]))
    grid = Table.grid(padding=(0, 2))
    for name, value in lines:
        grid.add_row(Text(name, style="dim"), value)
    console.print(grid)


def print_events(events: list[dict[str, Any]], console: Console) -> None:
    """One line an event."""
    for event in events:
        console.print(Text(f"{event['number']:>5}  {clock(event['at'])}  {event['message']}"), soft_wrap=True)


def _status(job: dict[str, Any]) -> Text:
    return Text(job["status"], style=_STATUS_STYLES.get(job["status"], ""))
