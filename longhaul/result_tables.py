"""What jobs leave behind, what was uploaded, and who works here, as tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from jobs.answers import Checkpoint, Dataset, DatasetDetail, RunFile, Worker
from jobs.heartbeat import device_of
from longhaul.figures import clock, duration, loss, size
from longhaul.tables import Column, Row, print_facts, print_table

_CHECKPOINTS = (
    Column("id"),
    Column("step", right=True, goes=3),
    Column("valid. loss", right=True),
    Column("size", right=True, goes=2),
    Column("written", goes=1),
)
_FILES = (Column("path", folds=24), Column("size", right=True), Column("written", goes=1))
_DATASETS = (Column("a job names it"), Column("size", right=True), Column("uploaded", goes=1))
_WORKERS = (
    Column("stage"),
    Column("box"),
    Column("process", goes=1),
    Column("job"),
    Column("since", goes=2),
    Column("on", folds=16, goes=4),
    Column("heard", goes=3),
)


def print_checkpoints(checkpoints: Sequence[Checkpoint], console: Console) -> None:
    """One line a checkpoint; its id is what `resume_from` takes."""
    rows = [
        {
            "id": each["id"],
            "step": f"{each['step_number']:,}",
            "valid. loss": loss(each["metrics"].get("valid_loss")),
            "size": size(each["bytes"]),
            "written": clock(each["created_at"]),
        }
        for each in checkpoints
    ]
    print_table(_CHECKPOINTS, rows, console)


def print_files(files: Sequence[RunFile], console: Console) -> None:
    """One line a file."""
    rows: list[Row] = [
        {"path": Text(each["path"]), "size": size(each["bytes"]), "written": clock(each["modified_at"])}
        for each in files
    ]
    print_table(_FILES, rows, console)


def print_datasets(datasets: Sequence[Dataset], console: Console) -> None:
    """One line a data set."""
    if not datasets:
        console.print("no data sets yet: longhaul datasets add FILE")
        return
    rows: list[Row] = [
        {"a job names it": Text(each["uri"]), "size": size(each["bytes"]), "uploaded": clock(each["created_at"])}
        for each in datasets
    ]
    print_table(_DATASETS, rows, console)


def print_dataset(dataset: DatasetDetail, console: Console) -> None:
    """One data set; of the report the figures, and the counts by reason or character."""
    lines: list[tuple[str, str | Text]] = [
        ("data set", dataset["uri"]),
        ("size", f"{size(dataset['bytes'])} ({dataset['bytes']:,} bytes)"),
        ("sha256", dataset["sha256"]),
        ("uploaded", clock(dataset["created_at"])),
        ("jobs", (", ".join(dataset["jobs"]) or "none") + (" (in use)" if dataset["in_use"] else "")),
    ]
    if dataset["report"] is None:
        lines.append(("report", "none: no existing job has prepared it"))
    else:
        lines.append(("prepared by", dataset["report_job"] or "–"))
        for key, value in dataset["report"].items():
            if (text := _reported(value)) is not None:
                lines.append((key.replace("_", " "), text))
    print_facts(lines, console)


def _reported(value: object) -> str | None:
    """A figure, or counts with their sum; None for what has parts of its own."""
    match value:
        case bool() | None:
            return None
        case int():
            return f"{value:,}"
        case float() | str():
            return str(value)
        case dict() if all(isinstance(each, int) for each in value.values()):
            counts = ", ".join(f"{name}: {count:,}" for name, count in value.items())
            return f"{sum(value.values()):,}" + (f" ({counts})" if counts else "")
        case _:
            return None


def print_workers(workers: Sequence[Worker], console: Console, *, damaged: Sequence[str] = ()) -> None:
    """One line a worker, and why where it takes no work; and the jobs that none takes."""
    for job in damaged:
        console.print(Text(f"{job} is damaged: `longhaul show {job}` says what is wrong", style="red"), soft_wrap=True)
    if not workers:
        console.print("no workers: `longhaul local` (or `make up`) starts them")
        return
    rows: list[Row] = [
        {
            "stage": Text(each["stage"], style="" if each["healthy"] else "red"),
            "box": Text(each.get("box") or "–"),
            "process": f"{each.get('pid', '–')}",
            "job": each["job"] or "–",
            "since": clock(each["job_since"]) if each["job_since"] else "–",
            "on": Text(_place(each, workers)),
            "heard": f"{duration(each['heartbeat_age_s'])} ago",
        }
        for each in sorted(workers, key=lambda each: (each["stage"], _device(each), each.get("slot") or 0))
        if not each.get("slot") or each["job"] or not each["healthy"]
    ]
    boxes = {each.get("box") for each in workers}
    print_table(_WORKERS if len(boxes) > 1 else [each for each in _WORKERS if each.title != "box"], rows, console)
    known = {gpu["uuid"]: gpu for each in workers if (gpu := each.get("gpu")) and not each.get("engine")}
    for gpu in known.values():
        if (gpu.get("measured") or {}).get("examined_at") is None:
            console.print(
                Text(f"{gpu['name']} was never examined: `longhaul doctor` does it", style="dim"), soft_wrap=True
            )
    for each in workers:
        if (ahead_s := each.get("clock_ahead_s")) is not None:
            clocks = f"{duration(abs(ahead_s))} {'ahead of' if ahead_s > 0 else 'behind'} that of Redis"
            what = f"the clock of {each['stage']} on {each.get('box')} is {clocks}: set both by NTP, or times are wrong"
            console.print(Text(what, style="red"), soft_wrap=True)
    first = next((_version(each) for each in workers if each["stage"] == "publish"), None)
    for each in workers:
        if first and (own := _version(each)) and own != first:
            what = f"{each['stage']} on {each.get('box')} is of Longhaul {own}, and publish of {first}: update that box"
            console.print(Text(what, style="red"), soft_wrap=True)
    for why in dict.fromkeys(
        f"{each['stage']} takes no work: {each['why']}" for each in workers if not each["healthy"]
    ):
        console.print(Text(why, style="red"), soft_wrap=True)


def _version(worker: Worker) -> str | None:
    return (worker.get("versions") or {}).get("longhaul")


def _device(worker: Worker) -> str:
    gpu = worker.get("gpu")
    uuid = gpu["uuid"] if gpu else None
    return device_of(worker["name"], worker.get("parent_pid"), uuid, worker.get("box"), worker.get("engine"))


def _place(worker: Worker, workers: Sequence[Worker]) -> str:
    gpu, slot = worker.get("gpu"), worker.get("slot")
    if slot:
        return f"slot {slot} of {gpu['name'] if gpu else worker.get('device')}"
    slots = {each.get("slot") for each in workers if slot is not None and _device(each) == _device(worker)}
    shared = f", {len(slots)} slots" if len(slots) > 1 else ""
    if gpu:
        several = f"{count} × " if (count := gpu.get("count", 1)) > 1 else ""
        rest = engine if (engine := _engine(worker)) else f"driver {gpu['driver']}"
        return f"{several}{gpu['name']}, {size(gpu['memory_bytes'])}, {rest}{shared}"
    return ", ".join(filter(None, [worker.get("device") or "–", _engine(worker)])) + shared


def _engine(worker: Worker) -> str:
    return f"engine {engine}" if (engine := worker.get("engine")) else ""
