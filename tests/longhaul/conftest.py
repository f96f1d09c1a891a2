"""The real service, the environment that leads the command to it, and the command."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from longhaul.main import main
from tests.service.running import Service, running
from tests.support.redis_server import RedisServer

Run = Callable[..., Any]


@pytest.fixture(scope="session")
def _service_with_a_key(
    _redis_of_the_session: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("service")
    with running(_redis_of_the_session.url, folder, api_key="test-key-123") as each:
        yield each


@pytest.fixture
def service(redis_url: str, _service_with_a_key: Service, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """A running service with a key and without a job; LONGHAUL_URL and LONGHAUL_API_KEY point to it."""
    with _service_with_a_key.emptied() as each:
        monkeypatch.setenv("LONGHAUL_URL", each.url)
        monkeypatch.setenv("LONGHAUL_API_KEY", str(each.settings.api_key))
        yield each


def command(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command; returns what it printed, parsed where --json was asked for."""

    def run(*arguments: str, code: int = 0) -> Any:
        got = main(arguments)
        out, err = capsys.readouterr()
        assert got == code, out + err
        return json.loads(out) if "--json" in arguments else out + err

    return run


@pytest.fixture
def run(service: Service, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """The command, in `tmp_path/here`."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.delenv("LONGHAUL_DATA", raising=False)
    return command(capsys)
