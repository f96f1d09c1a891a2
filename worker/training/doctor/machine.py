"""The driver, the GPU and the host: is what the trainer needs there?"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import time
from collections.abc import Mapping

import torch

from jobs.text.units import GIB, MIB, bytes_alike, format_bytes, format_duration, format_number, format_rate
from worker.training.doctor.finding import Check, Examination, Finding, judge
from worker.training.machine.device import gpu_id
from worker.training.machine.host import host_memory
from worker.training.machine.nvml import open_gpu

LEAST_DRIVER = 580
LEAST_CAPABILITY = (8, 0)
CHECKPOINT = {"cuda": int(11.4e9), "cpu": GIB}
"""Bytes of weights and states that a copy of a checkpoint takes: FLAN-T5-XL's with 8-bit states; of something small."""
SPARE = 2 * GIB
DISK_BYTES = {"cuda": GIB, "cpu": 128 * MIB}
LEAST_DISK = 200e6
"""Bytes a second. A checkpoint of FLAN-T5-XL then takes a minute."""
PARTIAL = "WSL2 and MIG slices do not report it: jobs train, and say less of other processes, power and temperature"
UNSYNCHRONIZED = 0x40
"""STA_UNSYNC of Linux's <sys/timex.h>."""


def checks(examination: Examination) -> Mapping[str, Check]:
    """By name."""
    device = torch.device(examination.device)

    def driver() -> Finding:
        gpu = open_gpu(gpu_id(device))
        version = None if gpu is None else gpu.driver()
        major = int(version.split(".")[0]) if version else 0
        return judge(
            "driver", version or "unknown: NVML does not say", limit=f"≥ {LEAST_DRIVER}",
            fail=0 < major < LEAST_DRIVER, warn=major == 0, hint="install a newer NVIDIA driver, and reboot",
        )  # fmt: skip

    def compute_capability() -> Finding:
        major, minor = torch.cuda.get_device_capability(device)
        return judge(
            "compute_capability", f"{major}.{minor}, {torch.cuda.get_device_name(device)}", limit="≥ 8.0",
            fail=(major, minor) < LEAST_CAPABILITY, hint="bf16 needs Ampere or newer (RTX 30/40/50, A100, H100, B200); "
            "Turing trains `method: lora` alone, beside a model in float16",
        )  # fmt: skip

    def architecture() -> Finding:
        capability, built = torch.cuda.get_device_capability(device), torch.cuda.get_arch_list()
        return judge(
            "architecture", f"torch {torch.__version__} has {', '.join(built)}",
            limit="code for sm_{}{}".format(*capability), fail=not runs(capability, built),
            hint="install the build of torch for this GPU",
        )  # fmt: skip

    def nvml() -> Finding:
        gpu = open_gpu(gpu_id(device))
        has = {} if gpu is None else {
            "memory": gpu.memory() is not None, "processes": gpu.processes() is not None,
            "temperature": gpu.use().temperature_c is not None, "power": gpu.use().power_w is not None,
        }  # fmt: skip
        missing = [name for name, there in has.items() if not there]
        figure = "no NVML" if gpu is None else f"no {', '.join(missing)}" if missing else f"{', '.join(has)}"
        return judge(
            "nvml", figure, limit="memory, processes, temperature, power", fail=not has.get("memory"),
            warn=bool(missing), hint=PARTIAL if has.get("memory") and is_partial(gpu_id(device)) else "in a container, "
            "NVIDIA_DRIVER_CAPABILITIES must have `utility`",
        )  # fmt: skip

    def compiler() -> Finding:
        name = "gcc" if device.type == "cuda" else "g++"
        if shutil.which(name) is None:
            hint = f"install {name} (Debian, Ubuntu: apt install {name}); without it layers run uncompiled"
            return judge("compiler", f"no {name}", fail=device.type == "cuda", warn=True, hint=hint)
        begun = time.perf_counter()
        numbers = torch.arange(4096, dtype=torch.float32, device=device)
        doubled = torch.compile(lambda x: torch.sin(x) * 2 + x, fullgraph=True)(numbers)
        error = float((doubled - (torch.sin(numbers) * 2 + numbers)).abs().max())
        kernel = "Triton" if device.type == "cuda" else "C++"
        return judge(
            "compiler", f"{name}; a {kernel} kernel was compiled in {format_duration(time.perf_counter() - begun)} and "
            f"is off by {format_number(error, 1)}", limit="0.01", fail=not error < 0.01,
            hint="report it: compiled code is wrong",
            seconds=time.perf_counter() - begun,
        )  # fmt: skip

    def memory_of_host() -> Finding:
        available, needed = host_memory().available, CHECKPOINT[examination.device] + SPARE
        free, wanted = bytes_alike(available, needed)
        return judge(
            "host_memory", f"{free} available", limit=f"≥ {wanted}", warn=available < needed,
            hint="checkpoints are then streamed from the GPU, and steps wait meanwhile", available_bytes=available,
        )  # fmt: skip

    def disk() -> Finding:
        size = DISK_BYTES[examination.device]
        free = shutil.disk_usage(examination.folder).free
        if free < 2 * size:
            return judge("disk", f"{format_bytes(free)} free", fail=True, limit=f"≥ {format_bytes(2 * size)} free",
                         hint="make room in the runs directory")  # fmt: skip
        rate = write_rate(os.fspath(examination.folder / "plain"), size)
        return judge(
            "disk", f"{format_rate(rate)} written and synced, {format_bytes(free)} free",
            limit=f"≥ {format_rate(LEAST_DISK)}", warn=rate < LEAST_DISK,
            hint="checkpoints take long: put LONGHAUL_RUNS on a faster disk", bytes_per_s=rate,
        )  # fmt: skip

    def clock() -> Finding:
        status = kernel_clock()
        figure = "unknown" if status is None else "not synchronized" if status & UNSYNCHRONIZED else "synchronized"
        return judge("clock", figure, limit="synchronized", warn=figure != "synchronized",
                     hint="on the host: timedatectl set-ntp true; times of events may be wrong")  # fmt: skip

    return {
        "driver": driver,
        "compute_capability": compute_capability,
        "architecture": architecture,
        "nvml": nvml,
        "compiler": compiler,
        "host_memory": memory_of_host,
        "disk": disk,
        "clock": clock,
    }


