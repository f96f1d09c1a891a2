"""What trainers find in their environment, and what not."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from jobs.disk.rundir import RunDir, create
from jobs.events import JobSubmitted
from jobs.redis.requests import Request
from jobs.spec import parse_spec
from jobs.state import Stage
from worker import generation
from worker.child import ChildGone
from worker.exports import ExportHandler, PushHandler
from worker.settings import from_environment
from worker.supervise import UNDER_A_LIMIT, trainer_environment


def job(folder: Path, **memory: Any) -> RunDir:
    spec = parse_spec({"data": {"train": "rows.jsonl"}, "memory": memory})
    return create(folder, "job-1", spec, JobSubmitted(name="n", model="m", spec_sha256=spec.sha256()))[0]


def environment(run: RunDir, stage: Stage = Stage.TRAIN, **variables: str) -> dict[str, str]:
    variables = {"LONGHAUL_DEVICE": "cpu", "HF_TOKEN": "s3cr3t", "CUDA_VISIBLE_DEVICES": "GPU-1", **variables}
    return trainer_environment(from_environment(variables), stage, run)


def limited(found: dict[str, str]) -> bool:
    """Whether memory is given back at the price of time: all of it or nothing."""
    present = UNDER_A_LIMIT.items() & found.items()
    assert present == UNDER_A_LIMIT.items() or not UNDER_A_LIMIT.keys() & found.keys()
    return bool(present)


def test_only_check_and_prepare_may_use_the_hub_and_only_training_the_gpu(tmp_path: Path) -> None:
    run = job(tmp_path)
    training, checking = environment(run), environment(run, Stage.CHECK)
    older = environment(run, HUGGING_FACE_HUB_TOKEN="s3cr3t")
    assert "s3cr3t" not in (*training.values(), *older.values())
    assert ("HF_TOKEN" in training, training["HF_HUB_OFFLINE"], training["CUDA_VISIBLE_DEVICES"]) == (
        False, "1", "GPU-1",
    )  # fmt: skip
    assert (checking["HF_TOKEN"], checking["CUDA_VISIBLE_DEVICES"]) == ("s3cr3t", "")
    assert training["PYTHONUNBUFFERED"] == checking["PYTHONUNBUFFERED"] == "1"


def test_of_what_is_done_with_a_finished_model_only_an_upload_gets_the_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job-1").mkdir()
    (tmp_path / "job-1" / "spec.json").write_text("{}")
    settings = from_environment({"LONGHAUL_DEVICE": "cpu", "LONGHAUL_RUNS": str(tmp_path), "HF_TOKEN": "s3cr3t"})
    assert "HF_TOKEN" not in ExportHandler(settings).environment()
    assert PushHandler(settings).environment()["HF_TOKEN"] == "s3cr3t"
    found: list[dict[str, str]] = []

    def started(_: object, environment: dict[str, str]) -> None:
        found.append(environment)
        raise ChildGone("it was only to be started")

    monkeypatch.setattr(generation, "JsonChild", started)
    with pytest.raises(ChildGone):
        generation.GenerationHandler(settings).answer(
            Request(id="a", kind="generate", job="job-1", payload={"input": "x"}), cast("Any", None)
        )
    assert "LONGHAUL_DEVICE" in found[0] and "s3cr3t" not in found[0].values()
    assert "s3cr3t" not in repr(settings)


def test_memory_is_given_back_only_where_there_is_a_limit_on_a_cpu(tmp_path: Path) -> None:
    assert not limited(environment(job(tmp_path / "a")))
    assert limited(environment(job(tmp_path / "b"), LONGHAUL_TEST_MEMORY_LIMIT="1"))
    run = job(tmp_path / "c", budget=2)
    assert limited(environment(run))
    assert not limited(environment(run, Stage.PREPARE))
    assert not limited(environment(run, LONGHAUL_DEVICE="cuda"))


@pytest.mark.parametrize("damage", ["{", None])
def test_a_damaged_job_is_left_for_the_trainer_to_name(tmp_path: Path, damage: str | None) -> None:
    run = job(tmp_path, budget=2)
    run.spec_file.unlink()
    if damage is not None:
        run.spec_file.write_text(damage)
    assert not limited(environment(run))
