"""One stack for all tests of workers that can share it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jobs.disk.rundir import list_runs
from tests.support.recipes import write_recipes
from tests.support.stack import Stack


@pytest.fixture(scope="session")
def _stack_of_the_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    home = tmp_path_factory.mktemp("workers")
    with Stack(home / "home", data=write_recipes(home), environment={"LONGHAUL_LOG": "json"}) as stack:
        yield stack


@pytest.fixture
def stack(_stack_of_the_session: Stack) -> Iterator[Stack]:
    """Without a job that anybody could take. A test starts what it needs (`start_if_gone`); all but `train` stays."""
    stack = _stack_of_the_session
    yield stack
    for role in [role for role in stack.processes if role.startswith("train")]:
        stack.stop(role)
    for run in list_runs(stack.runs):
        if not run.record().status.terminal:
            stack.post(run, "cancel")  # one whose worker was killed is cancelled when its lease has run out
