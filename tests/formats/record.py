"""Keep a run directory of the present format, without tensors and without this machine's paths."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from jobs.disk.event_log import event_line
from jobs.disk.rundir import RunDir
from jobs.events import Event
from jobs.version import FORMAT
from tests.support.recipes import ROWS
from tests.support.stack import Stack, tiny_job

KEPT = ("spec.json", "plan.json", "metrics.jsonl", "attempts")
NEUTRAL = "/srv/longhaul"


def record(target: Path) -> None:
    """Run a small job to its end, and keep what is text of its directory in `target/<job>`."""
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        lines = ROWS.read_text().splitlines(keepends=True)
        (home / "rows.jsonl").write_text("".join(lines[:64]))
        (home / "held_out.jsonl").write_text("".join(lines[64:76]))
        with Stack(home / "home", data=home) as stack:
            stack.start("service", "check", "prepare", "train")
            run = stack.submit(tiny_job(name="kept"))
            stack.wait_for_event(run, "job.succeeded", timeout=120)
            folder = target / run.id
            folder.mkdir(parents=True)
            for file in KEPT:
                source = run.path / file
                (shutil.copytree if source.is_dir() else shutil.copyfile)(source, folder / file)
            neutral = [Event.model_validate_json(_neutral(each.model_dump_json(), home)) for each in run.events()]
            (folder / "events.jsonl").write_bytes(b"".join(map(event_line, neutral)))
        for path in folder.rglob("*.json*"):
            if path.name != "events.jsonl":
                path.write_text(_neutral(path.read_text(), home))
        RunDir(folder).verified()


def _neutral(text: str, home: Path) -> str:
    return text.replace(str(home), NEUTRAL)


if __name__ == "__main__":
    record(Path(__file__).parent / str(FORMAT))
