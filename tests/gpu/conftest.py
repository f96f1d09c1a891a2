"""The fixtures of tests/training, on the GPU."""

from __future__ import annotations

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
