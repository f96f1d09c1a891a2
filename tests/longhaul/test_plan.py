"""`longhaul plan`: a dry run of the real stack, and what is shown of it."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from rich.console import Console

from jobs.evaluation_metrics import LabelPlan
from jobs.plan import DataPlan, ModelPlan, Plan, make_plan
from jobs.preview import RowPreview, TextPreview
from jobs.spec import JobSpec, parse_spec
from longhaul.plan import print_plan
from longhaul.preview import print_preview
from longhaul.tables import print_job
from tests.longhaul.conftest import Run, command
from tests.support.samples import memory_plan
from tests.support.samples import preview as make_preview
from tests.support.stack import Stack, tiny_job


@pytest.fixture
def stack(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stack]:
    """Service and check worker, and the environment that leads the command to them."""
    with Stack(tmp_path / "home", data=data) as made:
        made.start("service", "check")
        monkeypatch.setenv("LONGHAUL_URL", made.url)
        monkeypatch.delenv("LONGHAUL_API_KEY", raising=False)
        monkeypatch.setenv("COLUMNS", "200")
        yield made


@pytest.fixture
def run(stack: Stack, capsys: pytest.CaptureFixture[str]) -> Run:
    return command(capsys)


def test_a_plan_a_picture_and_a_refusal(run: Run, tmp_path: Path) -> None:
    job, picture = tmp_path / "job.json", tmp_path / "plan.png"
    job.write_text(json.dumps(tiny_job()))
    out = run("plan", str(job), "--png", str(picture))
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
    [chosen] = [line.split()[1] for line in out.splitlines() if line.startswith("→")]
    assert chosen == "adamw" and picture.read_bytes().startswith(b"\x89PNG")

    shown = run("plan", str(job), "--json", "--set", "memory.optimizer=adafactor")
    assert (shown["status"], shown["error"]) == ("validated", None)
    assert Plan.model_validate(shown["plan"]).resolved.optimizer == "adafactor"

    # It does not fit: the numbers, what to do, and the exit code of a job that failed.
    out = run("plan", str(job), "--set", "memory.budget=0.001", code=2)
    assert "the budget is 1 MiB (memory.budget)" in out and "hint:" in out and "a larger memory.budget" in out
    refused = run("plan", str(job), "--json", "--set", "memory.budget=0.001", code=2)
    assert (refused["error"]["code"], refused["plan"]) == ("does_not_fit", None)

    nowhere = str(tmp_path / "nowhere" / "plan.png")
    assert "No such file or directory" in run("plan", str(job), "--png", nowhere, code=2)
    assert "memory needed" in run("show", shown["job"])
    assert run("preview", shown["job"], "--json") == shown["preview"]
    assert run("list").startswith("no jobs yet") and shown["job"] in run("list", "--all")


def test_submit_shows_rows_as_the_model_gets_them_and_makes_neither_job_nor_sweep_of_a_mistake(
    run: Run, stack: Stack, data: Path, tmp_path: Path
) -> None:
    job, sweep = str(tmp_path / "job.json"), str(tmp_path / "sweep.json")
    Path(job).write_text(json.dumps(tiny_job()))
    lost = {"data": {"train": "nowhere.jsonl"}}
    Path(sweep).write_text(json.dumps({"job": {**tiny_job(), **lost}, "space": {"training.batch_size": [2, 4]}}))
    out = run("submit", job)
    assert "read as recipes: Write the directions." in out and "row 1" in out and "is validating" in out
    [made] = requests.get(f"{stack.url}/jobs", timeout=60).json()["data"]
    assert made["dry_run"] is False

    (data / "odd.jsonl").write_text('{"subject": "no", "body": "known columns"}\n')
    for change, told in (
        ("data.train=odd.jsonl", "recognized in odd.jsonl; it has: body, subject"),
        ("data.train=nowhere.jsonl", "there is no nowhere.jsonl"),
        ("model=./nowhere", "there is no folder ./nowhere"),
    ):
        said = run("submit", job, "--set", change, code=2)
        assert told in said and "hint:" in said
        assert told in run("submit", job, "--set", change, "--json", code=2)["error"]["message"]
    assert "there is no nowhere.jsonl" in run("sweep", sweep, code=2)
    said = run("sweep", sweep, "--set", 'space.data.train=["nowhere.jsonl", "rows.jsonl"]')
    assert "others are tried: data.train: there is no nowhere.jsonl" in said
    assert len(requests.get(f"{stack.url}/sweeps", timeout=60).json()["data"]) == 1
    assert "nothing was submitted" in run("clone", made["id"], "--dry-run")
    unchecked = run("submit", job, "--no-check", "--set", "model=./nowhere", "--json")["id"]
    jobs = requests.get(f"{stack.url}/jobs?dry_run=false", timeout=60).json()["data"]
    assert {each["id"] for each in jobs} == {made["id"], unchecked}


def text(shown: str, **more: Any) -> TextPreview:
    known = {"characters": len(shown), "tokens": 9, "cut_characters": 0, "unknown": {}}
    return TextPreview.model_validate({"text": shown, **known, **more})


def test_what_is_lost_of_a_row_is_said() -> None:
    rows = [
        RowPreview(number=7, input=text("\x1b[2Jb" * 99), target=text("short", unknown={"{": 2, "~": 1}), rewritten={}),
        RowPreview(number=1_234, input=text("x", tokens=None), target=text("y", cut_characters=21), rewritten={"½": 1}),
        RowPreview(
            number=9, input=text("a"), second=text("b", cut_characters=7), target=text("c", tokens=None), rewritten={}
        ),
    ]
    screen = io.StringIO()
    preview = make_preview(rows, read_as="OpenAI chat")
    [source] = preview.sources
    preview = preview.model_copy(
        update={"sources": [source.model_copy(update={"reading": "sheet 'A'", "duplicates": 1_200})]}
    )
    print_preview(preview, Console(file=screen, width=400, color_system=None))
    lines = [" ".join(line.split()) for line in screen.getvalue().splitlines()]
    assert lines[0] == "rows read as OpenAI chat: {a} → {b}"
    assert lines[1] == "from sheet 'A'"
    assert lines[2] == "left out: equal to an earlier row: 1,200 of the first rows"
    assert lines[3].startswith("row 7 input [2Jb[2Jb") and lines[3].endswith("… (9 tokens)")
    assert lines[4:] == [
        "target short (9 tokens) unknown to the tokenizer: '{' x 2, '~'",
        "row 1,234 input x",
        "target y (9 tokens) its last 21 characters are cut off (data.max_target_tokens)",
        "rewritten: '½'",
        "row 9 input a (9 tokens)",
        "and b (9 tokens) its last 7 characters are cut off (data.max_input_tokens)",
        "target c",
    ]


def test_rows_whose_tokenizer_is_yet_to_be_made_say_where_their_tokens_will_be() -> None:
    shown = io.StringIO()
    row = RowPreview(number=1, input=text("a", tokens=None), target=text("b", tokens=None), rewritten={})
    print_preview(make_preview([row]), Console(file=shown, width=400, color_system=None))
    assert "once the job is prepared, `longhaul preview ID`" in shown.getvalue()


def test_labels_and_what_is_new_of_a_classifier_are_named() -> None:
    labels = tuple(LabelPlan(name=f"label {n}", rows=max(1, 5 - n)) for n in range(7))
    preview = make_preview().model_copy(
        update={
            "labels": labels,
            "labels_in_all": 77,
            "labels_alike": (("Refund", "re\u200bfund"),),
            "labels_noticed": ("1.0 is read as 1",),
            "new_tensors": ("classifier.bias", "classifier.weight"),
        }
    )
    screen = io.StringIO()
    print_preview(preview, Console(file=screen, width=400, color_system=None))
    lines = [" ".join(line.split()) for line in screen.getvalue().splitlines()]
    assert lines[1:] == [
        "labels 77: label 0 (5 rows), label 1 (4 rows), label 2 (3 rows), label 3 (2 rows), label 4 (1 row), …",
        r"look alike, and are learned apart: 'Refund', 're\u200bfund'",
        "1.0 is read as 1",
        "new begin at random, for the model has none: classifier.bias, classifier.weight",
    ]


PREVIEW = make_preview(read_as="recipes")


def printed(plan: Plan, *gpus: dict[str, Any], spec: JobSpec | None = None) -> str:
    screen = io.StringIO()
    job: Any = {"spec": spec and spec.model_dump(mode="json"), "gpus": list(gpus)}
    print_plan(plan, PREVIEW, job, Console(file=screen, width=160, color_system=None))
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
    assert "5.0 GiB to spare" in text


def test_too_few_rows_to_learn_from_and_to_compare_are_told() -> None:
    spec = parse_spec({"data": {"train": "a.jsonl"}})
    data = DataPlan(train="x", input="x", target="x", rows=93, validation_rows=7)
    lines = printed(make_plan(spec, ModelPlan(source="x", parameters=1), data, "cuda", memory_plan()), spec=spec)
    told = " ".join(lines.split())
    assert "steps (rows: 93, epochs: " in told
    assert "evaluations look at only 7 rows that the model does not learn" in told and "try data.validation=0.4" in told


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
        "cloned_from": None, "verdict": None, "chosen_by": None, "better_step": None, "final_metrics": {},
        "estimated_start": None, "estimated_finish": None, "checkpoint": None, "fine_tuned_model": None,
        "run_dir": "runs/job-a", "kind": "train", "sweep": None, "engine": None, "task": None,
    }  # fmt: skip
    print_job(job, Console(file=screen, width=200, color_system=None))
    line = next(line for line in screen.getvalue().splitlines() if line.startswith("memory needed"))
    assert line.split(maxsplit=2)[2].strip() == memory_plan().text
