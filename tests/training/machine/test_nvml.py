"""The card through NVML's C interface, with a stand-in for the driver's library compiled here."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from jobs.events import CardProcess
from jobs.plan import DataPlan, ModelPlan, make_plan
from tests.training.card_stand_in import GIB, UUID, library
from tests.training.conftest import tiny_spec
from worker.training import window
from worker.training.loop import StepResult
from worker.training.machine.nvml import CardMemory, CardUse, open_card
from worker.training.machine.usage import Cache
from worker.training.pace import Pace
from worker.training.window import Meter, Window


def test_what_the_card_says(tmp_path: Path) -> None:
    card = open_card(UUID, library(tmp_path))
    assert card is not None
    assert card.use() == CardUse(utilisation=0.97, memory_used=30 * 2**30, temperature_c=71, power_w=412.5)
    assert card.memory() == CardMemory(total=34 * GIB, free=4 * GIB, used=int(29.5 * GIB)), "without the driver's own"
    assert card.processes() == [
        CardProcess(pid=4711, name="python3", memory_bytes=28 * GIB),
        CardProcess(pid=4712, name=None, memory_bytes=None),
    ]


def test_what_a_card_does_not_tell_is_none(tmp_path: Path) -> None:
    """A MIG slice has no utilisation of its own; an old driver lacks the newer function."""
    card = open_card("MIG-1", library(tmp_path, mig=True))
    assert card is not None
    assert card.use() == CardUse(utilisation=None, memory_used=30 * 2**30, temperature_c=71, power_w=412.5)
    assert card.processes() is None
    assert card.memory() == CardMemory(total=34 * GIB, free=4 * GIB, used=30 * GIB), "an old driver counts its own"


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
    "padded_tokens": 128, "flops": 1e9, "micro_batch": 4, "largest": (4, 16, 16), "data_wait_s": 0.0,
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
        ("gpu_utilisation", "gpu_memory_used_bytes", "gpu_memory_foreign_bytes", "gpu_temperature_c", "gpu_power_w")
    )
    assert row["memory_fragmentation"] is None
    for name in ("host_memory_used_bytes", "host_memory_available_bytes", "trainer_rss_bytes"):
        assert isinstance(row[name], int)
        assert row[name] > 0


def test_a_row_has_the_card_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = library(tmp_path)
    meter = a_meter()
    monkeypatch.setattr(meter, "card", window.open_card(UUID, built))
    row = row_of(meter)
    assert (row["gpu_utilisation"], row["gpu_memory_used_bytes"]) == (0.97, 30 * 2**30)
    assert (row["gpu_temperature_c"], row["gpu_power_w"]) == (71, 412.5)
