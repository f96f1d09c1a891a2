"""One service per test, on the session's Redis."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service.running import Service, running


@pytest.fixture
def service(redis_url: str, tmp_path: Path) -> Iterator[Service]:
    """A running service."""
    with running(redis_url, tmp_path) as each:
        yield each
