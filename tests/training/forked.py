"""A process that is forked from the one of the tests: what ends, is killed or prints does so alone, and nothing is
imported anew. Tests compute with one thread, so none is lost by it.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn
from unittest.mock import patch

import torch

from worker.training.__main__ import main


@dataclass
class Forked:
    """One that was begun, of which `wait` tells how it ended."""

    pid: int
    _folder: tempfile.TemporaryDirectory[str] = field(repr=False)

    def wait(self) -> tuple[int, str, str]:
        """Exit code, or the signal's number below 0; stdout; stderr."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        with self._folder as folder:
            out, err = ((Path(folder) / name).read_text() for name in ("out", "err"))
        return code, out, err

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    @property
    def ended(self) -> bool:
        """Whether it has ended; `wait` still has to be called."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    @property
    def log(self) -> str:
        """Its stderr so far."""
        return (Path(self._folder.name) / "err").read_text()


def fork(work: Callable[[], int | None], **environment: str) -> Forked:
    """Do it in a child, which has these variables besides and ends with what `work` returns; None is 0."""
    folder = tempfile.TemporaryDirectory()
    with patch.dict(os.environ, {"TOKENIZERS_PARALLELISM": "false"} | environment):
        pid = os.fork()
        if not pid:
            _run(work, Path(folder.name))
    return Forked(pid, folder)


def stage(*arguments: str | Path, **environment: str) -> Forked:
    """`python -m worker.training …` on a CPU, as a supervisor starts it."""
    more = {"LONGHAUL_DEVICE": "cpu", "LONGHAUL_PARENT_PID": str(os.getpid())} | environment
    return fork(lambda: main([str(each) for each in arguments]), **more)


def _run(work: Callable[[], int | None], folder: Path) -> NoReturn:
    code = 1
    try:
        _become(folder)
        code = work() or 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _become(folder: Path) -> None:
    """As one that was started: nothing of pytest's is left."""
    files = [os.open(os.devnull, os.O_RDONLY)]
    files += [os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND) for name in ("out", "err")]
    for standard, file in enumerate(files):
        os.dup2(file, standard)
        os.close(file)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False, buffering=1) for number in (1, 2))
    warnings.resetwarnings()
    for quiet in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", quiet)
    logging.root.handlers.clear()
    logging.root.setLevel(logging.WARNING)
    # torch makes its pool of threads anew after a fork, and does not guard that against a second thread:
    # "Invalid thread pool!" (pthreadpool in torch's caffe2/utils/threadpool/pthreadpool-cpp.cc).
    torch.set_num_threads(torch.get_num_threads())
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)
