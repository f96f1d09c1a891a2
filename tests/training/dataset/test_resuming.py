"""A preparation that is killed, loses a worker or has no room resumes where it was, and ends with the same bytes."""

from __future__ import annotations

import os
import pickle
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest

from jobs.disk.rundir import RunDir
from jobs.errors import DiskFull, StageError
from jobs.reasons import Reason
from tests.support.machine import longest_file
from tests.support.processes import children
from tests.training.workplace import Workplace, dataset_of, pairs
from worker.training.dataset import writing
from worker.training.dataset.encoding import Recipe
from worker.training.journal import Journal
from worker.training.rows.origin import find_source
from worker.training.rows.text import template
from worker.training.tasks.seq2seq import builtin
from worker.training.tasks.seq2seq.task import Seq2Seq

LIMIT_S = 300
ROWS = 12_000
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """Enough rows for a pool and several commits, a duplicate and an unusable one far apart."""
    place = Workplace(tmp_path_factory.mktemp("place"), planned=False)
    place.pictured = True  # as do processes that tests here start
    rows: list[Any] = pairs(ROWS)
    rows[9_000], rows[11_000] = rows[3], "{"
    place.rows("rows.jsonl", rows)
    return place


@pytest.fixture(autouse=True, scope="module")
def of_two_workers(place: Workplace) -> dict[str, bytes]:
    """What *prepare* makes of those rows, and of a model, which all others use."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "cores", lambda: 2)
        return content(Path(place.prepare(place.job())["data"]["prepared"]))


@pytest.fixture
def run(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A checked job over those rows, whose dataset is not there; this process prepares it without others."""
    monkeypatch.setattr(writing, "cores", lambda: 1)
    shutil.rmtree(place.settings.prepared, ignore_errors=True)
    run = place.job()
    place.check(run)
    return run


@pytest.fixture(scope="module")
def uninterrupted(place: Workplace, of_two_workers: dict[str, bytes]) -> dict[str, bytes]:
    """What one process alone makes of those rows."""
    folder = place.root / "uninterrupted"
    folder.mkdir()
    write(place, folder, workers=1)
    return content(folder)


def write(place: Workplace, folder: Path, workers: int, progress: Callable[..., None] = lambda *_: None) -> None:
    """The dataset of all rows into a folder that may hold a beginning."""

    class WatchedJournal(Journal):
        def progress(self, *arguments: Any, **options: Any) -> None:
            progress(*arguments)

    spec = place.job().spec()
    journal = WatchedJournal(place.root / "journal.jsonl")
    model = next(path for path in place.settings.models.iterdir() if path.name.startswith("t5-tiny-"))
    source = find_source("rows.jsonl", "data.train", "auto", None, place.settings, journal)
    writing.write_dataset(
        folder,
        sources=[(source, (template("input", "data.input"), template("target", "data.target")))],
        model=model,
        embeddings=builtin.VOCABULARY,
        data=spec.data,
        task=Seq2Seq(),
        journal=journal,
        workers=workers,
    )


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_any_number_of_workers_gives_the_same_bytes(
    of_two_workers: dict[str, bytes], uninterrupted: dict[str, bytes]
) -> None:
    assert of_two_workers == uninterrupted
    assert not active_children()


