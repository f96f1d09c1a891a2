"""What a new user gets wrong: said once, in one line, with the way out; never a traceback, never a retry."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jobs.errors import UserError
from jobs.spec import parse_spec
from tests.stack import ROOT, Stack
from worker.training.dataset.split import split


@pytest.mark.parametrize(("name", "value"), [("LONGHAUL_DEVICE", "gpu"), ("LONGHAUL_REDIS_URL", "localhost")])
def test_a_worker_with_a_wrong_setting_says_so_and_ends_with_2(tmp_path: Path, name: str, value: str) -> None:
    environment = Stack(tmp_path, data=tmp_path).environment | {name: value}
    command = [sys.executable, "-m", "worker", "train"]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 2 and name in ended.stderr and "Traceback" not in ended.stderr, ended.stderr


@pytest.mark.parametrize("key", ["learning_rate", "epochs"])
def test_true_is_no_number(key: str) -> None:
    with pytest.raises(UserError, match=f"schedule.{key}"):
        parse_spec({"data": {"train": "rows.jsonl"}, "schedule": {key: True}})


def test_the_only_row_is_a_training_row() -> None:
    parts = split(np.array([0], np.uint64), [1], 0.1)
    assert (len(parts["train"]), len(parts["validation"])) == (1, 0)
