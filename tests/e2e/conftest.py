"""One stack for all tests here that can share it, and one `longhaul local`."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.local import Local
from tests.support.recipes import ROWS
from tests.support.shared_stack import mended, shared_stack
from tests.support.stack import Stack
from tests.training.hub_server import Hub

LONGHAUL = str(Path(sys.executable).with_name("longhaul"))
TOKEN = "hf_plantedPlantedPlantedPlanted"


@pytest.fixture(scope="package")
def package_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Not started, or as a test has left it."""
    with shared_stack(tmp_path_factory.mktemp("e2e")) as stack:
        yield stack


@pytest.fixture
def stack(package_stack: Stack) -> Stack:
    """Redis and every role, running, and no job that has not ended."""
    return mended(package_stack)


@pytest.fixture(scope="package")
def hub() -> Iterator[Hub]:
    """A hub that takes a token."""
    with Hub() as server:
        server.token = TOKEN
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture(scope="package")
def local(tmp_path_factory: pytest.TempPathFactory, hub: Hub) -> Iterator[Local]:
    """In a folder with a data directory, and with rows that are not in it."""
    folder = tmp_path_factory.mktemp("local")
    (folder / "data").mkdir()
    (folder / "rows.jsonl").write_text("".join(ROWS.read_text().splitlines(keepends=True)[:48]))
    environment = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0", "WANDB_MODE": "disabled"}
    with Local(folder, [LONGHAUL, "local"], environment=environment) as local:
        yield local
