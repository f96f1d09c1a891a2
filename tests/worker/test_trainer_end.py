"""What is said of a trainer that could not say itself why it ended."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from jobs.disk.rundir import create
from jobs.events import JobSubmitted
from jobs.spec import parse_spec
from jobs.state import Stage
from worker.trainer import Trainer, here


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("os.kill(os.getpid(), 9)", "(signal SIGKILL)"),
        ("raise RuntimeError('CUDA error: unknown')", "(exit code 1): RuntimeError: CUDA error: unknown"),
        ("faulthandler.enable(); os.abort()", "(signal SIGABRT): Fatal Python error: Aborted"),
    ],
)
def test_a_crash_is_explained_by_an_error_or_by_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, message: str
) -> None:
    program = tmp_path / "trainer"
    program.write_text(
        f"#!{sys.executable}\nimport faulthandler, logging, os\n"
        "logging.basicConfig(level='INFO', format='%(asctime)s %(levelname)s %(message)s')\n"
        f"logging.info('step 1200: validation loss 3.0384')\n{code}\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))
    spec = parse_spec({"data": {"train": "rows.jsonl"}})
    run, _ = create(tmp_path, "job-1", spec, JobSubmitted(name="tiny", model="m", spec_sha256="s"))
    trainer = Trainer(run, Stage.CHECK, None, here(os.environ))
    assert trainer.wait(60)
    error = trainer.end().error
    assert error is not None and error.message.endswith(message), error
