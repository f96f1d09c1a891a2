"""The device of a trainer: the locks that keep it, and the job, to one process."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from pathlib import Path
from typing import BinaryIO

import torch

from jobs.disk.rundir import RunDir
from jobs.errors import DeviceBusy
from jobs.text.units import format_duration
from jobs.trainer_facts import DeviceWaiting
from worker.training.journal import Journal, StopSignal
from worker.training.machine.locks import gpu_lock, try_lock

WAIT_S = 60.0
JOB_WAIT_S = 1.0
"""Reconcile looks whether the lock is held by taking it, for an instant."""
POLL_S = 0.2
log = logging.getLogger("longhaul.trainer")


def has_native_bf16(device: torch.device) -> bool:
    """Whether it multiplies bf16 itself: GPUs from compute capability 8.0 on, which have flash attention, too.

    A CPU counts as one that does.
    """
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def hold_job(run: RunDir) -> BinaryIO:
    """Take the job's lock; it is held until the returned file is closed, so for the process's life. Else DeviceBusy."""
    until = time.monotonic() + JOB_WAIT_S
    while (lock := try_lock(run.lock_file)) is None:
        if time.monotonic() > until:
            raise DeviceBusy(
                f"another trainer is at work on job {run.id}",
                code="job_busy",
                hint="wait for it to end; `fuser` on the run directory's file `lock` names the process",
            )
        time.sleep(POLL_S)
    log.info("process %d holds the lock of job %s", os.getpid(), run.id)
    return lock


def hold_device(
    run: RunDir, device: torch.device, journal: Journal, stop: StopSignal, *, shared: bool
) -> contextlib.AbstractContextManager[object]:
    """Take the GPU's lock, waiting up to `WAIT_S` for another trainer to release it: trials share it among themselves
    (`shared`). The CPU has no lock.

    Raises DeviceBusy, or StopAsked when asked to stop while waiting.
    """
    if device.type != "cuda":
        return contextlib.nullcontext()
    return hold_gpu(run.path.parent / ".locks", gpu_id(device), journal, stop, WAIT_S, shared=shared)


def hold_gpu(
    folder: Path, gpu: str, journal: Journal, stop: StopSignal, wait_s: float, *, shared: bool = False
) -> BinaryIO:
    """`hold_device` for the GPU with that UUID."""
    folder.mkdir(exist_ok=True)
    file = gpu_lock(folder, gpu)
    until = time.monotonic() + wait_s
    noted = False
    while (lock := try_lock(file, shared=shared)) is None:
        if not noted:
            journal.phase("wait")
            journal.note(
                DeviceWaiting(message=f"another trainer holds GPU {gpu}; waiting up to {format_duration(wait_s)}")
            )
            noted = True
        stop.raise_if_asked()
        if time.monotonic() > until:
            raise DeviceBusy(
                f"another trainer still holds GPU {gpu} after {format_duration(wait_s)}",
                hint="the job stays in the queue; run one train worker per GPU",
            )
        time.sleep(POLL_S)
        journal.progress()
    return lock


def gpu_id(device: torch.device) -> str:
    """NVML's UUID of the GPU, without its prefix `GPU-`."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if visible.startswith(("GPU-", "MIG-")) and "," not in visible:
        return visible.removeprefix("GPU-")
    return str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-")
