"""The fixtures of tests/training, on the GPU."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch

from tests.training.conftest import (
    _made_model as _made_model,
)
from tests.training.conftest import (
    dataset_folder as dataset_folder,
)
from tests.training.conftest import (
    make_run as make_run,
)
from tests.training.conftest import (
    model_folder as model_folder,
)

DEVICE = torch.device(os.environ.get("LONGHAUL_TEST_DEVICE", "cuda"))


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """An attempt in the process of a test sets variables that its own would end with: which GPUs it sees, for one."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture
def refuse_waits() -> Iterator[Callable[[], None]]:
    """Call it: from then to the end of the test, what waits for the GPU raises RuntimeError."""

    def refuse() -> None:
        with warnings.catch_warnings():  # torch warns once in a process that this mode is a prototype
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype", UserWarning)
            torch.cuda.set_sync_debug_mode("error")

    if DEVICE.type != "cuda":
        yield lambda: None
        return
    yield refuse
    torch.cuda.set_sync_debug_mode("default")
