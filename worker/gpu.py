"""The GPU, as the driver's own tool sees it: no CUDA call is made in a worker process."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from jobs.disk.files import write_atomically
from jobs.heartbeat import TOGETHER, Gpu
from jobs.text.units import format_duration

log = logging.getLogger("longhaul.worker")
FIELDS = "index,uuid,name,memory.total,driver_version,compute_cap"
TIMEOUT_S = 20.0
DRIVERS = {12: 525, 13: 580}
"""The first driver for each major version of CUDA. It runs the later minor ones, too (source: CUDA release notes)."""
_ASK_DRIVER = """
import ctypes
driver, version = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
assert driver.cuDriverGetVersion(ctypes.byref(version)) == 0
print(version.value, driver.cuInit(0))
"""
_ASK_NVML = """
import ctypes, sys
nvml, handle, total_free_used = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()
name, driver = ctypes.create_string_buffer(96), ctypes.create_string_buffer(80)
assert nvml.nvmlInit_v2() == 0 and nvml.nvmlDeviceGetHandleByUUID(sys.argv[1].encode(), ctypes.byref(handle)) == 0
assert nvml.nvmlDeviceGetName(handle, name, 96) == 0 and nvml.nvmlDeviceGetMemoryInfo(handle, total_free_used) == 0
assert nvml.nvmlSystemGetDriverVersion(driver, 80) == 0
print(total_free_used[0], driver.value.decode(), name.value.decode())
"""
_LISTED = re.compile(r"\s*(GPU|MIG) .*\(UUID: ((?:GPU|MIG)-[^)]+)\)")


class NoGpu(Exception):
    """There is no usable GPU; the message says why, in a user's words."""


def usable_gpu(wanted: str) -> Gpu:
    """What `wanted` names, as one of `named_gpus` does: a GPU, or several that train together.

    Raises NoGpu, also where those of a group are of several kinds: the slowest would set the pace, and their rounding
    would drive the copies of a model apart.
    """
    gpus = [_usable(name) for name in wanted.split(TOGETHER)]
    first, kinds = gpus[0], sorted({gpu.name for gpu in gpus})
    if len(kinds) > 1:
        raise NoGpu(f"{wanted} joins GPUs of several kinds: {', '.join(kinds)}; only GPUs of one kind train together")
    memory = min(gpu.memory_bytes for gpu in gpus)
    uuid = TOGETHER.join(gpu.uuid for gpu in gpus)
    return first.model_copy(update={"uuid": uuid, "memory_bytes": memory, "count": len(gpus)})


def _usable(wanted: str) -> Gpu:
    """`find_gpu`; torch and driver fit each other, and CUDA works: after a suspend nvidia-smi may see a GPU that does
    not compute. Raises NoGpu: better no job than all of them, one by one.
    """
    gpu = find_gpu(wanted)
    version, failure = ask_driver(gpu.uuid)
    check_fit(gpu, torch_cuda(), version)
    if failure:
        raise NoGpu(f"{gpu.name} is there, but CUDA cannot be initialized (cuInit fails with code {failure})")
    return gpu


