"""What jobs leave behind, what was uploaded, and who works here, as tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from longhaul.answers import CheckpointDict, DatasetDetailDict, DatasetDict, RunFileDict, WorkerDict
from longhaul.figures import clock, duration, loss, size

_RIGHT = ("step", "size", "valid. loss")


def print_checkpoints(checkpoints: Sequence[CheckpointDict], console: Console) -> None:
    """One line a checkpoint; its id is what `resume_from` takes."""
    if not checkpoints:
        console.print("no checkpoint yet")
        return
    table = _table("id", "step", "valid. loss", "size", "written")
    for each in checkpoints:
        table.add_row(
            each["id"],
            f"{each['step_number']:,}",
            loss(each["metrics"].get("valid_loss")),
            size(each["bytes"]),
            clock(each["created_at"]),
        )
    console.print(table)


def print_files(files: Sequence[RunFileDict], console: Console) -> None:
    """One line a file."""
    table = _table("path", "size", "written")
    for each in files:
        table.add_row(Text(each["path"]), size(each["bytes"]), clock(each["modified_at"]))
    console.print(table)


def print_datasets(datasets: Sequence[DatasetDict], console: Console) -> None:
    """One line a data set."""
    if not datasets:
        console.print("no data sets yet: longhaul datasets add FILE")
        return
    table = _table("a job names it", "size", "uploaded")
    for each in datasets:
        table.add_row(Text(each["uri"]), size(each["bytes"]), clock(each["created_at"]))
    console.print(table)


def print_dataset(dataset: DatasetDetailDict, console: Console) -> None:
    """One data set; of the report what is a figure by itself."""
    lines = [
        ("data set", dataset["uri"]),
        ("size", f"{size(dataset['bytes'])} ({dataset['bytes']:,} bytes)"),
        ("sha256", dataset["sha256"]),
        ("uploaded", clock(dataset["created_at"])),
        ("jobs", (", ".join(dataset["jobs"]) or "none") + (" (in use)" if dataset["in_use"] else "")),
    ]
    if dataset["report"] is None:
        lines.append(("report", "none: no existing job has read it"))
    else:
        lines.append(("read by", dataset["report_job"] or "–"))
        for key, value in dataset["report"].items():
            if isinstance(value, int | float | str) and not isinstance(value, bool):
                lines.append((key.replace("_", " "), f"{value:,}" if isinstance(value, int) else str(value)))
    grid = Table.grid(padding=(0, 2))
    for name, text in lines:
        grid.add_row(Text(name, style="dim"), Text(text))
    console.print(grid)


def print_workers(workers: Sequence[WorkerDict], console: Console, *, damaged: Sequence[str] = ()) -> None:
    """One line a worker, and why where it takes no work; and the jobs that none takes."""
    for job in damaged:
        console.print(Text(f"{job} is damaged: `longhaul show {job}` says what is wrong", style="red"), soft_wrap=True)
    if not workers:
        console.print("no workers: `longhaul local` (or `make up`) starts them")
        return
    table = _table("stage", "process", "job", "since", "on", "heard")
    for each in workers:
        table.add_row(
            Text(each["stage"], style="" if each["healthy"] else "red"),
            f"{each.get('pid', '–')}",
            each["job"] or "–",
            clock(each["job_since"]) if each["job_since"] else "–",
            Text(_place(each)),
            f"{duration(each['heartbeat_age_s'])} ago",
        )
    console.print(table)
    for each in workers:
        if not each["healthy"]:
            console.print(Text(f"{each['stage']} takes no work: {each['why']}", style="red"), soft_wrap=True)


def _place(worker: WorkerDict) -> str:
    gpu = worker.get("gpu")
    if gpu:
        return f"{gpu['name']}, {size(gpu['memory_bytes'])}, driver {gpu['driver']}"
    return worker.get("device") or "–"


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in titles:
        table.add_column(title, no_wrap=True, justify="right" if title in _RIGHT else "left")
    return table
