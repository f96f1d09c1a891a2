"""A stand-in for the driver's library: NVML's C interface, compiled here, with a GPU that tests fill and empty.

Signatures and layouts as in NVIDIA's nvml.h. 3 is NVML_ERROR_NOT_SUPPORTED, 6 NVML_ERROR_NOT_FOUND.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

UUID = "5a3c1c3e-0000-1111-2222-333344445555"
SOURCE = """
#include <stdio.h>
#include <string.h>
typedef unsigned long long size;
typedef struct { unsigned int gpu, memory; } utilization;
typedef struct { size total, free, used; } memory;
typedef struct { unsigned int version; size total, reserved, free, used; } memory2;
typedef struct { unsigned int pid; size used; unsigned int gi, ci; } process;
typedef struct { unsigned int pid; size held; int shown, graphics; } neighbour;
static int gpu;
static size total = 34ULL << 30, driver = 1ULL << 29;
static neighbour found[8] = {{4711, 28ULL << 30, 2, 0}, {4712, 3ULL << 29, 1, 1}};
static size held(void) { size sum = 0; for (int i = 0; i < 8; i++) sum += found[i].held; return sum; }
/* shown: 0 not at all, 1 without its size, 2 with it. 0 bytes: the process is gone. */
void stand_in_hold(unsigned int pid, size bytes, int shown) {
    int i = 0, free = 7;
    while (i < 8 && found[i].pid != pid) { if (!found[i].pid && free == 7) free = i; i++; }
    if (i == 8) i = free;
    found[i] = (neighbour){bytes ? pid : 0, bytes, bytes ? shown : 0, 0};
}
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    if (strcmp(uuid, "GPU-%(uuid)s") && strncmp(uuid, "MIG-", 4)) return 6;
    *handle = &gpu;
    return 0;
}
int nvmlDeviceGetMemoryInfo(void *handle, memory *out) {
    if (handle != &gpu) return 2;
    *out = (memory){total, total - driver - held(), driver + held()};
    return 0;
}
int nvmlDeviceGetUtilizationRates(void *handle, utilization *out) {
    if (%(mig)d) return 3;
    out->gpu = 97; out->memory = 50;
    return 0;
}
int nvmlDeviceGetTemperature(void *handle, int sensor, unsigned int *out) { *out = sensor ? 0 : 71; return 0; }
int nvmlDeviceGetPowerUsage(void *handle, unsigned int *out) { *out = 412500; return 0; }
#if !%(mig)d
int nvmlDeviceGetMemoryInfo_v2(void *handle, memory2 *out) {
    if (handle != &gpu || out->version != (sizeof(memory2) | 2 << 24)) return 25;
    *out = (memory2){out->version, total, driver, total - driver - held(), held()};
    return 0;
}
static int list(unsigned int *count, process *out, int graphics) {
    unsigned int room = *count;
    *count = 0;
    for (int i = 0; i < 8; i++)
        if (found[i].shown && found[i].graphics == graphics) {
            if (*count == room) return 7;
            out[(*count)++] = (process){found[i].pid, found[i].shown == 1 ? ~0ULL : found[i].held, ~0u, ~0u};
        }
    return 0;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *h, unsigned int *count, process *out) { return list(count, out, 0); }
int nvmlDeviceGetGraphicsRunningProcesses_v3(void *h, unsigned int *count, process *out) { return list(count, out, 1); }
int nvmlSystemGetProcessName(unsigned int pid, char *name, unsigned int length) {
    if (pid == 4712) return 6;
    snprintf(name, length, "/usr/bin/python3");
    return 0;
}
#endif
"""


def library(folder: Path, mig: bool = False) -> str:
    """Path of the built library. Of its 34 GiB 4 are free: 4711 holds 28, 4712 one and a half, the driver half."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler here")
    source, built = folder / "nvml.c", folder / f"libnvidia-ml-{mig}.so"
    source.write_text(SOURCE % {"uuid": UUID, "mig": mig})
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(built), str(source)], check=True, timeout=60)
    return str(built)


def hold(library: str, pid: int, size: int, *, shown: bool = True) -> None:
    """From now on process `pid` holds `size` bytes of the GPU; 0: it is gone."""
    ctypes.CDLL(library).stand_in_hold(ctypes.c_uint(pid), ctypes.c_ulonglong(size), 2 if shown else 0)
