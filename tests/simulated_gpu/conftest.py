"""The fixtures of tests/training, and a reason to skip where there is no simulated GPU."""

from __future__ import annotations

import importlib.util

import pytest

from tests.gpu.conftest import own_environment as own_environment
from tests.training.conftest import (
    _made_model as _made_model,
)
from tests.training.conftest import (
    _one_thread as _one_thread,
)
from tests.training.conftest import (
    _room_on_the_disk as _room_on_the_disk,
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


@pytest.fixture(autouse=True, scope="session")
def _simulated_gpu() -> None:
    if importlib.util.find_spec("simgpu") is None:
        pytest.skip("no simulated GPU here; `make test-simulated-gpu` brings it, where there is one")
