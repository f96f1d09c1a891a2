"""The benchmark of a model that writes beside training: it measures what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import try_interference


def test_it_writes_and_stands_beside_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(try_interference, "TURN_S", 2.0)
    found = try_interference.measure(tmp_path, pairs=1)
    assert found["pairs"] == 1 and found["ratio"] > 0
    assert found["words_per_s"] > 0
