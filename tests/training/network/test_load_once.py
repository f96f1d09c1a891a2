"""benchmarks.load_once on a small shape: the same check, the same control."""

from __future__ import annotations

import json

import pytest

from benchmarks import load_once


def test_a_model_is_in_memory_once_and_the_check_would_notice_otherwise(capfd: pytest.CaptureFixture[str]) -> None:
    assert load_once.main(["--size", "tiny"]) == 0
    found = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert found["load_peak_ratio"] <= 1.05
    assert (found["loads"], found["copies"]) == (1, 0)
    assert found["parameter_bytes"] <= found["mapped_weight_bytes"] < 1.01 * found["parameter_bytes"]
    assert found["control_ratio"] >= 1.5
    assert len(found["control_refused"]) == 2


def test_converting_fp32_holds_a_piece_at_a_time(capfd: pytest.CaptureFixture[str]) -> None:
    assert load_once.main(["--size", "tiny", "--convert"]) == 0
    found = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert found["shards"] > 1
    assert found["convert_host_growth_bytes"] < 200 * 2**20 < found["source_bytes"]
