"""A test that changes its process fails, but where trainers do: there all is put back."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.leaks import OF_THE_PROCESS, what_leaks

LEAKS: dict[str, Callable[[], object]] = {
    "os.environ: {} → {'LEFT': '1'}": lambda: os.environ.update(LEFT="1"),
    "the working directory": lambda: os.chdir("/"),
    "the umask": lambda: os.umask(0o053),
    "handlers of the root logger": lambda: logging.getLogger().addHandler(logging.NullHandler()),
    "SIGUSR1": lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN),
}


@pytest.mark.parametrize("said", LEAKS)
def test_who_leaves_something_behind_fails(said: str) -> None:
    before = [(shared, shared.get()) for shared in OF_THE_PROCESS]
    elsewhere, of_a_trainer = (
        what_leaks(Path("/x/tests/jobs/test_x.py")),
        what_leaks(Path("/x/tests/training/test_x.py")),
    )
    next(of_a_trainer)
    next(elsewhere)
    LEAKS[said]()
    with pytest.raises(pytest.fail.Exception) as failed:
        next(elsewhere)
    assert said in str(failed.value)
    assert next(of_a_trainer, "done") == "done"
    assert [(shared, shared.get()) for shared, _ in before] == before
