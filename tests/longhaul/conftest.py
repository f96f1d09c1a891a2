"""The real service, and the environment that leads the command to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service.running import Service, running


@pytest.fixture
def service(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """A running service with a key; LONGHAUL_URL and LONGHAUL_API_KEY point to it."""
    key = "test-key-123"
    with running(redis_url, tmp_path, api_key=key) as each:
        monkeypatch.setenv("LONGHAUL_URL", each.url)
        monkeypatch.setenv("LONGHAUL_API_KEY", key)
        yield each
