"""The environment that `make engines` has made."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.stack import ROOT

PYTHON = Path(os.environ.get("ENGINES_VENV", ROOT / ".venv-engines")).absolute() / "bin" / "python"


@pytest.fixture(autouse=True, scope="session")
def _there_is_an_environment() -> None:
    if not PYTHON.exists():
        pytest.fail(f"there is no {PYTHON}; `make engines` makes it")
