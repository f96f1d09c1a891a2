"""Who else holds memory of the GPU, with a stand-in for the driver's library."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from jobs.disk.rundir import RunDir
from jobs.text.units import GIB
from jobs.trainer_facts import DeviceWaiting, GpuProcess
from tests.training.attempts import facts
from tests.training.gpu_stand_in import UUID, hold, library
from worker.training.journal import Journal, StopAsked, StopSignal
from worker.training.machine import process_monitor
from worker.training.machine.nvml import NvmlGpu, open_gpu
from worker.training.machine.process_monitor import OtherProcessesUse, ProcessMonitor

CPU = torch.device("cpu")
PYTHON = GpuProcess(pid=4711, name="python3", memory_bytes=28 * GIB)
NAMELESS = GpuProcess(pid=4712, name=None, memory_bytes=None)


@pytest.fixture
def built(tmp_path: Path) -> str:
    return library(tmp_path)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    (tmp_path / "run").mkdir()
    return RunDir(tmp_path / "run")


@pytest.fixture
def stop(run: RunDir) -> StopSignal:
    return StopSignal()


def gpu(built: str) -> NvmlGpu:
    found = open_gpu(UUID, built)
    assert found is not None
    return found


def test_what_others_hold_is_said_with_their_names() -> None:
    assert OtherProcessesUse(int(6.2 * GIB), (PYTHON,)).text == "6.2 GiB by python3 (pid 4711)"
    assert OtherProcessesUse(6 * GIB).text == "6.0 GiB by processes the driver does not show here"
    assert OtherProcessesUse(30 * GIB, (PYTHON, NAMELESS)).text == (
        "30.0 GiB by python3 (pid 4711, 28.0 GiB), a process (pid 4712)"
    )


def test_others_are_what_is_used_less_what_is_ours(built: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our context is made as `ProcessMonitor` is; what torch's allocator holds comes on top of it."""
    monkeypatch.setattr(process_monitor, "make_context", lambda device: hold(built, os.getpid(), GIB // 2))
    found = ProcessMonitor(gpu(built), CPU)
    assert found.use() == OtherProcessesUse(int(29.5 * GIB), (PYTHON, NAMELESS))
    monkeypatch.setattr(process_monitor, "reserved_bytes", lambda device: 2 * GIB)
    hold(built, os.getpid(), int(2.5 * GIB))
    assert found.use() == OtherProcessesUse(int(29.5 * GIB), (PYTHON, NAMELESS))
    assert found.free() == int(1.5 * GIB)


def test_what_libraries_take_for_us_later_is_ours_too(built: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for pid in (4711, 4712):
        hold(built, pid, 0)
    monkeypatch.setattr(process_monitor, "make_context", lambda device: hold(built, 7, GIB // 2, shown=False))
    found = ProcessMonitor(gpu(built), CPU)
    with found.taking():
        hold(built, 7, 2 * GIB, shown=False)
    assert found.use() == OtherProcessesUse(0)
    hold(built, 8, GIB, shown=False)
    assert found.use() == OtherProcessesUse(GIB)


def test_in_a_container_our_own_pid_is_the_one_that_comes_with_our_context(
    built: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_monitor, "make_context", lambda device: hold(built, 9_999_999, GIB // 2))
    found = ProcessMonitor(gpu(built), CPU)
    assert found.use() == OtherProcessesUse(int(29.5 * GIB), (PYTHON, NAMELESS))


def test_processes_that_are_not_shown_are_seen_by_what_they_hold(built: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for pid in (4711, 4712):
        hold(built, pid, 0)
    monkeypatch.setattr(process_monitor, "make_context", lambda device: hold(built, 7, GIB // 2, shown=False))
    found = ProcessMonitor(gpu(built), CPU)
    assert found.use() == OtherProcessesUse(0)
    hold(built, 8, process_monitor.NOISE_BYTES - 1, shown=False)
    assert found.use() == OtherProcessesUse(0), "our own libraries load kernels as they need them"
    hold(built, 8, 3 * GIB, shown=False)
    assert found.use() == OtherProcessesUse(3 * GIB)


@pytest.mark.parametrize("initial", [True, False])
def test_names_are_the_kernels_where_pids_are_ours(built: str, initial: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pid of the host must not be looked up among the processes of a container."""
    monkeypatch.setattr(process_monitor, "make_context", lambda device: hold(built, 9_999_999, GIB // 2))
    monkeypatch.setattr(process_monitor, "_in_initial_namespace", lambda: initial)
    hold(built, os.getppid(), GIB)
    found = ProcessMonitor(gpu(built), CPU).use()
    assert found is not None
    kernels = Path(f"/proc/{os.getppid()}/comm").read_text().strip()
    assert {each.pid: each.name for each in found.processes}[os.getppid()] == (kernels if initial else "python3")


def test_on_a_cpu_and_without_a_driver_nobody_can_tell(stop: StopSignal, journal: Journal) -> None:
    nobody = ProcessMonitor.of(CPU)
    assert (nobody.use(), nobody.free()) == (None, None)
    assert nobody.wait(2**60, journal, stop)


def test_it_waits_until_there_is_room_and_says_once_for_whom(
    built: str, run: RunDir, stop: StopSignal, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float] = []

    def go_by(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            hold(built, 4711, 0)

    monkeypatch.setattr("time.sleep", go_by)
    assert ProcessMonitor(gpu(built), CPU).wait(30 * GIB, Journal(run.attempt_file(1)), stop)
    assert len(looks) == 3
    assert facts(run, DeviceWaiting) == [
        DeviceWaiting(
            message="30.0 GiB of the GPU are needed and 4.0 GiB are free; others hold 29.5 GiB by python3 "
            "(pid 4711, 28.0 GiB), a process (pid 4712); waiting up to 1 min"
        )
    ]


def test_it_does_not_wait_for_ever_nor_when_asked_to_stop(
    built: str, run: RunDir, stop: StopSignal, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    monkeypatch.setattr("time.sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    found = ProcessMonitor(gpu(built), CPU)
    assert not found.wait(30 * GIB, journal, stop)
    assert process_monitor.WAIT_S < clock[0] < process_monitor.WAIT_S + 1
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(StopAsked):
        found.wait(30 * GIB, journal, stop)
