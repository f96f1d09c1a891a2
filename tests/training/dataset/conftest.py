"""Rows are the subject of this folder: nothing is planned for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.workplace import Workplace


@pytest.fixture
def workplace(tmp_path: Path) -> Workplace:
    """Stages without a hub, that are told a plan of the memory."""
    return Workplace(tmp_path, planned=False)
