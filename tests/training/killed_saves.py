"""Kills a save at many points, each in a forked child, and says what was found after it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Set
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from jobs.disk.rundir import RunDir
from jobs.spec import CheckpointSpec
from worker.training.checkpoints import pruning, saving, tensorfile
from worker.training.checkpoints.checkpoint import OPTIMIZER, WEIGHTS, TrainState, newest
from worker.training.journal import Journal

OWN = {saving.__file__, pruning.__file__, tensorfile.__file__}


def lines_run(act: Callable[[], object], at_line: Callable[[int, str], None], own: Set[str] = OWN) -> None:
    """Do something, and call `at_line` with number and place before each line of the code in the files `own`."""
    count = 0

    def look(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename not in own:
            return None
        if event == "line":
            at_line(count, f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}")
            count += 1
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        act()
    finally:
        sys.settrace(before)


def killed_at(act: Callable[[], object], target: int, own: Set[str] = OWN) -> tuple[str, bool]:
    """Do something in a forked child that is killed before that line: the place, and whether it came so far."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:

        def die_at(number: int, where: str) -> None:
            if number == target:
                os.write(writer, where.encode())
                os.kill(os.getpid(), signal.SIGKILL)

        lines_run(act, die_at, own)
        os._exit(1)
    os.close(writer)
    with os.fdopen(reader, "rb") as said:
        place = said.read().decode()
    _, status = os.waitpid(child, 0)
    return place, os.WIFSIGNALED(status)


def killed_saves(folder: Path, points: int) -> Iterator[dict[str, Any]]:
    """Of each point where it was, the step that a resume would continue from, and whether a save that is not disturbed
    then succeeds."""
    run = RunDir(folder / "job-1")
    run.checkpoints.mkdir(parents=True)
    journal = Journal(run.attempt_file(1))

    def save(step: int) -> None:
        tensors = {
            file: {f"{step}.{name}": torch.full((64, 64), float(step)) for name in range(4)}
            for file in (WEIGHTS, OPTIMIZER)
        }
        saving.write(
            run, TrainState(spec_sha256="s", micro_batch=1, step=step), tensors, CheckpointSpec(keep=2), journal
        )

    save(1)
    total = [0]
    lines_run(lambda: save(2), lambda number, place: total.__setitem__(0, number + 1))
    for point in range(points):
        target = point * total[0] // points
        for extra in run.checkpoints.glob("step-*2"):
            pruning.remove(extra)
        place, killed = killed_at(lambda: save(2), target)
        found = newest(run, "s", journal)
        pruning.clean(run)
        renamed = (run.checkpoints / "step-00000002").exists()
        save(2)
        again = newest(run, "s", journal)
        yield {
            "place": place, "killed": killed, "renamed": renamed, "found": found and found.state.step,
            "left": sorted(each.name for each in run.checkpoints.iterdir()), "again": again and again.state.step,
        }  # fmt: skip