def test_killed_in_the_middle_it_goes_on(
    place: Workplace, run: RunDir, uninterrupted: dict[str, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    first = start(place, run)
    log = wait_for(lambda: next(iter(place.settings.prepared.glob("partial-*/work.log")), None), first, run)
    wait_for(lambda: log.stat().st_size, first, run)
    workers = [os.pidfd_open(pid) for pid in children(first.pid)]
    first.send_signal(signal.SIGKILL)
    first.wait(LIMIT_S)
    assert [folder.name for folder in place.settings.prepared.iterdir() if folder.name != ".locks"] == [log.parent.name]
    for child in workers:  # nobody outlives the parent
        assert select.select([child], [], [], LIMIT_S)[0]
        os.close(child)
    caplog.set_level("INFO")
    place.prepare_only(run)
    assert "resuming behind the " in caplog.text
    assert content(dataset_of(run).folder) == uninterrupted
    assert run.plan().data.rows + run.plan().data.validation_rows == ROWS - 2


@pytest.mark.parametrize(
    ("by", "reason", "code"),
    [
        (signal.SIGKILL, Reason.HOST_OUT_OF_MEMORY, "worker_killed"),
        (signal.SIGPROF, Reason.REJECTED, "chat_template"),  # the kernel, when a template computes for too long
    ],
)
def test_a_worker_that_is_killed_is_an_error_and_no_work_is_lost(
    by: signal.Signals, reason: Reason, code: str, place: Workplace, tmp_path: Path, uninterrupted: dict[str, bytes]
) -> None:
    def kill_one(*_: float) -> None:
        if (tmp_path / "work.log").stat().st_size and (children := active_children()):
            assert children[0].pid is not None
            os.kill(children[0].pid, by)

    with pytest.raises(StageError) as caught:
        write(place, tmp_path, workers=2, progress=kill_one)
    assert (caught.value.reason, caught.value.detail_code) == (reason, code)
    fractions: list[float] = []
    write(place, tmp_path, workers=2, progress=fractions.append)
    assert content(tmp_path) == uninterrupted
    assert fractions == sorted(fractions)


# -- room ------------------------------------------------------------------------------------------------------------


def test_a_write_that_fails_costs_no_more_than_what_was_not_committed(
    place: Workplace, run: RunDir, uninterrupted: dict[str, bytes]
) -> None:
    with longest_file(len(uninterrupted["input.tokens"]) // 2), pytest.raises(OSError):
        place.prepare(run)
    (partial,) = place.settings.prepared.glob("partial-*")
    assert (partial / "work.log").stat().st_size
    place.prepare(run)
    assert content(dataset_of(run).folder) == uninterrupted
    assert not partial.exists()


def test_a_full_disk_is_named_and_what_was_complete_is_kept(
    place: Workplace, run: RunDir, uninterrupted: dict[str, bytes]
) -> None:
    place.settings.prepared.mkdir()
    size = sum(map(len, uninterrupted.values())) // 2
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", os.fspath(place.settings.prepared)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("a small disk of its own needs root (mount)")
    try:
        with pytest.raises(DiskFull) as caught:
            place.prepare(run)
        assert "no room is left on the disk" in str(caught.value)
        (log,) = place.settings.prepared.glob("partial-*/work.log")
        committed = log.read_bytes()
        assert committed
        subprocess.run(["mount", "-o", "remount,size=64m", os.fspath(place.settings.prepared)], check=True)
        place.prepare(run)
        assert content(dataset_of(run).folder) == uninterrupted
    finally:
        subprocess.run(["umount", "-l", os.fspath(place.settings.prepared)], check=True)


# -- processes -------------------------------------------------------------------------------------------------------


def start(place: Workplace, run: RunDir) -> subprocess.Popen[bytes]:
    environment = os.environ | {
        "LONGHAUL_DATA": str(place.settings.data),
        "LONGHAUL_PREPARED": str(place.settings.prepared),
        "LONGHAUL_MODELS": str(place.settings.models),
        "LONGHAUL_DEVICE": "cpu",
        "HF_HUB_OFFLINE": "1",
        "LONGHAUL_PARENT_PID": str(os.getpid()),
    }
    with open(run.trainer_log, "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "worker.training", "prepare", str(run.path)], cwd=ROOT, env=environment, stderr=log
        )


def wait_for(look: Callable[[], Any], process: subprocess.Popen[bytes], run: RunDir) -> Any:
    """What `look` finds once it finds something; the process still runs."""
    until = time.monotonic() + LIMIT_S
    while not (found := look()):
        assert process.poll() is None, run.trainer_log.read_text()
        assert time.monotonic() < until, "timed out"
        time.sleep(0.002)
    return found


def test_a_worker_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, worker.training.dataset.assembly, worker.training.dataset.encoding, tokenizers;"
        "print({'torch', 'transformers', 'matplotlib', 'pyarrow'} & set(sys.modules))"
    )
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    assert said == "set()\n"


@pytest.mark.parametrize("model", ["builtin:t5-tiny", "builtin:qwen-tiny", "builtin:roberta-tiny"])
def test_processes_that_encode_rows_import_neither_torch_nor_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    sent: list[Recipe] = []

    def recipe(*parts: Any) -> Recipe:
        sent.append(Recipe(*parts))
        return sent[-1]

    monkeypatch.setattr(writing, "Recipe", recipe)
    place = Workplace(tmp_path, planned=False)
    place.rows("rows.jsonl", [{"input": f"a ticket {number}", "target": "ab"[number % 2]} for number in range(60)])
    place.prepare(place.job(model=model, data={"input": "input", "target": "target"}))
    code = (
        "import pickle, sys\nfrom worker.training.dataset.encoding import BlockEncoder\n"
        "BlockEncoder(pickle.load(sys.stdin.buffer))\n"
        "print([name for name in ('torch', 'transformers', 'pyarrow') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(sent[0]), capture_output=True, check=True)
    assert done.stdout.decode().strip() == "[]"
