"""The card through NVML's C interface, with a stand-in for the driver's library compiled here."""

from __future__ import annotations

import logging
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from jobs.plan import DataPlan, ModelPlan, make_plan
from tests.training.conftest import tiny_spec
from worker.training import window
from worker.training.loop import StepResult
from worker.training.memory import Cache
from worker.training.nvml import CardProcess, CardUse, open_card
from worker.training.pace import Pace
from worker.training.window import Meter, Window

UUID = "5a3c1c3e-0000-1111-2222-333344445555"
# Signatures and layouts as in NVIDIA's nvml.h. 3 is NVML_ERROR_NOT_SUPPORTED, 6 NVML_ERROR_NOT_FOUND.
SOURCE = """
#include <string.h>
typedef struct { unsigned int gpu, memory; } utilization;
typedef struct { unsigned long long total, free, used; } memory;
typedef struct { unsigned int pid; unsigned long long used; unsigned int gi, ci; } process;
static int card;
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    if (strcmp(uuid, "GPU-%(uuid)s") && strncmp(uuid, "MIG-", 4)) return 6;
    *handle = &card;
    return 0;
}
int nvmlDeviceGetMemoryInfo(void *handle, memory *out) {
    if (handle != &card) return 2;
    out->total = 34ULL << 30; out->used = 30ULL << 30; out->free = 4ULL << 30;
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
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned int *count, process *out) {
    if (*count < 2) return 7;
    process found[] = {{4711, 28ULL << 30, ~0u, ~0u}, {4712, ~0ULL, ~0u, ~0u}};
    memcpy(out, found, sizeof found);
    *count = 2;
    return 0;
}
#endif
"""


def library(folder: Path, mig: bool = False) -> str:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler here")
    source, built = folder / "nvml.c", folder / f"libnvidia-ml-{mig}.so"
    source.write_text(SOURCE % {"uuid": UUID, "mig": mig})
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(built), str(source)], check=True, timeout=60)
    return str(built)


def test_what_the_card_says(tmp_path: Path) -> None:
    card = open_card(UUID, library(tmp_path))
    assert card is not None
    assert card.use() == CardUse(utilisation=0.97, memory_used=30 * 2**30, temperature_c=71, power_w=412.5)
    assert card.processes() == [CardProcess(4711, 28 * 2**30), CardProcess(4712, None)]


def test_what_a_card_does_not_tell_is_none(tmp_path: Path) -> None:
    """A MIG slice has no utilisation of its own; an old driver lacks the newer function."""
    card = open_card("MIG-1", library(tmp_path, mig=True))
    assert card is not None
    assert card.use() == CardUse(utilisation=None, memory_used=30 * 2**30, temperature_c=71, power_w=412.5)
    assert card.processes() is None


def test_no_driver_and_no_such_card_are_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert open_card(UUID, str(tmp_path / "libnvidia-ml.so.1")) is None
    assert open_card("other", library(tmp_path)) is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert "libnvidia-ml.so.1" in caplog.records[0].message
    assert "NVML knows no card GPU-other (error 6)" in caplog.records[1].message


def row_of(meter: Meter) -> dict[str, object]:
    meter.pace.begin()
    one = torch.tensor(1.0)
    meter.add(StepResult(**RESULT | {"loss": one, "grad_norm": one}))
    return meter.row(StepResult(**RESULT | {"loss": one, "grad_norm": one}), now=1.0).model_dump()


RESULT = {
    "step": 1, "epoch": 0.1, "learning_rate": 1e-4, "rows": 8, "input_tokens": 40, "target_tokens": 80,
    "padded_tokens": 128, "flops": 1e9, "micro_batch": 4, "data_wait_s": 0.0,
}  # fmt: skip


def a_meter() -> Meter:
    """On the CPU, for a run of 10 steps."""
    spec = tiny_spec()
    data = DataPlan(train="x", input="x", target="x", rows=80)
    plan = make_plan(spec, ModelPlan(source="x", parameters=1), data)
    state = Window()
    return Meter(Cache(torch.device("cpu")), attempt=1, pace=Pace(spec, plan, state.asides), window=state)


def test_a_row_on_cpu_has_the_host_and_no_card() -> None:
    row = row_of(a_meter())
    assert {name: value for name, value in row.items() if name.startswith("gpu_")} == dict.fromkeys(
        ("gpu_utilisation", "gpu_memory_used_bytes", "gpu_temperature_c", "gpu_power_w")
    )
    for name in ("host_memory_used_bytes", "host_memory_available_bytes", "trainer_rss_bytes"):
        assert isinstance(row[name], int)
        assert row[name] > 0  # type: ignore[operator]


def test_a_row_has_the_card_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = library(tmp_path)
    meter = a_meter()
    monkeypatch.setattr(meter, "card", window.open_card(UUID, built))
    row = row_of(meter)
    assert (row["gpu_utilisation"], row["gpu_memory_used_bytes"]) == (0.97, 30 * 2**30)
    assert (row["gpu_temperature_c"], row["gpu_power_w"]) == (71, 412.5)
