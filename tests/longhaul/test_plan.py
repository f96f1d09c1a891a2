"""`longhaul plan`: a dry run of the real stack, and what is shown of it."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from jobs.plan import DataPlan, ModelPlan, Plan, make_plan
from jobs.spec import parse_spec
from longhaul.main import main
from longhaul.plan import print_plan
from longhaul.tables import print_job
from tests.memory_plans import memory_plan
from tests.stack import Stack, tiny_job


@pytest.fixture
def stack(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stack]:
    """Service and check worker, and the environment that leads the command to them."""
    with Stack(tmp_path / "home", data=data) as made:
        made.start("service", "check")
        monkeypatch.setenv("LONGHAUL_URL", made.url)
        monkeypatch.delenv("LONGHAUL_API_KEY", raising=False)
        monkeypatch.setenv("COLUMNS", "200")
        yield made


def test_a_plan_a_picture_and_a_refusal(stack: Stack, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "job.json"
    job.write_text(json.dumps(tiny_job()))
    picture = tmp_path / "plan.png"
    assert main(["plan", str(job), "--png", str(picture)]) == 0
    out = capsys.readouterr().out
    parts = (
        "read as recipes: Write the directions.",
        "weights",
        "activations",
        "what was tried",
        "no recomputation",
        "host memory",
        "checkpoints",
    )
    assert [part for part in parts if part not in out] == []
    chosen = next(line for line in out.splitlines() if line.startswith("→"))
    assert chosen.split()[1] == "adamw"
    assert picture.read_bytes().startswith(b"\x89PNG")

    assert main(["plan", str(job), "--json", "--set", "memory.optimizer=adafactor"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["status"], shown["error"]) == ("validated", None)
    assert Plan.model_validate(shown["plan"]).resolved.optimizer == "adafactor"

    # It does not fit: the numbers, what to do, and the exit code of a job that failed.
    assert main(["plan", str(job), "--set", "memory.budget=0.001"]) == 1
    out = capsys.readouterr().out
    assert "the budget is 1 MiB (memory.budget)" in out and "[does_not_fit]" in out
    assert "a larger memory.budget" in out
    assert main(["plan", str(job), "--json", "--set", "memory.budget=0.001"]) == 1
    refused = json.loads(capsys.readouterr().out)
    assert (refused["error"]["code"], refused["plan"]) == ("does_not_fit", None)

    assert main(["plan", str(job), "--png", str(tmp_path / "nowhere" / "plan.png")]) == 2
    assert "No such file or directory" in capsys.readouterr().err
    assert main(["show", shown["job"]]) == 0
    assert "memory needed" in capsys.readouterr().out


def printed(plan: Plan, *gpus: dict[str, Any]) -> str:
    screen = io.StringIO()
    job: Any = {"gpus": list(gpus), "plan": {"read_as": "recipes"}}
    print_plan(plan, job, Console(file=screen, width=160, color_system=None))
    return screen.getvalue()


def test_the_table_marks_what_was_chosen_and_says_what_does_not_fit() -> None:
    spec = parse_spec({"data": {"train": "a.jsonl"}})
    data = DataPlan(train="x", input="x", target="x", rows=8)
    text = printed(make_plan(spec, ModelPlan(source="x", parameters=1), data, "cuda", memory_plan()))
    lines = text.splitlines()
    chosen = next(line for line in lines if line.startswith("→"))
    assert chosen.split() == ["→", "adamw_8bit", "no", "recomputation", "8", "26.0", "GiB", "x", "1.05", "0.90"]
    too_large = next(line for line in lines if "does not fit" in line)
    assert "adamw " in too_large and "> 43.0 GiB" in too_large
    assert "adamw needs more than 43.0 GiB" in text
    assert "5.0 GiB free" in text


def test_which_gpus_can_take_it_is_told_where_there_is_a_choice_or_none_can() -> None:
    spec = parse_spec({"data": {"train": "a.jsonl"}})
    data = DataPlan(train="x", input="x", target="x", rows=8)
    plan = make_plan(spec, ModelPlan(source="x", parameters=1), data, "cuda", memory_plan())
    large = {"uuid": "GPU-1", "name": "NVIDIA H200", "memory_bytes": 140 * 2**30, "can_take": True, "why": None}
    small = {
        "uuid": "GPU-2",
        "name": "NVIDIA L4",
        "memory_bytes": 2**34,
        "can_take": False,
        "why": "NVIDIA L4 is small",
    }
    assert "NVIDIA H200" not in printed(plan, large), "the only one, and it can"
    told = printed(plan, large, small)
    assert "GPUs    NVIDIA H200 (140.0 GiB) can take it" in told and "        NVIDIA L4 is small" in told
    assert "GPUs    NVIDIA L4 is small" in printed(plan, small)


def test_show_tells_memory() -> None:
    screen = io.StringIO()
    job: Any = {
        "id": "job-a", "name": "a", "status": "queued", "requested": "none", "error": None, "waiting_reason": None,
        "gpus": [], "queue_position": None, "model": "m", "training_file": "rows.jsonl", "steps": None, "attempt": 0,
        "progress": {"at": None}, "plan": {"memory": memory_plan().summary().model_dump()}, "first_loss": None,
        "cloned_from": None,
        "estimated_start": None, "estimated_finish": None, "checkpoint": None, "fine_tuned_model": None,
        "run_dir": "runs/job-a",
    }  # fmt: skip
    print_job(job, Console(file=screen, width=200, color_system=None))
    line = next(line for line in screen.getvalue().splitlines() if line.startswith("memory needed"))
    assert line.split(maxsplit=2)[2].strip() == memory_plan().text
