"""One engine and one set of containers for all tests here."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator

import pytest

from jobs.text.units import format_duration
from tests.docker.engine import ROOT, Containers, NoEngine, docker_engine


@pytest.fixture(scope="session")
def _engine() -> Iterator[dict[str, str]]:
    engine = docker_engine()
    try:
        environment = engine.__enter__()
    except NoEngine as error:
        pytest.skip(str(error))
    try:
        yield environment
    finally:
        engine.__exit__(None, None, None)


@pytest.fixture(scope="session")
def _containers(_engine: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Containers]:
    """All services, built from the working tree and healthy."""
    home = tmp_path_factory.mktemp("containers")
    containers = Containers(home, _engine)
    recipes = ROOT / "examples" / "recipes.jsonl"
    shutil.copy(recipes, home / "data")
    (home / "data" / "few.jsonl").write_text("".join(recipes.read_text().splitlines(keepends=True)[:64]))
    began = time.monotonic()
    try:
        containers.compose("build")
        built = time.monotonic()
        said = containers.compose("up", "-d", check=False)
        if "could not select device driver" in said:
            pytest.skip("this Docker engine cannot hand out an NVIDIA GPU (NVIDIA Container Toolkit is missing)")
        containers.up()
        print(f"built in {format_duration(built - began)}, healthy after {format_duration(time.monotonic() - built)}")
        yield containers
    finally:
        containers.compose("down", "--volumes", "--rmi", "local", "--timeout", "20", check=False)
        containers.docker("rmi", "--force", containers.image("worker"), check=False)


@pytest.fixture
def containers(_containers: Containers) -> Containers:
    """All services, built from the working tree and healthy, whatever the test before has stopped."""
    if not _containers.healthy():
        _containers.up()
    return _containers
