"""Trainers that are forked from a process with torch: they run as those that are started, and none outlives anybody."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.local import until
from tests.support.processes import alive, end_within
from tests.support.stack import ROOT, Stack, tiny_job, usual_environment, warm_of_all_tests
from worker import warm as module
from worker.training import warm as child
from worker.warm import ForkedProcess, WarmProcess

ENVIRONMENT = usual_environment()
IMPORTED_S = 600.0
"""Beside other tests it may take minutes; nothing is asserted of it."""


def listening(process: WarmProcess) -> WarmProcess:
    until(lambda: Path(process.socket).exists(), lambda: "it does not listen")
    return process


@pytest.fixture
def warm() -> WarmProcess:
    """Not to be ended."""
    return listening(warm_of_all_tests())


@pytest.fixture
def own_warm() -> Iterator[WarmProcess]:
    process = WarmProcess(ENVIRONMENT)
    yield listening(process)
    process.close()


def fork(warm: WarmProcess, output: int, run: Path) -> ForkedProcess:
    environment = ENVIRONMENT | {"LONGHAUL_DEVICE": "cpu"}
    process = module.fork(warm.socket, ["check", str(run)], environment, output, within_s=IMPORTED_S)
    assert process is not None
    return process


@pytest.fixture
def full_pipe() -> Iterator[int]:
    """Whoever writes to it waits for ever."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(4096))
    os.set_blocking(writer, True)
    yield writer
    os.close(reader)
    os.close(writer)


def test_a_forked_one_does_what_a_started_one_does(warm: WarmProcess, tmp_path: Path) -> None:
    run = tmp_path / "job-none"
    log = tmp_path / "log"
    with open(log, "wb") as output:
        process = fork(warm, output.fileno(), run)
    command = [sys.executable, "-m", "worker.training", "check", str(run)]
    started = subprocess.run(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True, check=False)
    assert process.wait(60) == started.returncode == 1
    assert log.read_text().splitlines()[-1] == started.stderr.splitlines()[-1]
    process.kill()
    assert process.poll() == 1


def test_one_after_another_and_beside_one_another(warm: WarmProcess, tmp_path: Path, full_pipe: int) -> None:
    standing = fork(warm, full_pipe, tmp_path)
    with open(os.devnull, "wb") as nowhere:
        assert [fork(warm, nowhere.fileno(), tmp_path).wait(60) for _ in range(2)] == [1, 1]
    assert standing.poll() is None
    assert (os.getsid(standing.pid), os.getpgid(standing.pid)) == (os.getsid(0), standing.pid)
    with pytest.raises(subprocess.TimeoutExpired):
        standing.wait(0.01)
    standing.send_signal(signal.SIGTERM)
    assert standing.wait(60) == -signal.SIGTERM


def test_it_ends_with_whoever_asked_for_it(warm: WarmProcess, tmp_path: Path, full_pipe: int) -> None:
    reader, writer = os.pipe()
    asker = os.fork()
    if asker == 0:
        os.write(writer, b"%d" % fork(warm, full_pipe, tmp_path).pid)
        signal.pause()
    pid = int(os.read(reader, 20))
    assert alive(pid)
    end_within(60, [pid], lambda: os.kill(asker, signal.SIGKILL))
    os.waitpid(asker, 0)
    os.close(reader)
    os.close(writer)


def test_it_ends_with_the_process_that_forked_it_which_starts_again(
    own_warm: WarmProcess, tmp_path: Path, full_pipe: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = fork(own_warm, full_pipe, tmp_path)
    end_within(60, [process.pid], lambda: os.kill(own_warm.pid, signal.SIGKILL))
    assert process.wait(60) == -signal.SIGKILL
    assert module.fork(own_warm.socket, ["check", str(tmp_path)], ENVIRONMENT, full_pipe) is None
    os.waitid(os.P_PID, own_warm.pid, os.WEXITED | os.WNOWAIT)
    dead = own_warm.pid
    own_warm.keep_up()
    assert own_warm.pid == dead, "it was started a moment ago"
    monkeypatch.setattr("worker.warm.RESTART_AFTER_S", 0.0)
    Path(own_warm.socket).unlink()
    own_warm.keep_up()
    listening(own_warm)
    with open(os.devnull, "wb") as nowhere:
        assert fork(own_warm, nowhere.fileno(), tmp_path).wait(60) == 1


def test_another_environment_is_for_a_process_of_its_own(warm: WarmProcess, tmp_path: Path, full_pipe: int) -> None:
    other = ENVIRONMENT | {"OMP_NUM_THREADS": "2"}
    assert module.fork(warm.socket, ["check", str(tmp_path)], other, full_pipe) is None


@pytest.mark.parametrize("offline", ["1", ""])
def test_libraries_know_the_environment_of_the_child(
    offline: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import is_offline_mode

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", not offline)
    output, told = os.pipe()

    def stage(arguments: list[str]) -> int:
        return os.write(told, str(is_offline_mode()).encode())

    if os.fork() == 0:
        child.become(["check"], {**ENVIRONMENT, "HF_HUB_OFFLINE": offline}, os.open(os.devnull, os.O_WRONLY), stage)
        os._exit(0)
    os.wait()
    assert os.read(output, 10).decode() == str(bool(offline))
    os.close(output)
    os.close(told)


def test_what_is_imported_starts_no_thread_and_leaves_cuda_alone() -> None:
    code = (
        "import os\nfrom worker.training import __main__, warm\n"
        "__main__.set_library_switches('train')\n"
        "warm.import_all()\n"
        "import sys, torch\n"
        "print(len(os.listdir('/proc/self/task')), torch.cuda.is_initialized())\n"
        "print([name for name in ('wandb', 'transformers.integrations.integration_utils') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "1 False\n[]\n", "READ_LATER has what W&B reads when it is imported"


def test_a_forked_trainer_learns_bit_for_bit_what_a_started_one_does(tmp_path: Path, data: Path) -> None:
    with Stack(tmp_path / "home", data=data) as stack:
        stack.start("service", "check", "prepare")
        started = stack.submit(tiny_job())
        stack.wait_for_event(started, "job.queued")
        environment = stack.environment | {"LONGHAUL_DEVICE": "cpu"}
        command = [sys.executable, "-m", "worker.training", "train", str(started.path)]
        subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True, timeout=300)
        forked = stack.submit(tiny_job())
        stack.wait_for_event(forked, "job.queued")
        assert stack.post(started, "cancel").ok
        stack.start("train")
        assert stack.wait_for_event(forked, "job.succeeded", "job.failed").type == "job.succeeded"
        assert "no trainer was forked" not in (stack.home / "train.log").read_text()
        weights = [(run.model / "model.safetensors").read_bytes() for run in (started, forked)]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    ("modules", "left_out"),
    [
        ("worker.main", "torch transformers wandb matplotlib"),
        ("worker.training.doctor.command, worker.training.rows.sheet", "torch transformers"),
    ],
)
def test_processes_that_compute_nothing_import_nothing_heavy(modules: str, left_out: str) -> None:
    said = f"import sys, {modules}; print([name for name in {left_out.split()} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", said], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
