"""What is made of figures of speed."""

from __future__ import annotations

import pytest

from jobs.gpus import GpuFacts
from worker.training.doctor.finding import judge
from worker.training.doctor.report import make_report
from worker.training.doctor.speed import (
    at_power_limit,
    judge_bandwidth,
    judge_copy,
    judge_gemm,
    judge_host_update,
    judge_power,
)
from worker.training.machine.nvml import GpuClock, GpuPower, GpuUse

NOMINAL = 1.792e12


@pytest.mark.parametrize(
    ("share", "status"), [(0.49, "FAIL"), (0.74, "WARN"), (0.76, "PASS"), (1.49, "PASS"), (1.51, "FAIL")]
)
def test_products_are_judged_by_the_nominal_peak(share: float, status: str) -> None:
    assert judge_gemm(share * 209.5e12, 209.5e12).status == status


@pytest.mark.parametrize(
    ("watts", "limit", "at_limit"),
    [
        (706.0, (700.0, 700.0), True),
        (650.0, (700.0, 700.0), False),
        (500.0, (500.0, 700.0), False),
        (706.0, (None, None), False),
    ],
)
def test_a_gpu_that_its_power_holds_back_is_not_warned_of(
    watts: float, limit: tuple[float | None, float | None], at_limit: bool
) -> None:
    held = at_power_limit([GpuUse(power_w=300.0), GpuUse(power_w=watts)], GpuPower(*limit))
    found = judge_gemm(631e12, 989e12, at_limit=held)
    assert held is at_limit and found.status == ("PASS" if at_limit else "WARN")
    assert ("at the limit of its power" in found.figure) is at_limit


@pytest.mark.parametrize(("share", "status"), [(0.74, "WARN"), (0.76, "PASS"), (1.49, "PASS"), (1.51, "FAIL")])
def test_memory_faster_than_its_data_sheet_did_not_copy(share: float, status: str) -> None:
    found = judge_bandwidth(share * NOMINAL, NOMINAL)
    assert found.status == status and ("did not copy" in str(found.hint)) is (status == "FAIL")


@pytest.mark.parametrize(
    ("rate", "nominal", "status"),
    [
        (19e9, NOMINAL, "WARN"),
        (21e9, NOMINAL, "PASS"),
        (1.7e12, NOMINAL, "PASS"),
        (1.8e12, NOMINAL, "FAIL"),
        (0.9e12, None, "PASS"),
        (1.1e12, None, "FAIL"),
    ],
)
def test_a_slot_faster_than_the_memory_did_not_copy(rate: float, nominal: float | None, status: str) -> None:
    found = judge_copy("device_to_host", rate, nominal)
    assert found.status == status and ("did not copy" in str(found.hint)) is (status == "FAIL")


@pytest.mark.parametrize(("rate", "status"), [(0.4e9, "WARN"), (2e9, "PASS"), (1e12, "FAIL")])
def test_a_host_that_updates_slowly_is_warned_of(rate: float, status: str) -> None:
    found = judge_host_update(rate)
    assert found.status == status and found.values == {"numbers_per_s": rate}
    measured = make_report([found], GpuFacts("NVIDIA GeForce RTX 5090", 2**35), 1.0).measured("580.95", 1)
    assert measured.host_update_per_s == (None if status == "FAIL" else rate)


def test_figures_that_failed_are_not_kept() -> None:
    findings = [
        judge_bandwidth(9e12, NOMINAL),
        judge_copy("host_to_device", 9e12, NOMINAL),
        judge_copy("device_to_host", 25e9, NOMINAL),
        judge("update", "slow", fail=True, seconds=9.0),
        judge("mfu", "impossible", fail=True, flops=9e14),
        judge("throughput", "fast").model_copy(update={"values": {"128/256": 3000.0}}),
    ]
    measured = make_report(findings, GpuFacts("NVIDIA GeForce RTX 5090", 2**35), 1.0).measured("580.95", 1)
    assert measured.model_dump(exclude_none=True, exclude_defaults=True) == {
        "driver": "580.95", "examined_at": 1, "device_to_host_bytes_per_s": 25e9,
    }  # fmt: skip


def test_power_of_which_nothing_is_said_is_warned_of() -> None:
    found = judge_power([GpuUse()] * 3, [GpuClock()] * 3, GpuPower())
    assert (found.status, found.figure, found.values) == ("WARN", "NVML tells nothing of it", {})


def test_what_is_not_said_of_power_is_not_shown_as_zero() -> None:
    found = judge_power([GpuUse(temperature_c=61)], [GpuClock(mhz=2400)], GpuPower())
    assert (found.status, found.figure) == ("PASS", "during the products: 2400 MHz, 61 °C, not slowed down")


@pytest.mark.parametrize(
    ("clock", "limit", "said"),
    [
        (GpuClock(2400, ("power brake",)), GpuPower(575, 575), "slowed down by power brake"),
        (GpuClock(2400), GpuPower(400, 575), "limit lowered from 575 W"),
    ],
)
def test_a_gpu_that_is_held_back_is_warned_of(clock: GpuClock, limit: GpuPower, said: str) -> None:
    found = judge_power([GpuUse(power_w=390.0, temperature_c=61)], [clock], limit)
    assert found.status == "WARN" and said in found.figure
