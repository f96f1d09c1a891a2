"""What a run says of its model: the metrics of every evaluation, how sure they are, and whether it is any better."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jobs.disk.rundir import RunDir
from jobs.trainer_facts import EvaluationFinished, Sample
from tests.training.attempts import attempt, facts, trained
from tests.training.conftest import VALIDATION_ROWS, MakeRun
from tests.training.workplace import Workplace, pairs
from tests.training.workplace import of_rows as of_rows
from worker.training.dataset.split import evaluation_rows
from worker.training.row_figures import file_of
from worker.training.scores import statistics
from worker.training.scores.texts import text_statistics
from worker.training.tasks.seq2seq.batches import PairBatch

EXAMPLES = Path(__file__).parents[2] / "examples"
FEW = {"evaluation": {"max_rows": 6, "generate_rows": 4, "samples": 2, "every_steps": 10}}
LEARNS = {
    "training": {"epochs": 20, "dropout": 0.0},
    "evaluation": {"max_rows": 100, "generate_rows": 5, "every_steps": 20},
}
NOTHING = {"training": {"epochs": 1, "learning_rate": 1e-30}, "evaluation": LEARNS["evaluation"]}
TEXTS = {"exact_match", "chrf", "bleu", "rouge1", "rouge2", "rougeL"}


@pytest.fixture
def _few_rows_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "LEAST_ROWS", 2)


@pytest.fixture(scope="module")
def whole(make_shared_run: MakeRun) -> RunDir:
    """A run that learns, uninterrupted."""
    run = make_shared_run("whole", **LEARNS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "LEAST_ROWS", 2)
        assert attempt(run) == 0
    return run


def rows_of(run: RunDir, step: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file_of(run, step).read_text().splitlines()]


def steps_kept(run: RunDir) -> list[int]:
    return sorted(int(file.stem.removeprefix("step-")) for file in (run.path / "evaluations").iterdir())


def test_a_run_measures_its_model_before_and_after(whole: RunDir) -> None:
    run = whole
    first, *_, last = facts(run, EvaluationFinished)
    assert set(last.metrics) == {"perplexity", "token_accuracy", *TEXTS}
    told = {"loss", *last.metrics} - {"rouge2"}  # of which all texts may have the same: there may be no pair of words
    assert told == set(last.intervals) - {"rouge2"} == set(last.against_base) - {"rouge2"}
    assert first.verdict is None and first.against_base == {} and first.judged_by == "chrf"
    assert last.metrics["perplexity"] == pytest.approx(np.exp(last.loss), rel=1e-5)
    assert last.intervals["loss"].low <= last.loss <= last.intervals["loss"].high
    assert last.against_base["loss"].difference == pytest.approx(last.loss - first.loss, abs=1e-5)
    assert len(last.samples) == 2 and (last.rows, last.text_rows) == (VALIDATION_ROWS, 5)
    lines = rows_of(run, last.step)
    assert [line["row"] for line in lines] == list(range(VALIDATION_ROWS))
    assert sum("generated" in line for line in lines) == 5
    losses = np.array([line["loss"] for line in lines])
    assert losses[:, 0].sum() / losses[:, 1].sum() == pytest.approx(last.loss, abs=1e-5)
    verdict = trained(run).verdict
    kept = next(fact for fact in facts(run, EvaluationFinished) if fact.step == trained(run).step)
    assert verdict == kept.verdict and verdict is not None and verdict.value == kept.metrics["chrf"]
    assert "the base model" in verdict.text and (run.model / "README.md").read_text().count(verdict.text) == 1
    assert {0, last.step} <= set(steps_kept(run)) and len(steps_kept(run)) <= 5


@pytest.mark.usefixtures("_few_rows_are_enough")
def test_a_model_that_has_learnt_nothing_is_no_better(make_run: MakeRun) -> None:
    run = make_run(**NOTHING)
    assert attempt(run) == 0
    verdict = trained(run).verdict
    assert verdict is not None and verdict.outcome == "no_better"
    assert verdict.text.endswith("no better than the base model, which does no better than chance (the same)")


def test_a_model_that_writes_nothing_is_said_to(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(batch: PairBatch, *_: object) -> list[Sample]:
        return [Sample(input="a", target="b", generated=" ") for _ in batch.rows]

    monkeypatch.setattr(PairBatch, "samples", silent)
    run = make_run(training={"epochs": 1}, evaluation={"generate_rows": 0, "samples": 3})
    assert attempt(run) == 0
    last, verdict = facts(run, EvaluationFinished)[-1], trained(run).verdict
    assert (last.base, last.generated_texts, last.empty_texts) == ("at_chance", 3, 3)
    assert verdict is not None and (verdict.outcome, verdict.metric) == ("writes_nothing", "loss")
    assert verdict.text in (run.model / "README.md").read_text()


@pytest.mark.usefixtures("_few_rows_are_enough")
def test_some_rows_stand_for_all_and_are_always_the_same(make_run: MakeRun) -> None:
    run = make_run(**FEW)
    assert attempt(run, 1, stop_at=15) == 75
    assert attempt(run, 2) == 0
    looked_at, written = (evaluation_rows(VALIDATION_ROWS, most, "random").tolist() for most in (6, 4))
    assert sorted(looked_at) != list(range(6)) and looked_at[:4] == written
    for step in (0, 20):
        lines = rows_of(run, step)
        assert [line["row"] for line in lines] == sorted(looked_at)
        assert [line["row"] for line in lines if "chrf" in line and "generated" in line] == sorted(written)
    last = facts(run, EvaluationFinished, 2)[-1]
    generated = {line["row"]: line["generated"] for line in rows_of(run, last.step) if "generated" in line}
    assert [sample.generated for sample in last.samples] == [generated[row] for row in written[:2]]
    assert set(last.against_base) == {"loss", *last.metrics}


def test_a_run_of_an_earlier_version_stays_with_the_first_rows(make_run: MakeRun) -> None:
    run = make_run(**FEW)
    plan = json.loads((run.path / "plan.json").read_text())
    del plan["data"]["evaluation_rows"]
    (run.path / "plan.json").write_text(json.dumps(plan))
    assert attempt(run) == 0
    lines = rows_of(run, 20)
    assert [line["row"] for line in lines] == list(range(6))
    assert [line["row"] for line in lines if "generated" in line] == list(range(4))


@pytest.mark.usefixtures("_few_rows_are_enough")
def test_other_rows_before_step_1_are_not_compared_with(make_run: MakeRun) -> None:
    run = make_run(**FEW)
    assert attempt(run, 1, stop_at=15) == 75
    lines = rows_of(run, 0)
    file_of(run, 0).write_text("".join(json.dumps(line | {"row": line["row"] + 1}) + "\n" for line in lines))
    assert attempt(run, 2) == 0
    assert facts(run, EvaluationFinished, 2)[-1].against_base == {}


@pytest.mark.usefixtures("_few_rows_are_enough")
def test_a_run_that_was_stopped_compares_with_the_same_base(make_run: MakeRun, whole: RunDir) -> None:
    broken = make_run("broken", **LEARNS)
    assert attempt(broken, 1, stop_at=35) == 75
    assert attempt(broken, 2) == 0
    assert (
        facts(broken, EvaluationFinished, 2)[-1].against_base == facts(whole, EvaluationFinished)[-1].against_base != {}
    )
    assert trained(broken, 2) == trained(whole)


def test_texts_of_random_weights_do_not_judge_what_learned_from_them(workplace: Workplace) -> None:
    """The first job of the README: chrF of the letters that its base writes is higher than that of what it learns."""
    job = json.loads((EXAMPLES / "job.json").read_text())
    shutil.copyfile(EXAMPLES / job["data"]["train"], workplace.data / "recipes.jsonl")
    del job["name"]
    job["training"]["epochs"], job["evaluation"]["sample_tokens"] = 1, 32
    run = workplace.job(job["data"].pop("train"), **job)
    workplace.prepare(run)
    assert attempt(run) == 0
    verdict = trained(run).verdict
    assert verdict is not None and (verdict.metric, verdict.outcome) == ("loss", "better")
    assert verdict.headline == "better than the untrained base model"


def test_a_text_is_scored_by_the_target_that_the_row_has(workplace: Workplace) -> None:
    workplace.rows("rows.jsonl", pairs(40))
    held_out = [{"input": "question 50", "target": "answer " * 40}, {"input": "question 51", "target": "knead 面 bake"}]
    workplace.rows("held_out.jsonl", held_out)
    run = workplace.job(
        data={"validation": "held_out.jsonl", "max_target_tokens": 8}, training={"epochs": 1, "batch_size": 40}
    )
    workplace.prepare(run)
    assert attempt(run) == 0
    lines = rows_of(run, 0)
    assert [line["target"] for line in lines] == [row["target"].strip() for row in held_out]
    assert [sample.target for sample in facts(run, EvaluationFinished)[0].samples] == [line["target"] for line in lines]
    letters = len(held_out[0]["target"].replace(" ", ""))
    assert max(lines[0]["chrf"]) == letters, "sacrebleu counts the characters of the whole reference"


def test_a_damaged_base_is_not_compared_with(make_run: MakeRun) -> None:
    run = make_run(**LEARNS)
    assert attempt(run, 1, stop_at=35) == 75
    file_of(run, 0).write_text('{"row": 0, "loss": [1')
    assert attempt(run, 2) == 0
    assert facts(run, EvaluationFinished, 2)[-1].against_base == {}
    verdict = trained(run, 2).verdict
    assert verdict is not None and verdict.outcome == "not_compared"


def test_only_what_is_asked_for_is_measured(make_run: MakeRun) -> None:
    run = make_run(
        training={"epochs": 1}, evaluation={"metrics": ["rougeL", "perplexity"], "generate_rows": 3, "samples": 0}
    )
    assert attempt(run) == 0
    last = facts(run, EvaluationFinished)[-1]
    assert set(last.metrics) == {"rougeL", "perplexity"} and last.judged_by == "rougeL" and last.samples == []
    assert set(rows_of(run, last.step)[0]) == {"row", "loss", "rougeL", "input", "target", "generated"}


def test_a_metric_that_nothing_computes_is_our_mistake_and_said(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "worker.training.evaluate.text_statistics",
        lambda *given: {metric: each for metric, each in text_statistics(*given).items() if metric != "chrf"},
    )
    run = make_run(training={"epochs": 1}, evaluation={"generate_rows": 3}, checkpoint={"best": "chrf"})
    with pytest.raises(AssertionError, match="nothing computes chrf"):
        attempt(run)