def named_gpus(wanted: str) -> list[str]:
    """UUIDs of the GPUs that `wanted` names: `all`, or indexes and UUIDs with commas between; with plus signs between,
    they are a group, and named together. Of a GPU that is cut into MIG slices, those of its slices. A UUID that is not
    here now is kept: that GPU may come back.

    `all` leaves out GPUs that torch has no kernels for; an index that is missing is left out with an error in the log.

    Raises NoGpu if none is left, or nvidia-smi shows none, or a GPU is in two groups.
    """
    rows, failure = ask_smi()
    if not rows:
        raise NoGpu(failure)
    slices: dict[str, list[str]] = {}
    for kind, uuid in _LISTED.findall(run_smi("-L").stdout):
        if kind == "GPU":
            slices[uuid] = []
        elif slices:
            slices[list(slices)[-1]].append(uuid)
    here = {name: slices.get(uuid) or [uuid] for index, uuid, *_ in rows for name in (index, uuid)}
    found: dict[str, None] = {}
    names = wanted.split(",")
    if wanted == "all":
        old = {row[0]: why for row in rows if (why := too_old(row)) is not None}
        if len(old) == len(rows):
            raise NoGpu("; ".join(old.values()))
        for why in old.values():
            log.warning("%s; it is left out", why)
        names = [row[0] for row in rows if row[0] not in old]
    for name in names:
        members = name.split(TOGETHER)
        missing = [each for each in members if each not in here and not each.startswith(("GPU-", "MIG-"))]
        uuids = [uuid for each in members for uuid in here.get(each, [each])]
        if missing:
            log.error("%s; the others train", unknown(missing[0], rows))
        elif len(members) > 1 and (
            not len(set(uuids)) == len(uuids) == len(members) or any(each.startswith("MIG-") for each in uuids)
        ):
            raise NoGpu(f"{name} joins a GPU with itself, or slices of GPUs; a group joins several whole GPUs")
        else:
            found |= dict.fromkeys(uuids if len(members) == 1 else [TOGETHER.join(uuids)])
    all_members = [uuid for each in found for uuid in each.split(TOGETHER)]
    if twice := {uuid for uuid in all_members if all_members.count(uuid) > 1}:
        raise NoGpu(f"{wanted} names {', '.join(sorted(twice))} twice; a GPU is in one group, or trains alone")
    if not found:
        raise unknown(wanted, rows)
    return list(found)


def find_gpu(wanted: str) -> Gpu:
    """The GPU, or MIG slice, that `wanted` names by its index or UUID; empty: the first GPU. Raises NoGpu.

    That another GPU is lost, which makes nvidia-smi fail, does not matter to one that is named by its UUID.
    """
    rows, failure = ask_smi()
    for row in rows:
        index, uuid, name, mebibytes, driver, capability = row
        if wanted in (index, uuid) or (not wanted and failure is None):
            if (old := too_old(row)) is not None:
                raise NoGpu(old)
            if not mebibytes.isdecimal():  # such as [N/A] or [Insufficient Permissions]
                raise NoGpu(f"nvidia-smi does not say how much memory {name} has (memory.total is {mebibytes!r})")
            memory = int(mebibytes) * 2**20
            return Gpu(uuid=uuid, name=name, memory_bytes=memory, driver=driver, native_bf16=has_bf16(capability))
    if wanted.startswith(("GPU-", "MIG-")) and (gpu := ask_nvml(wanted)) is not None:  # nvidia-smi tables no slices
        return gpu
    if failure is not None:
        raise NoGpu(failure)
    raise unknown(wanted, rows)


def too_old(row: list[str]) -> str | None:
    """Why the GPU of this row cannot train: torch has no kernels for it (before Turing). None: it can."""
    *_, name, _, _, capability = row
    if re.fullmatch(r"[0-6]\.\d|7\.[0-4]", capability) is None:
        return None
    return f"{name} has compute capability {capability}, and torch needs 7.5 (Turing: T4, RTX 20, and newer)"


def has_bf16(capability: str) -> bool:
    """Whether GPUs of this compute capability multiply bf16 themselves: from 8.0 on, as far as it is known."""
    return re.fullmatch(r"[0-7]\.\d", capability) is None


def unknown(name: str, rows: list[list[str]]) -> NoGpu:
    """The error for a name that none of the GPUs in these rows has."""
    here = ", ".join(row[1] for row in rows)
    return NoGpu(f"{name!r} names no GPU here: there is {here} (`nvidia-smi -L` also lists slices)")