def runs(capability: tuple[int, int], built: list[str]) -> bool:
    """Whether a build runs on a GPU: it has code for its generation (`sm_…`), or code to translate (`compute_…`)."""
    for name in built:
        kind, _, number = name.rstrip("af").partition("_")
        major, minor = divmod(int(number), 10)
        if (major, minor) <= capability and (kind == "compute" or major == capability[0]):
            return True
    return False


def is_partial(uuid: str) -> bool:
    """Whether NVML reports only a part here: under WSL2, and of a slice of a GPU."""
    return uuid.startswith("MIG-") or "microsoft" in platform.release().lower()


def write_rate(file: str, size: int) -> float:
    """Bytes a second of writing so many and of fsync."""
    piece = os.urandom(16 * MIB)
    begun = time.perf_counter()
    with open(file, "wb") as handle:
        for _ in range(size // len(piece)):
            handle.write(piece)
        handle.flush()
        os.fsync(handle.fileno())
    seconds = time.perf_counter() - begun
    os.unlink(file)
    return size // len(piece) * len(piece) / seconds


def kernel_clock() -> int | None:
    """The status bits of the kernel's clock, which NTP sets; None: they cannot be read. Nothing is changed."""
    timex = (ctypes.c_long * 64)()  # `modes` 0: only read; `status` is the sixth long, 4 bytes of it
    if ctypes.CDLL(None).adjtimex(timex) < 0:
        return None
    return timex[5] & 0xFFFFFFFF
