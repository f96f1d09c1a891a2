"""How fast rows are prepared and read, and what memory that takes.

    python -m benchmarks.data_rate [--data FILE] [--tokenizer FOLDER] [--rounds 3]

The file is prepared as a job would have it (one worker a core); without a tokenizer one is learned from the rows.

- `tokenize_ratio`: rows/s of the whole pipeline (read, parse, check, normalize, tokenize, deduplicate, commit, report)
  over rows/s of the tokenizer's bare `encode_batch_fast` on the same texts, in memory already, with as many threads; in
  turns, medians. Not in it is `start_up_s`, until the first block comes back: importing transformers, opening the
  tokenizer, starting the pool. `tokenize_ratio_whole` has it in.
- `rss_ratio`: the largest resident memory of all processes together while ten times the rows are prepared, over that
  for the rows. (The larger file is the smaller one ten times, with a number put to every input.)
- `second_time_s`: the stage, in a fresh process, on what is prepared already; `second_process_s` has the interpreter
  and its imports in it.
- `read_rows_per_s_per_core`: batches of 128 random rows, both sides gathered and padded as the trainer does; CPU time.

Each figure is taken in a process of its own. JSON on the last line; exit code 1 when a limit is broken.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

# The workers of the pool import this module, too: what takes time to import is imported where it is used.
from benchmarks.command_line import RECIPES, ROOT, parse, traces
from jobs.disk.rundir import RunDir

if TYPE_CHECKING:
    from jobs.spec import DataSpec
    from worker.training.journal import Journal
    from worker.training.rows.sources import Source
    from worker.training.rows.text import Template
    from worker.training.settings import TrainerSettings
    from worker.training.tasks.task import Task

KEYS = (
    "rows", "cores", "prepare_rows_per_s", "raw_rows_per_s", "tokenize_ratio", "tokenize_ratio_whole",
    "tokenize_ratios", "start_up_s", "second_time_s", "second_process_s", "read_rows_per_s_per_core", "rss_bytes",
    "rss_10x_bytes", "rss_ratio", "rows_10x", "prepare_10x_rows_per_s", "broken",
)  # fmt: skip
LIMITS: dict[str, Callable[[float], bool]] = {
    "read_rows_per_s_per_core": lambda rate: rate >= 100_000,
    "tokenize_ratio": lambda ratio: ratio >= 0.9,
    "rss_ratio": lambda ratio: ratio < 1.2,
    "second_time_s": lambda seconds: seconds < 1.0,
}
TIMES = 10
LEAST_ROWS = 10_000
_LOOK_S = 0.02
_BATCH = 128
_CHUNK = 1000


# -- the parent ------------------------------------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    """Run what the command line asks for; print figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data_rate")
    parser.add_argument("--data", type=Path, default=RECIPES)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--batches", type=int, default=1000, help="that are read")
    parser.add_argument("--least-rows", type=int, default=LEAST_ROWS, help="with fewer there is no rate")
    arguments = parse(parser, argv, rounds=1, batches=2, least_rows=1)
    if arguments.child:
        which, scratch = arguments.child
        print(json.dumps(CHILDREN[which](Path(scratch), arguments)))
        return 0
    with tempfile.TemporaryDirectory(prefix="longhaul-data-") as name:
        figures = measure(Path(name), arguments)
    figures["broken"] = [key for key, holds in LIMITS.items() if not holds(figures[key])]
    print(json.dumps(figures))
    return 1 if figures["broken"] and not arguments.smoke else 0


