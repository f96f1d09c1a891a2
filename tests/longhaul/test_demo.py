"""What the demo makes of a job that has ended, and where it takes its data and model from. (All of it: tests/e2e.)"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from jobs.trainer_facts import EvaluationFinished, Sample
from longhaul import demo
from longhaul.jobfile import BadInput

SAMPLE = Sample(input="Write the directions.\n" + "x" * 300, target="Stir.", generated="Bake [bold]it[/bold].")


def report(tmp_path: Path, losses: list[float], **changes: Any) -> tuple[int, str]:
    (tmp_path / "runs" / "job-1").mkdir(parents=True)
    (tmp_path / "runs" / "job-1" / "loss.png").touch()
    job: Any = {
        "status": "succeeded",
        "error": None,
        "run_dir": "runs/job-1",
        "fine_tuned_model": "runs/job-1/model",
        **changes,
    }
    evaluations = [
        EvaluationFinished(step=step, loss=loss, rows=5, seconds=1.0, best=True, samples=[SAMPLE] * 5)
        for step, loss in enumerate(losses)
    ]
    out = io.StringIO()
    return demo._report(Console(file=out, width=300), job, evaluations, tmp_path), out.getvalue()


def test_success_shows_paths_samples_and_both_losses(tmp_path: Path) -> None:
    code, out = report(tmp_path, [6.0, 4.0, 3.0])
    assert code == 0
    for part in ("runs/job-1/model", "runs/job-1/loss.png", "runs/job-1/trainer.log", "6.0000 → 3.0000: 50 % lower"):
        assert part in out
    assert out.count("Bake [bold]it[/bold].") == 3


@pytest.mark.parametrize(
    ("losses", "changes", "part"),
    [
        ([6.0, 3.7], {}, "less than the 40 %"),
        ([6.0], {}, "0 % lower"),
        ([], {}, "no evaluation"),
        ([6.0, 1.0], {"status": "failed", "error": {"message": "no room left"}}, "no room left"),
        ([6.0, 1.0], {"status": "cancelled"}, "the job was cancelled"),
    ],
)
def test_anything_else_is_a_failure(tmp_path: Path, losses: list[float], changes: dict[str, Any], part: str) -> None:
    code, out = report(tmp_path, losses, **changes)
    assert code == 1
    assert part in out


def test_its_data_and_a_model_folder_are_copied_into_its_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examples, model = tmp_path / "examples", tmp_path / "my-model"
    for folder in (examples, model):
        folder.mkdir()
    (examples / "job.json").write_text(json.dumps({"data": {"train": "recipes.jsonl"}}))
    (examples / "recipes.jsonl").write_text("{}\n")
    (model / "config.json").write_text("{}")
    monkeypatch.setattr(demo, "EXAMPLES", examples)
    home = tmp_path / "home"
    assert demo._job(home, "job.json", None) == {"data": {"train": "recipes.jsonl"}}
    assert (home / "data" / "recipes.jsonl").exists()
    assert demo._job(home, "job.json", "org/name")["model"] == "org/name"
    assert demo._job(home, "job.json", str(model))["model"] == "./model"
    assert (home / "data" / "model" / "config.json").exists()
    (examples / "job.json").unlink()
    with pytest.raises(BadInput, match="run the demo from a clone"):
        demo._job(home, "job.json", None)
