"""The GPU, as the driver's own tool sees it: no CUDA call is made in a worker process."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from jobs.heartbeat import Gpu
from jobs.text.units import format_duration

FIELDS = "index,uuid,name,memory.total,driver_version"
TIMEOUT_S = 20.0
DRIVERS = {12: 525, 13: 580}
"""The first driver for each major version of CUDA. It runs the later minor ones, too (source: CUDA release notes)."""
_ASK_DRIVER = """
import ctypes
driver, version = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
assert driver.cuDriverGetVersion(ctypes.byref(version)) == 0
print(version.value, driver.cuInit(0))
"""
_ASK_SLICE = """
import ctypes, sys
nvml, handle, name = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p(), ctypes.create_string_buffer(96)
total_free_used = (ctypes.c_ulonglong * 3)()
assert nvml.nvmlInit_v2() == 0 and nvml.nvmlDeviceGetHandleByUUID(sys.argv[1].encode(), ctypes.byref(handle)) == 0
assert nvml.nvmlDeviceGetName(handle, name, 96) == 0 and nvml.nvmlDeviceGetMemoryInfo(handle, total_free_used) == 0
print(total_free_used[0], name.value.decode())
"""


class NoGpu(Exception):
    """There is no usable GPU; the message says why, in a user's words."""


def usable_gpu(wanted: str) -> Gpu:
    """`find_gpu`; torch and driver fit each other, and CUDA works: after a suspend nvidia-smi may see a GPU that does
    not compute. Raises NoGpu: better no job than all of them, one by one.
    """
    gpu = find_gpu(wanted)
    version, failure = ask_driver(gpu.uuid)
    refuse_misfit(gpu, torch_cuda(), version)
    if failure:
        raise NoGpu(f"{gpu.name} is there, but CUDA cannot be initialized (cuInit fails with code {failure})")
    return gpu


def find_gpu(wanted: str) -> Gpu:
    """The GPU, or MIG slice, that `wanted` names (an index or UUID, as in CUDA_VISIBLE_DEVICES); empty: the first GPU.

    Raises NoGpu.
    """
    if shutil.which("nvidia-smi") is None:
        raise NoGpu("no NVIDIA driver was found here (no nvidia-smi; driver 580 or newer is needed)")
    query = ["nvidia-smi", f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise NoGpu(f"nvidia-smi did not answer within {format_duration(TIMEOUT_S)}") from None
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.stdout.splitlines()]
    gpus = [row for row in rows if len(row) == len(FIELDS.split(","))]
    if answer.returncode != 0 or not gpus:
        output = (answer.stderr or answer.stdout).strip()[:200] or f"exit code {answer.returncode}"
        raise NoGpu(f"there is no usable GPU: nvidia-smi says {output!r}")
    if wanted.startswith("MIG-"):
        name, size = ask_slice(wanted)
        return Gpu(uuid=wanted, name=name, memory_bytes=size, driver=gpus[0][-1])
    for index, uuid, name, mebibytes, driver in gpus:
        if wanted in ("", index, uuid):
            if not mebibytes.isdecimal():  # such as [N/A] or [Insufficient Permissions]
                raise NoGpu(f"nvidia-smi does not say how much memory {name} has (memory.total is {mebibytes!r})")
            return Gpu(uuid=uuid, name=name, memory_bytes=int(mebibytes) * 2**20, driver=driver)
    raise NoGpu(f"CUDA_VISIBLE_DEVICES={wanted}, but the GPUs here are {', '.join(row[1] for row in gpus)}")


def ask_slice(uuid: str) -> tuple[str, int]:
    """(name, bytes) of a MIG slice: nvidia-smi has only its GPU in a table. Raises NoGpu."""
    ask = [sys.executable, "-c", _ASK_SLICE, uuid]
    try:
        answer = subprocess.run(ask, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise NoGpu(f"NVML did not answer within {format_duration(TIMEOUT_S)}") from None
    if answer.returncode != 0:
        raise NoGpu(f"CUDA_VISIBLE_DEVICES={uuid}, but NVML knows no such slice here; `nvidia-smi -L` lists them")
    size, _, name = answer.stdout.strip().partition(" ")
    return name, int(size)


def refuse_misfit(gpu: Gpu, needed: tuple[int, int] | None, has: tuple[int, int] | None) -> None:
    """NoGpu when torch was built for a CUDA that the driver cannot run. Versions are (major, minor).

    `needed` None: torch was built without. `has` None: nobody could find out; the trainer looks again.
    """
    found = f"{gpu.name} with driver {gpu.driver}"
    if needed is None:
        raise NoGpu(f"the torch installed here is built for the CPU alone (found: {found}); install its CUDA build")
    if has is not None and has[0] < needed[0]:
        driver = f"driver {DRIVERS[needed[0]]} or newer" if needed[0] in DRIVERS else "a newer driver"
        runs, needs = (f"CUDA {major}.{minor}" for major, minor in (has, needed))
        raise NoGpu(f"{found} runs {runs}, and this torch needs {needs}: {driver} is needed")


def torch_cuda() -> tuple[int, int] | None:
    """The CUDA version that torch was built for, read from its files: torch is not imported here."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None, "torch is a dependency"
    text = Path(spec.origin).with_name("version.py").read_text()
    found = re.search(r"^cuda\b.*= *'(\d+)\.(\d+)", text, re.MULTILINE)
    return (int(found[1]), int(found[2])) if found else None


def ask_driver(uuid: str) -> tuple[tuple[int, int] | None, int]:
    """(newest CUDA version that the driver runs, compatibility libraries included; code of cuInit, 0: it works).

    (None, 0): the driver does not say. Asked in a process of its own: CUDA lives in trainers alone.
    """
    try:
        answer = subprocess.run(
            [sys.executable, "-c", _ASK_DRIVER],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": uuid},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise NoGpu(f"CUDA could not be initialized within {format_duration(TIMEOUT_S)}") from None
    if answer.returncode != 0:
        return None, 0
    version, failure = map(int, answer.stdout.split())
    return (version // 1000, version % 1000 // 10), failure