def measure(scratch: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    figures = {"rows": child("first", scratch, arguments)["rows"]}
    if figures["rows"] < arguments.least_rows:
        raise SystemExit(f"{figures['rows']} rows give no rate; name a file of {arguments.least_rows:,}")
    write = [child("write", scratch, arguments)]
    raw = [child("raw", scratch, arguments)]
    for _ in range(arguments.rounds - 1):
        write.append(child("write", scratch, arguments))
        raw.append(child("raw", scratch, arguments))
    again = [child("again", scratch, arguments) for _ in range(arguments.rounds)]
    rates = {key: statistics.median(one[key] for one in write) for key in ("rows_per_s", "whole_rows_per_s")}
    raw_rate = statistics.median(one["rows_per_s"] for one in raw)
    figures |= {
        "cores": len(os.sched_getaffinity(0)),
        "prepare_rows_per_s": rates["rows_per_s"],
        "raw_rows_per_s": raw_rate,
        "tokenize_ratio": rates["rows_per_s"] / raw_rate,
        "tokenize_ratio_whole": rates["whole_rows_per_s"] / raw_rate,
        "tokenize_ratios": [ours["rows_per_s"] / theirs["rows_per_s"] for ours, theirs in zip(write, raw, strict=True)],
        "start_up_s": statistics.median(one["start_up_s"] for one in write),
        "second_time_s": statistics.median(one["stage_s"] for one in again),
        "second_process_s": statistics.median(one["process_s"] for one in again),
        "read_rows_per_s_per_core": child("read", scratch, arguments)["read_rows_per_s_per_core"],
    }
    once = child("write", scratch, arguments, watched=True)["rss_bytes"]
    child("repeat", scratch, arguments)
    tenfold = child("write", scratch, arguments, watched=True)
    return figures | {
        "rss_bytes": once,
        "rss_10x_bytes": tenfold["rss_bytes"],
        "rss_ratio": tenfold["rss_bytes"] / once,
        "rows_10x": tenfold["rows"],
        "prepare_10x_rows_per_s": tenfold["rows_per_s"],
    }


def child(which: str, scratch: Path, arguments: argparse.Namespace, *, watched: bool = False) -> dict[str, Any]:
    """The figures that a fresh process prints; besides `process_s`, and `rss_bytes` if it is watched."""
    command = [sys.executable, "-m", "benchmarks.data_rate", "--data", arguments.data, "--child", which, scratch]
    command += ["--rounds", arguments.rounds, "--batches", arguments.batches]
    if arguments.tokenizer:
        command += ["--tokenizer", arguments.tokenizer]
    start = time.perf_counter()
    with subprocess.Popen(list(map(str, command)), cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        most = before = 0
        while watched and process.poll() is None:
            now = resident_bytes(process.pid)
            # Twice running: a child that is just being spawned seems to have all of its parent's memory for a moment.
            most, before = max(most, min(before, now)), now
            time.sleep(_LOOK_S)
        said, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{which} ended with {process.returncode}")
    figures: dict[str, Any] = json.loads(said.splitlines()[-1])
    return figures | {"rss_bytes": most, "process_s": time.perf_counter() - start}


def resident_bytes(pid: int) -> int:
    """Of a process and all its descendants; 0 for one that has just gone."""
    try:
        own = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        children = [file.read_text().split() for file in Path(f"/proc/{pid}/task").glob("*/children")]
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return own + sum(resident_bytes(int(one)) for some in children for one in some)


# -- the children ----------------------------------------------------------------------------------------------------


def first(scratch: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Model and prepared dataset in their stores, through check and prepare."""
    from benchmarks.corpus import prepared_job

    run = prepared_job(arguments.data, scratch, tokenizer=arguments.tokenizer, data={"max_invalid_fraction": 1.0})
    (scratch / "run").write_text(str(run.path))
    data = run.plan().data
    return {"rows": data.rows + data.validation_rows}


def write(scratch: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Prepare the file (or, once it is there, the tenfold one) into an empty folder."""
    from worker.training.dataset import writing
    from worker.training.dataset.assembly import cores
    from worker.training.journal import Journal

    heard: list[float] = []

    class Timed(Journal):
        def progress(self, *_: Any, **__: Any) -> None:
            heard.append(time.perf_counter())

    journal = Timed(scratch / "journal.jsonl")
    given = _preparation(scratch, arguments, journal)
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        start = time.perf_counter()
        writing.write_dataset(
            Path(folder), sources=[(given.source, given.templates)], model=given.model, embeddings=given.embeddings,
            data=given.data, task=given.task, journal=journal,
        )  # fmt: skip
        end = time.perf_counter()
        report = json.loads((Path(folder) / "dataset.json").read_bytes())
    rows = report["rows_read"]
    behind = max(1, rows - cores() * writing.BLOCK_ROWS)  # those of the first blocks fall into the start
    return {
        "rows": rows,
        "start_up_s": heard[0] - start,
        "rows_per_s": behind / (end - heard[0]),
        "whole_rows_per_s": rows / (end - start),
    }


def again(scratch: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """The stage on what is there."""
    from worker.training.journal import Journal
    from worker.training.prepare import prepare

    run = RunDir((scratch / "run").read_text())
    start = time.perf_counter()
    prepare(run, _settings(scratch), Journal(scratch / "journal.jsonl"))
    return {"stage_s": time.perf_counter() - start}


def raw(scratch: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """The tokenizer alone."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    from worker.training.dataset.tokens import TokenizerState
    from worker.training.dataset.writing import first_texts
    from worker.training.journal import Journal

    given = _preparation(scratch, arguments, Journal(scratch / "journal.jsonl"))
    tokenizer = TokenizerState.read(given.model).open()
    texts = first_texts([(given.source, given.templates)], given.data, 1 << 40)  # all of them
    start = time.perf_counter()
    for begin in range(0, len(texts), _CHUNK):
        tokenizer.encode_batch_fast(texts[begin : begin + _CHUNK], add_special_tokens=False)
    return {"rows_per_s": len(texts) / 2 / (time.perf_counter() - start)}


def read(scratch: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Random batches from the prepared files."""
    import numpy as np

    from benchmarks.corpus import dataset_of
    from worker.training.dataset.data import SIDES

    rows = dataset_of(RunDir((scratch / "run").read_text())).train
    lengths = {"input": rows.input_lengths, "target": rows.target_lengths}
    draw = np.random.default_rng(0)
    rates = []
    for _ in range(arguments.rounds):
        start = time.process_time()
        for _ in range(arguments.batches):
            chosen = draw.integers(0, len(rows), _BATCH)
            for side in SIDES:
                rows.gather(side, chosen, -(-int(lengths[side][chosen].max()) // 8) * 8, 0)
        rates.append(_BATCH * arguments.batches / (time.process_time() - start))
    return {"read_rows_per_s_per_core": statistics.median(rates)}


def repeat(scratch: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Write the file ten times over, no row twice."""
    from worker.training.journal import Journal

    given = _preparation(scratch, arguments, Journal(scratch / "journal.jsonl"))
    column = min(given.templates[0].columns)
    with gzip.open(scratch / "tenfold.jsonl.gz", "wt", compresslevel=1) as file:
        for copy in range(TIMES):
            for row in _rows(given.source):
                value = row[column]
                row[column] = [*value, f"copy {copy}"] if isinstance(value, list) else f"{value} {copy}"
                file.write(json.dumps(row) + "\n")
    shutil.move(scratch / "tenfold.jsonl.gz", scratch / "data" / "tenfold.jsonl.gz")
    return {}


def _rows(source: Source) -> Iterator[dict[str, Any]]:
    from worker.training.rows.reading import open_source

    for block in open_source(source).blocks(_CHUNK):
        yield from (dict(row.columns) for row in block.rows() if row.columns is not None)


@dataclass(frozen=True)
class Preparation:
    """What the stage *prepare* gives `write_dataset`."""

    source: Source
    templates: tuple[Template, Template]
    """Of input and target."""
    model: Path
    embeddings: int
    data: DataSpec
    task: Task


def _preparation(scratch: Path, arguments: argparse.Namespace, journal: Journal) -> Preparation:
    """For the run's file, or for the tenfold one."""
    from worker.training.models.model_files import read_config
    from worker.training.rows.origin import find_source
    from worker.training.rows.text import template
    from worker.training.tasks.registry import task_of

    run = RunDir((scratch / "run").read_text())
    plan, spec = run.plan(), run.spec()
    model = Path(str(plan.model.folder))
    task = task_of(spec, plan.task)
    layout = task.layout(read_config(model, plan.model.source))
    assert plan.data.input is not None, "rows of seq2seq have inputs"
    templates = template(plan.data.input, "data.input"), template(plan.data.target, "data.target")
    name = "tenfold.jsonl.gz" if (scratch / "data" / "tenfold.jsonl.gz").exists() else arguments.data.name
    return Preparation(
        source=find_source(name, "data.train", "auto", None, _settings(scratch), journal),
        templates=templates,
        model=model,
        embeddings=layout.shapes[layout.embedding][0],
        data=spec.data.model_copy(update={"validation": plan.data.validation_fraction}),
        task=task,
    )


def _settings(scratch: Path) -> TrainerSettings:
    from worker.training.settings import TrainerSettings

    return TrainerSettings(
        data=scratch / "data", prepared=scratch / "prepared", models=scratch / "models", device="cpu", offline=True,
        traces=traces(),
    )  # fmt: skip


CHILDREN: dict[str, Callable[[Path, argparse.Namespace], dict[str, Any]]] = {
    "first": first,
    "write": write,
    "again": again,
    "raw": raw,
    "read": read,
    "repeat": repeat,
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