def ask_smi() -> tuple[list[list[str]], str | None]:
    """(the FIELDS of each GPU that nvidia-smi lists, what is wrong: always said if it lists none). Raises NoGpu."""
    answer = run_smi(f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits")
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.stdout.splitlines()]
    gpus = [row for row in rows if len(row) == len(FIELDS.split(","))]
    if answer.returncode == 0 and gpus:
        return gpus, None
    output = (answer.stderr or answer.stdout).strip()[:200] or f"exit code {answer.returncode}"
    return gpus, f"there is no usable GPU: nvidia-smi says {output!r}"


def run_smi(*options: str) -> subprocess.CompletedProcess[str]:
    """What the driver's own tool answers. Raises NoGpu where there is none, or it hangs."""
    if shutil.which("nvidia-smi") is None:
        raise NoGpu("no NVIDIA driver was found here (no nvidia-smi; driver 580 or newer is needed)")
    try:
        return subprocess.run(["nvidia-smi", *options], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise NoGpu(f"nvidia-smi did not answer within {format_duration(TIMEOUT_S)}") from None


def ask_nvml(uuid: str) -> Gpu | None:
    """The GPU or MIG slice with this UUID; None: NVML has no such one, or it is lost. Raises NoGpu."""
    ask = [sys.executable, "-c", _ASK_NVML, uuid]
    try:
        answer = subprocess.run(ask, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise NoGpu(f"NVML did not answer within {format_duration(TIMEOUT_S)}") from None
    if answer.returncode != 0:
        return None
    size, driver, name = answer.stdout.strip().split(" ", 2)
    return Gpu(uuid=uuid, name=name, memory_bytes=int(size), driver=driver)


def check_fit(gpu: Gpu, needed: tuple[int, int] | None, has: tuple[int, int] | None) -> None:
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


# -- gpu losses --------------------------------------------------------------------------------------------------------
# How often in a row workers have ended because they lost a GPU: from the third time on the next one waits first.
#
# Remembered beside the runs, by GPU, in `.locks/gpu-<uuid>.lost`: the worker that comes next is another container.

STEADY_S = 600.0
"""A worker that had the GPU for so long begins a new count."""
WAITS_S = (0.0, 0.0, 60.0, 120.0, 300.0, 600.0)
"""From the end of the last worker until the next takes a job, by the number of ends in a row; the last for all more."""


class GpuLosses:
    """What one train worker knows of the workers before it, and passes on to the next."""

    def __init__(self, runs: Path, clock: Callable[[], float] = time.time) -> None:
        self._folder = runs / ".locks"
        self._clock = clock
        self._started = clock()

    def add(self, uuid: str) -> None:
        """This worker ends because it lost the GPU. A loss that another slot has counted meanwhile is the same one."""
        now = self._clock()
        ends, at = self._read(uuid)
        if at > self._started:
            return
        ends = 1 if now - self._started > STEADY_S else ends + 1
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self._file(uuid), json.dumps({"ends": ends, "at": now}).encode())
        except OSError as error:
            log.error("the loss of the GPU is not counted: %s", error)

    def pause(self, uuid: str) -> str | None:
        """Why no job is taken yet though the GPU is there; None: one may be. The time since then does not count."""
        ends, at = self._read(uuid)
        until = at + WAITS_S[min(ends, len(WAITS_S)) - 1]
        self._started = now = self._clock()
        if not at <= now < until:
            return None
        clock = time.strftime("%H:%M:%S", time.gmtime(until))
        return f"the GPU was lost {ends} times in a row; it is there again, and no job is taken until {clock} UTC"

    def _read(self, uuid: str) -> tuple[int, float]:
        try:
            saved = json.loads(self._file(uuid).read_bytes())
            return int(saved["ends"]), float(saved["at"])
        except FileNotFoundError:
            return 0, 0.0
        except (OSError, ValueError, LookupError, TypeError) as error:
            log.error("how often the GPU was lost cannot be read, and counting starts again: %s", error)
            return 0, 0.0

    def _file(self, uuid: str) -> Path:
        return self._folder / f"gpu-{uuid}.lost"
