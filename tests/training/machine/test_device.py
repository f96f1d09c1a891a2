"""One trainer per job and per GPU."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from jobs.attempt import Noted
from jobs.disk.rundir import RunDir
from jobs.errors import DeviceBusy
from jobs.trainer_facts import DeviceWaiting
from worker.training.journal import Journal, StopAsked, StopSignal
from worker.training.machine.device import gpu_id, hold_device, hold_gpu, hold_job


def test_a_job_has_one_trainer(make_run: Callable[..., RunDir]) -> None:
    run = make_run()
    lock = hold_job(run)
    assert fcntl.fcntl(lock, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    with pytest.raises(DeviceBusy, match="another trainer is at work on job job") as caught:
        hold_job(run)
    assert caught.value.reason.exit_code == 75
    lock.close()
    hold_job(run).close()


def test_who_only_looks_whether_a_job_is_held_keeps_no_trainer_from_it(make_run: Callable[..., RunDir]) -> None:
    run = make_run()
    hold_job(run).close()
    assert not run.held()
    looking = open(run.lock_file, "rb")  # noqa: SIM115 - what `held` does, stretched: a busy machine may stretch it, too
    fcntl.flock(looking, fcntl.LOCK_SH)
    away = threading.Timer(0.3, looking.close)
    away.start()
    with hold_job(run):
        assert run.held()
    away.join()


def test_the_cpu_has_no_lock(make_run: Callable[..., RunDir], journal: Journal) -> None:
    run = make_run()
    with (
        hold_device(run, torch.device("cpu"), journal, StopSignal(), shared=False),
        hold_device(run, torch.device("cpu"), journal, StopSignal(), shared=False),
    ):
        assert not (run.path.parent / ".locks").exists()


def test_a_gpu_is_waited_for_and_then_given_up(make_run: Callable[..., RunDir], tmp_path: Path) -> None:
    run = make_run()
    folder, stop = run.path.parent / ".locks", StopSignal()
    lock = hold_gpu(folder, "abc", Journal(run.attempt_file(1)), stop, 0)
    assert (folder / "gpu-abc.lock").exists()
    assert run.attempt_lines(1) == []
    with pytest.raises(DeviceBusy, match="still holds GPU abc after 0 s"):
        hold_gpu(folder, "abc", Journal(run.attempt_file(2)), stop, 0)
    noted = [line.fact for line in run.attempt_lines(2) if isinstance(line, Noted)]
    assert [type(fact) for fact in noted] == [DeviceWaiting]

    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(StopAsked):
        hold_gpu(folder, "abc", Journal(run.attempt_file(3)), stop, 60)
    lock.close()
    hold_gpu(folder, "abc", Journal(run.attempt_file(4)), stop, 0).close()


def test_trials_share_a_gpu_among_themselves_alone(make_run: Callable[..., RunDir], journal: Journal) -> None:
    folder, stop = make_run().path.parent / ".locks", StopSignal()
    with (
        hold_gpu(folder, "abc", journal, stop, 0, shared=True),
        hold_gpu(folder, "abc", journal, stop, 0, shared=True),
        pytest.raises(DeviceBusy),
    ):
        hold_gpu(folder, "abc", journal, stop, 0)
    with hold_gpu(folder, "abc", journal, stop, 0), pytest.raises(DeviceBusy):
        hold_gpu(folder, "abc", journal, stop, 0, shared=True)


def test_the_gpu_is_the_visible_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", "GPU-1b2c")
    assert gpu_id(torch.device("cuda")) == "1b2c"
