"""200 loads from 8 threads.

`ours` loads with `worker.training.network.model.load`, `bare` calls `from_pretrained` with dtypes in turn, as the
control. A process of its own, because threads that load without a lock may leave transformers unusable in it:
`afterwards` says what our load makes of that.
"""

from __future__ import annotations

import json
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from jobs.errors import Rejected
from jobs.spec import parse_spec
from tests.training.forked import fork
from worker.training.network.model import load
from worker.training.tasks.registry import task_of
from worker.training.tasks.task import Task

THREADS, LOADS = 8, 25
CPU = torch.device("cpu")
BARE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def ours(folder: Path, number: int, task: Task) -> list[str]:
    """Load as the trainer does; returns what is wrong with the model."""
    model = load(
        folder, CPU, task=task, dropout=None, fused=bool(number % 2), activation_checkpointing=number % 3
    ).model
    return defects(model, torch.bfloat16)


def bare(folder: Path, number: int, task: Task) -> list[str]:
    """Load without lock or guards."""
    dtype = BARE_DTYPES[number % len(BARE_DTYPES)]
    return defects(task.auto_class().from_pretrained(folder, dtype=dtype), dtype)


def defects(model: torch.nn.Module, dtype: torch.dtype) -> list[str]:
    """Of `meta` and `dtype`, what some parameter of the model has wrong."""
    parameters = list(model.parameters())
    found = ["meta"] if any(parameter.is_meta for parameter in parameters) else []
    return [*found, "dtype"] if any(parameter.dtype != dtype for parameter in parameters) else found


def main(how: str, name: str, folders: list[Path]) -> dict[str, object]:
    """Counts of good loads and of each defect."""
    call: Callable[[Path, int, Task], list[str]] = {"ours": ours, "bare": bare}[how]
    task = task_of(parse_spec({"data": {"train": "rows.jsonl"}}), name)
    start, counts = threading.Barrier(THREADS), Counter[str]()

    def work(thread: int) -> None:
        start.wait()
        for number in range(thread, thread + LOADS):
            try:
                counts.update(call(folders[number % len(folders)], number, task) or ["good"])
            except Exception as error:
                counts[f"{type(error).__name__}: {error}"] += 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        afterwards = ", ".join(ours(folders[0], 0, task)) or "good"
    except Rejected as refusal:
        afterwards = refusal.detail_code
    return {"counts": dict(counts), "afterwards": afterwards}


def threaded_loads(how: str, task: str, folders: list[Path]) -> Any:
    """What `main` returns, in a process of its own."""

    def work() -> None:
        warnings.simplefilter("ignore")
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        print(json.dumps(main(how, task, folders)))

    code, out, err = fork(work, HF_HUB_OFFLINE="1").wait()
    assert code == 0, err
    return json.loads(out.splitlines()[-1])
