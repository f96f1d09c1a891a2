"""What tests of plans share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from worker.training.planning.predictor import Predictor


@pytest.fixture(scope="session")
def _traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture
def traced_once(_traces: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of large models are traced once for all tests, as on a box for all jobs."""

    def predictor(*given: Any, traces: Path | None = None, **more: Any) -> Predictor:
        return Predictor(*given, traces=_traces, **more)

    for module in ("memory_plan", "alternatives"):
        monkeypatch.setattr(f"worker.training.planning.{module}.Predictor", predictor)
