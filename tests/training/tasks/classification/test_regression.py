"""Regression: the loss is that of transformers, the metrics are those of scipy, and scores come out as they went in."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import RobertaForSequenceClassification, pipeline

from jobs.dataset_report import DatasetReport
from jobs.disk.rundir import RunDir
from jobs.errors import BadData, Rejected
from jobs.export import ExportFormat, FinishedModel
from jobs.preview import DataPreview
from jobs.trainer_facts import EvaluationFinished
from tests.support.samples import dataset_summary
from tests.training.attempts import attempt, facts, same_tensors, trained
from tests.training.snippets import blocks, run_snippet
from tests.training.tasks.classification.families import VOCABULARY, model_of, write_pretrained
from tests.training.workplace import Workplace, dataset_of, rejected
from worker.training.dataset.data import PreparedDataset, Rows, Writer
from worker.training.loop import accumulate
from worker.training.scores.statistics import interval, score
from worker.training.tasks.classification import fused
from worker.training.tasks.classification.batches import ClassLimit
from worker.training.tasks.classification.regression import SquaredError, score_statistics, scores_of

TASK = {"task": "regression"}
SHORT: dict[str, Any] = {
    "training": {"epochs": 1, "batch_size": 8, "learning_rate": 1e-3},
    "evaluation": {"every_steps": 3, "samples": 2},
    "checkpoint": {"every_minutes": None, "every_steps": 3, "best": "rmse"},
}
SCORES = [0.0, 1.25, 4.2, 2.5, 5.0, 3.1, 0.4, 1e-3, 2.5]


@pytest.fixture
def place(tmp_path: Path) -> Workplace:
    found = Workplace(tmp_path, planned=False)
    found.rows("rows.jsonl", rows_of(48))
    return found


def rows_of(count: int, scale: float = 1.0) -> list[dict[str, Any]]:
    """Texts whose score is the share of good words, from 0 to 5, times a scale."""
    words = [["good" if (n * 7 + place) % 8 < n % 6 else "bad" for place in range(8)] for n in range(count)]
    return [
        {"text": f"{' '.join(each)}, row {n}", "score": scale * round(each.count("good") / 1.6 + n % 3 / 10, 3)}
        for n, each in enumerate(words)
    ]


def job(place: Workplace, train: str = "rows.jsonl", model: str = "builtin:roberta-tiny", **parts: Any) -> RunDir:
    data = {"max_input_tokens": 32, "validation": 0.25} | parts.pop("data", {})
    return place.job(train, model=model, data=data, **TASK | SHORT | parts)


# -- loss --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [VOCABULARY, 100_000])
def test_the_loss_is_that_of_transformers_however_a_step_is_cut(vocabulary: int, tmp_path: Path) -> None:
    """In float64, of a head that transformers makes for one label; scores are exact in tokens of either width."""
    rows = prepared(tmp_path, vocabulary)
    assert scores_of(rows, np.arange(len(SCORES))).tolist() == SCORES
    model = model_of("roberta", labels=("LABEL_0",)).train()
    assert isinstance(model, RobertaForSequenceClassification) and model.num_labels == 1
    assert model.config.problem_type == "regression"
    fused.configure(model, fused=True, dropout=0.0)
    model.train()
    width = int(rows.input_lengths.max())
    everything = np.arange(len(rows))
    ids = torch.from_numpy(rows.gather("input", everything, width, 1))
    mask = torch.from_numpy((np.arange(width) < rows.input_lengths[:, None]).astype(np.int64))
    expected = model(input_ids=ids, attention_mask=mask, labels=torch.tensor(SCORES, dtype=torch.float64)).loss
    expected.backward()
    wanted = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    largest = max(float(each.norm()) for each in wanted.values())
    for micro_batch in (1, 4, len(rows)):
        model.zero_grad()
        batches = ClassLimit.of(rows, micro_batch).with_loss(SquaredError()).batches(rows, [everything], 1)
        assert float(accumulate(model, batches)) == pytest.approx(expected.item(), rel=1e-12)
        for name, each in model.named_parameters():
            assert each.grad is not None and float((each.grad - wanted[name]).norm()) <= 1e-12 * largest


def prepared(folder: Path, vocabulary: int) -> Rows:
    draw = np.random.default_rng(3)
    width = "<u2" if vocabulary < 2**16 else "<u4"
    with Writer(folder, vocabulary) as writer:
        inputs = [draw.integers(5, VOCABULARY, draw.integers(6, 31)) for _ in SCORES]
        writer.add(inputs, [np.array([each], "<f8").view(width) for each in SCORES])
        writer.finish({"train": np.arange(len(SCORES)), "validation": np.arange(0)}, dataset_summary())
    return PreparedDataset.open(folder).train


# -- metrics -----------------------------------------------------------------------------------------------------------

TRUTH = [0.0, 1.5, 1.5, 2.25, 3.0, 3.0, 3.0, 4.75, 5.0, -1.0]
TOLD = [0.2, 1.1, 1.9, 1.9, 2.8, 3.5, 2.8, 4.0, 5.5, 0.2]
AGAIN = [0, 0, 1, 3, 3, 5, 6, 7, 8, 9, 9]
"""A resample of these rows, as the bootstrap draws them."""


@pytest.mark.parametrize(
    ("metric", "expected", "resampled"),
    [  # the correlations: of scipy 1.14.1
        ("mse", 0.3065, 0.4061363636363637),
        ("rmse", 0.5536244214266564, 0.4061363636363637**0.5),
        ("mae", 0.47, 0.5318181818181819),
        ("pearson", 0.954720992135691, 0.956619207440463),
        ("spearman", 0.9782797401561579, 0.9789563241898354),
    ],
)
def test_metrics_are_those_of_scipy_also_of_resamples(metric: str, expected: float, resampled: float) -> None:
    found = score_statistics(np.array(TRUTH), np.array(TOLD))[metric]  # type: ignore[index]  # a name is a metric
    assert score(found) == pytest.approx(expected, abs=1e-12)
    drawn = np.bincount(AGAIN, minlength=len(TRUTH)).astype(np.float64)[None]
    assert found.scores(drawn)[0] == pytest.approx(resampled, abs=1e-12)
    assert score(found.like(json.loads(json.dumps(found.of_rows)))) == score(found)


def test_metrics_have_intervals_and_a_constant_has_no_correlation() -> None:
    draw = np.random.default_rng(1)
    truth = draw.normal(70, 5, 200)
    told = truth + draw.normal(0, 2, 200)
    for statistics in score_statistics(truth, told).values():
        between = interval(statistics)
        assert between is not None and between.low < score(statistics) < between.high
    constant = score_statistics(truth, np.full(200, 0.1))
    assert {str(name) for name, each in constant.items() if not np.isfinite(score(each))} == {"pearson", "spearman"}


# -- rows --------------------------------------------------------------------------------------------------------------

WRITTEN = ["4.5", " 3 ", "-1e1", ".5", "", "n/a", "NaN", "inf", "3,5", "1_000", "1e999"]


def test_scores_are_read_as_they_are_written_and_others_are_counted(place: Workplace) -> None:
    with open(place.data / "rows.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["text", "rating"])
        table.writerows([f"text number {n}", each] for n, each in enumerate([*WRITTEN, *map(str, range(40))]))
    run = job(place, "rows.csv", data={"max_invalid_fraction": 0.2})
    checked = place.check(run)["plan"]
    assert (
        checked["task"] == "regression" and checked["read_as"] == "text and rating" and checked["target"] == "{rating}"
    )
    reasons = {
        "empty rating": [6],
        "a score that is no number": [7, 11],
        "a score that is not finite": [8, 9, 12],
        "a decimal comma": [10],
    }
    assert checked["invalid_rows"] == {why: len(lines) for why, lines in reasons.items()}
    place.prepare_only(run)
    found: dict[str, list[int]] = {}
    for each in rejected(run):
        found.setdefault(each["reason"], []).append(each["line"])
    assert found == reasons
    data = dataset_of(run)
    scores = [
        *scores_of(data.train, np.arange(len(data.train))),
        *scores_of(data.validation, np.arange(len(data.validation))),
    ]
    assert sorted(scores) == sorted([4.5, 3.0, -10.0, 0.5, *range(40)])


@pytest.mark.parametrize(
    ("value", "reason"),
    [(True, "a score that is no number"), (None, "missing score"), ([1, 2], "a score that is no number"),
     ({"a": 1}, "an object in score"), (10**400, "a score that is not finite")],
)  # fmt: skip
def test_what_is_no_number_in_json_is_rejected(value: Any, reason: str, place: Workplace) -> None:
    place.rows(
        "rows.jsonl", [{"text": f"text {n}", "score": 0.5 * n} for n in range(40)] + [{"text": "a", "score": value}]
    )
    invalid = place.check(job(place, data={"max_invalid_fraction": 0.1}))["plan"]["invalid_rows"]
    assert list(invalid.values()) == [1] and next(iter(invalid)).startswith(reason)


def test_check_and_prepare_tell_range_mean_deviation_and_what_the_mean_alone_would_do(place: Workplace) -> None:
    place.rows("rows.jsonl", [{"text": f"text {n}", "score": n % 5} for n in range(50)])
    run = job(place, data={"validation": 0.2})
    place.check(run)
    said = (
        "scores from 0 to 4, mean 2, standard deviation 1.414: always answering the mean has a mean squared error of 2"
    )
    assert DataPreview.model_validate_json((run.path / "preview.json").read_bytes()).labels_noticed == (said,)
    found = place.prepare_only(run)["data"]
    assert (
        found["scores"] == pytest.approx({"low": 0, "high": 4, "mean": 2, "deviation": 2**0.5})
        and "labels" not in found
    )
    assert DatasetReport.model_validate_json((run.path / "dataset.json").read_bytes()).scores is not None


def test_scores_that_tell_nothing_and_heads_of_several_labels_are_refused(place: Workplace) -> None:
    place.rows("same.jsonl", [{"text": f"text {n}", "score": 3} for n in range(30)])
    with pytest.raises(BadData, match="all rows have the score 3"):
        place.check(job(place, "same.jsonl"))
    write_pretrained(place.data / "model", "roberta", ("good", "bad", "so so"))
    with pytest.raises(Rejected, match="a classifier already, with 3 labels"):
        place.check(job(place, model="./model"))


# -- jobs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_job_resumes_bit_for_bit_and_transformers_opens_what_it_delivers(method: str, place: Workplace) -> None:
    write_pretrained(place.data / "model", "roberta")
    how: dict[str, Any] = {"method": {"type": "lora", "merge": True, "rank": 4} if method == "lora" else "full"}
    training = SHORT["training"] | {"epochs": 2, "learning_rate": 0.01}
    whole, broken = (job(place, model="./model", training=training, **how) for _ in range(2))
    place.prepare(whole)
    broken.write_plan(whole.plan())
    assert attempt(whole) == 0
    seen = facts(whole, EvaluationFinished)
    assert set(seen[-1].metrics) == {"mse", "rmse", "mae", "pearson", "spearman"} and seen[-1].judged_by == "rmse"
    assert seen[-1].metrics["mse"] == pytest.approx(seen[-1].loss, rel=1e-5)
    assert trained(whole).metrics["rmse"] == min(each.metrics["rmse"] for each in seen if each.step)
    assert attempt(broken, stop_at=6) == 75 and attempt(broken, 2) == 0
    assert same_tensors(whole.model / "model.safetensors", broken.model / "model.safetensors")
    assert facts(broken, EvaluationFinished, 2)[-1].metrics == seen[-1].metrics

    config = json.loads((whole.model / "config.json").read_text())
    assert (config["problem_type"], config["id2label"]) == ("regression", {"0": "LABEL_0"})
    opened = pipeline("text-classification", model=str(whole.model), function_to_apply="none")
    step = next(each for each in seen if each.step == trained(whole).step)
    for sample in step.samples:
        assert opened(sample.input)[0]["score"] == pytest.approx(float(sample.generated), abs=0.05)
    page = (whole.model / "README.md").read_text()
    assert "(mean squared error)" in page and "nats" not in page.partition("## Use")[0].replace("merged", "")


def test_the_snippet_gives_the_score_of_the_sample(place: Workplace) -> None:
    run = job(place)
    place.prepare(run)
    assert attempt(run) == 0
    told = blocks((run.model / "README.md").read_text(), "text")[0]
    assert float(run_snippet(run.model)) == pytest.approx(float(told), abs=0.05)


def test_a_new_head_begins_at_the_scores_and_learns_them_in_their_unit(place: Workplace) -> None:
    """Of 0 to 100."""
    rows = rows_of(128, scale=20.0)
    place.rows("rows.jsonl", rows)
    run = job(place, training=SHORT["training"] | {"epochs": 6}, evaluation={"every_steps": 90, "samples": 0})
    place.prepare(run)
    stored = load_file(Path(str(run.plan().model.folder)) / "model.safetensors")
    mean, deviation = np.mean([row["score"] for row in rows]), np.std([row["score"] for row in rows])
    assert float(stored["classifier.out_proj.bias"]) == pytest.approx(mean, rel=0.01)
    assert float(stored["classifier.out_proj.weight"].float().std()) == pytest.approx(0.02 * deviation, rel=0.25)
    assert attempt(run) == 0
    last = facts(run, EvaluationFinished)[-1]
    assert last.metrics["rmse"] < 0.6 * deviation and last.metrics["spearman"] > 0.8


@pytest.mark.parametrize(
    ("rows", "hint"),
    [
        (
            [f"text {n}\t{n / 7:.3f}" for n in range(60)],
            "labels look like scores (0.000, 0.143, 0.286, 0.429, 0.571, …)",
        ),
        ([f"text {n}\t{n % 5}" for n in range(60)], None),
        ([f"text {n}\t{n % 2 / 2}" for n in range(60)], None),
    ],
)
def test_a_classifier_of_numbers_that_are_not_whole_is_told_of_regression(
    rows: list[str], hint: str | None, place: Workplace
) -> None:
    (place.data / "rows.tsv").write_text("\n".join(["text\tlabel", *rows]))
    run = place.job("rows.tsv", model="builtin:roberta-tiny", data={"max_input_tokens": 16, "validation": 0.2})
    place.check(run)
    noticed = DataPreview.model_validate_json((run.path / "preview.json").read_bytes()).labels_noticed
    assert [hint is not None and each.startswith(hint) for each in noticed] == [True] * (hint is not None)
    if hint is not None:
        assert noticed[0].endswith("to learn numbers, add --set task.type=regression")
        assert place.check(job(place, "rows.tsv", task={"type": "regression"}))["plan"]["task"] == "regression"


@pytest.mark.parametrize("model", ["builtin:roberta-tiny", "builtin:t5-tiny", "builtin:qwen-tiny"])
def test_scores_beside_texts_are_offered_as_regression(model: str, place: Workplace) -> None:
    rows = [{"sentence1": f"one {n}", "sentence2": f"other {n}", "score": n / 10} for n in range(40)]
    place.rows("rows.jsonl", rows)
    with pytest.raises(BadData) as caught:
        place.check(place.job(model=model))
    said = "rows of sentence1, sentence2 and score are for the task regression: set task: regression, and take a model"
    assert str(caught.value.hint).startswith(f"{said} for it, such as builtin:roberta-tiny")
    assert place.check(job(place))["plan"]["read_as"] == "sentence1, sentence2 and score"


@pytest.mark.parametrize("format", ["merged", "adapter", "ctranslate2", "gguf"])
def test_exports_of_scores_are_refused(format: str) -> None:
    model = FinishedModel("job-1", "regression", "roberta", adapters=True, whole=False)
    found = model.refusal(ExportFormat(format))
    assert found is not None and found[1].endswith("no export of a model that gives scores is verified yet")
    assert model.instead_of(ExportFormat(format)) == "`longhaul download job-1` for model/ as it is"


def test_scores_that_bfloat16_cannot_tell_apart_are_noticed(place: Workplace) -> None:
    place.rows("rows.jsonl", [{"text": f"text {n}", "score": 1990 + n % 20} for n in range(60)])
    run = job(place)
    place.check(run)
    _, said = DataPreview.model_validate_json((run.path / "preview.json").read_bytes()).labels_noticed
    assert said == (
        "near 2,009 a model in bfloat16 tells no scores apart that differ by less than 8: subtract the mean, about "
        "2,000, from all of them"
    )
