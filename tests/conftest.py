"""Fixtures that every part uses: one real Redis per process of the run, emptied before each test that asks for it.

`make test` runs two processes beside each other (pytest-xdist). Files stay whole; so do the folders e2e and faults,
in each of which one stack serves most tests, and everything on a GPU.
"""

from __future__ import annotations

import gc
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

# Before torch: pydantic looks for the source of each of its models among all modules that are loaded.
import service.main  # noqa: F401
from tests.leaks import nothing_leaks as nothing_leaks
from tests.leaks import nothing_leaks_from_a_module as nothing_leaks_from_a_module
from tests.support.browser import browser as browser
from tests.support.recipes import write_recipes
from tests.support.redis_server import RedisServer
from tests.support.stack import NEVER_IDLE

TOGETHER = {"e2e": "e2e", "faults": "faults", "gpu": "gpu"}
"""Folder of tests → the group whose tests run one after the other, in one process."""

LONG = (
    "e2e/test_boxes.py", "e2e/test_clouds.py", "e2e/test_newcomer.py", "e2e/test_slurm.py", "faults/test_fencing.py",
    "training/ranks/test_attempts.py",
)  # fmt: skip
"""Files whose tests `make test-long` runs: whole jobs of several boxes, engines or ranks, a minute or more each."""

hypothesis.settings.register_profile(
    "on any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("on any machine")
# Traces of memory plans are made once for all processes of a run.
if "LONGHAUL_TRACES" not in os.environ:
    _traces = tempfile.TemporaryDirectory(prefix="longhaul-traces-")
    os.environ["LONGHAUL_TRACES"] = _traces.name
# For what tests start with the environment as it is; `Stack` and `Local` give it to theirs.
os.environ["PYTHONPATH"] = os.pathsep.join([str(NEVER_IDLE), *filter(None, [os.environ.get("PYTHONPATH")])])
# Read when ctranslate2 is imported, which a test module may do before the code that sets it (ctranslate2_folder.py).
os.environ.setdefault("CT2_USE_MKL", "1")
# Of whoever tests: what commands print is as wide as it says.
os.environ.pop("COLUMNS", None)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what runs in the background so, and children inherit it: those of tests have to hear Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)


class ByFolderOrFile(LoadScopeScheduling):  # type: ignore[misc]  # untyped in pytest-xdist
    """Deals out whole files, and whole folders that share a stack. (`--dist loadgroup` does not see groups with pytest
    9.2.)
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::")[0]
        folder = Path(file).parent.name
        return file if file.endswith(LONG) else TOGETHER.get(folder, file)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Mark what is long. What takes longest comes first; folders stay together, in whichever order pytest-randomly has
    brought them: some share a running Longhaul.
    """
    for item in items:
        if item.path.as_posix().endswith(LONG):
            item.add_marker("long")
    yield
    folders: dict[Path, int] = {}
    for item in items:
        folders.setdefault(item.path.parent, len(folders))
    items.sort(key=lambda item: (item.path.parent.name not in TOGETHER, folders[item.path.parent]))


def pytest_collection_finish() -> None:
    """What was imported stays: as in a trainer, the collector need not walk through it (0.5 s each time)."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)  # nobody asks without pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    config.option.loadscopereorder = False  # the largest first, by the number of tests
    return ByFolderOrFile(config, log)


@pytest.fixture(scope="session")
def _redis_of_the_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def redis_server(_redis_of_the_session: RedisServer) -> RedisServer:
    """A running server without a job. Do not stop it: a test about outages makes its own RedisServer."""
    _redis_of_the_session.flush()
    _redis_of_the_session.mark_rebuilt()
    return _redis_of_the_session


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """URL of the running server without a job."""
    return redis_server.url


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data directory: rows.jsonl with 64 recipes, held_out.jsonl with 12 others."""
    folder = tmp_path / "data"
    folder.mkdir()
    return write_recipes(folder)
