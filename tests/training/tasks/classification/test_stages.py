"""Classification from check to the finished model, with tiny real checkpoints."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from jobs.disk.rundir import RunDir
from jobs.errors import BadData, NotPrepared, Rejected
from jobs.evaluation_metrics import CONFUSION, ConfusionMatrix
from jobs.preview import DataPreview
from jobs.spec import parse_spec
from jobs.trainer_facts import EvaluationFinished
from tests.training.attempts import attempt, facts, finished, same_tensors, trained
from tests.training.killed_attempts import killed_attempts
from tests.training.snippets import blocks, run_snippet
from tests.training.tasks.classification.families import FAMILIES, LABELS, write_pretrained
from tests.training.workplace import EXAMPLES, SHARED_DATA, Workplace
from worker.training.dataset import inspection
from worker.training.dataset.data import PreparedDataset
from worker.training.models import model_store
from worker.training.scores import statistics
from worker.training.tasks.classification import layout

WORDS = {"refund": "my money back for the kettle", "delivery": "where is my parcel", "other": "i have a question"}
SHORT: dict[str, Any] = {
    "training": {"epochs": 1, "batch_size": 8, "learning_rate": 1e-3},
    "evaluation": {"every_steps": 3, "samples": 2},
    "checkpoint": {"every_minutes": None, "every_steps": 3},
}


def texts(count: int = 48) -> list[dict[str, Any]]:
    """Rows of the three classes, all different."""
    return [
        {"text": f"{WORDS[label]}, number {n}" + " please" * (n % 7), "label": label}
        for n in range(count)
        for label in [LABELS[n % 3]]
    ]


def job(place: Workplace, model: str = "./model", *, data: dict[str, Any] | None = None, **parts: Any) -> RunDir:
    task = {"type": "classification"} | parts.pop("task", {})
    limits = {"max_input_tokens": 32, "validation": 0.25} | (data or {})
    return place.job(model=model, task=task, data=limits, **SHORT | parts)


@pytest.fixture
def place(tmp_path: Path) -> Workplace:
    found = Workplace(tmp_path, planned=False)
    found.rows("rows.jsonl", texts())
    return found


@pytest.fixture
def planning(tmp_path: Path) -> Workplace:
    found = Workplace(tmp_path / "planning")
    found.rows("rows.jsonl", texts())
    return found


def change(folder: Path, how: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    how(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


NEW = {
    "bert": {"bert.pooler.dense.bias", "bert.pooler.dense.weight", "classifier.bias", "classifier.weight"},
    "roberta": {f"classifier.{part}.{kind}" for part in ("dense", "out_proj") for kind in ("weight", "bias")},
    "deberta-v2": {"classifier.bias", "classifier.weight", "pooler.dense.bias", "pooler.dense.weight"},
    "modernbert": {"classifier.bias", "classifier.weight"},
    "distilbert": {"classifier.bias", "classifier.weight", "pre_classifier.bias", "pre_classifier.weight"},
    "electra": {f"classifier.{part}.{kind}" for part in ("dense", "out_proj") for kind in ("weight", "bias")},
    "mpnet": {f"classifier.{part}.{kind}" for part in ("dense", "out_proj") for kind in ("weight", "bias")},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pretrained_encoder_gets_a_head_that_is_named_and_learns(
    family: str, planning: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_pretrained(planning.data / "model", family)
    run = job(planning)
    checked = planning.check(run)["plan"]
    assert (checked["task"], checked["labels"], set(checked["new_tensors"])) == ("classification", 3, NEW[family])
    planning.prepare_only(run)
    plan = run.plan()
    assert set(plan.model.new) == NEW[family]
    assert [label.name for label in plan.data.labels] == sorted(LABELS)
    store = Path(str(plan.model.folder))
    config, stored = json.loads((store / "config.json").read_text()), load_file(store / "model.safetensors")
    assert config["id2label"] == {"0": "delivery", "1": "other", "2": "refund"}
    assert config["problem_type"] == "single_label_classification" and config["num_labels"] == 3
    before = load_file(folder / "model.safetensors")
    kept = stored.keys() - NEW[family]
    assert all(torch.equal(stored[name], before[name].to(torch.bfloat16)) for name in kept)
    assert before.keys() - stored.keys(), "what is for pretraining alone is not in the store"
    monkeypatch.setattr(statistics, "LEAST_ROWS", 2)
    assert attempt(run) == 0
    seen = facts(run, EvaluationFinished)
    assert seen[-1].loss < seen[0].loss + 0.05
    assert seen[-1].base == "new_head" and seen[-1].generated_texts == 0
    assert seen[-1].judged_by == "accuracy" and seen[-1].against_commonest is not None
    commonest = seen[-1].metrics["accuracy"] - seen[-1].against_commonest.difference
    assert 1 / 3 <= commonest < 1 and (commonest * seen[-1].rows) % 1 == pytest.approx(0)
    page = (run.model / "README.md").read_text()
    assert "the classification head is new" in page
    model: Any = AutoModelForSequenceClassification.from_pretrained(run.model)
    assert model.config.id2label == {0: "delivery", 1: "other", 2: "refund"}
    assert not (run.model / "generation_config.json").exists()


def test_the_head_follows_from_the_seed(place: Workplace) -> None:
    write_pretrained(place.data / "model", "roberta")
    heads = []
    for seed in (1, 1, 2):
        run = job(place, training=SHORT["training"] | {"seed": seed})
        place.prepare(run)
        heads.append(load_file(Path(str(run.plan().model.folder)) / "model.safetensors")["classifier.out_proj.weight"])
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])
    assert 0.01 < float(heads[0].float().std()) < 0.04


def test_names_of_early_versions_are_todays(place: Workplace) -> None:
    folder = write_pretrained(place.data / "model", "bert")
    whole = load_file(folder / "model.safetensors")

    def as_of_old(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensor = tensors.pop(name)
            old = name.removeprefix("bert.")
            if "LayerNorm" in old:
                old = old.replace(".weight", ".gamma").replace(".bias", ".beta")
            if not old.startswith("cls."):
                tensors[old] = tensor
        tensors["embeddings.position_ids"] = torch.arange(66)[None]
        tensors["pooler.dense.weight"], tensors["pooler.dense.bias"] = torch.ones(32, 32), torch.ones(32)

    change(folder, as_of_old)
    run = job(place)
    place.prepare(run)
    assert set(run.plan().model.new) == {"classifier.weight", "classifier.bias"}, "there is a pooler"
    stored = load_file(Path(str(run.plan().model.folder)) / "model.safetensors")
    assert torch.equal(stored["bert.pooler.dense.bias"], torch.ones(32).to(torch.bfloat16))
    name = "bert.encoder.layer.0.output.LayerNorm.weight"
    assert torch.equal(stored[name], whole[name].to(torch.bfloat16))


@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [
        (lambda t: t.pop("roberta.encoder.layer.1.output.dense.weight"), "missing_keys", "layer.1.output.dense.weight"),
        (lambda t: t.update({"roberta.more": torch.ones(2)}), "unexpected_keys", "roberta.more"),
        (
            lambda t: t.update({"roberta.embeddings.word_embeddings.weight": torch.ones(9, 32)}),
            "mismatched_shapes",
            "word_embeddings",
        ),
        (lambda t: t.update({"classifier.out_proj.weight": torch.ones(2, 32)}), "unexpected_keys", "classifier"),
        (lambda t: t.update({"classifier.dense.weight": torch.ones(32, 32)}), "missing_keys", "classifier.dense.bias"),
    ],
)
def test_nothing_but_the_whole_head_may_be_missing(
    fault: Callable[[dict[str, torch.Tensor]], object], code: str, said: str, place: Workplace
) -> None:
    change(write_pretrained(place.data / "model", "roberta"), fault)
    with pytest.raises(Rejected, match=re.escape(said)) as caught:
        place.check(job(place))
    assert caught.value.detail_code == code


def test_a_classifier_keeps_its_head_and_the_order_of_its_labels(place: Workplace) -> None:
    folder = write_pretrained(place.data / "model", "roberta", LABELS)
    run = job(place)
    assert "new_tensors" not in place.check(run)["plan"]
    place.prepare_only(run)
    assert [label.name for label in run.plan().data.labels] == list(LABELS) and not run.plan().model.new
    stored = load_file(Path(str(run.plan().model.folder)) / "model.safetensors")
    head = load_file(folder / "model.safetensors")["classifier.out_proj.weight"]
    assert torch.equal(stored["classifier.out_proj.weight"], head.to(torch.bfloat16))
    rows = PreparedDataset.open(Path(str(run.plan().data.prepared))).train
    counts = {label.name: label.rows for label in run.plan().data.labels}
    assert sum(counts.values()) == len(rows) and min(counts.values()) > 0


def test_a_classifier_of_other_labels_or_without_its_head_is_refused(place: Workplace) -> None:
    folder = write_pretrained(place.data / "model", "roberta", ("good", "bad"))
    with pytest.raises(Rejected, match="2 labels \\(good, bad\\), and the job has 3") as caught:
        place.check(job(place))
    assert caught.value.detail_code == "other_labels" and "pretrained" in str(caught.value.hint)
    change(folder, lambda tensors: tensors.pop("classifier.out_proj.weight"))
    with pytest.raises(Rejected) as refused:
        place.check(job(place))
    assert refused.value.detail_code in ("missing_keys", "tied_head")


def test_a_resumed_run_equals_an_undisturbed_one_bit_for_bit(place: Workplace) -> None:
    write_pretrained(place.data / "model", "bert")
    best = {"every_steps": 3, "best": "macro_f1"}
    whole, broken = job(place, checkpoint=best), job(place, checkpoint=best)
    place.prepare(whole)
    broken.write_plan(whole.plan())
    assert attempt(whole) == 0
    figures = {fact.step: fact.metrics["macro_f1"] for fact in facts(whole, EvaluationFinished) if fact.step}
    assert trained(whole).step == max(figures, key=lambda step: figures[step]), "of equals the earliest"
    assert trained(whole).metrics["macro_f1"] == max(figures.values())
    assert attempt(broken, stop_at=6) == 75 and attempt(broken, 2) == 0
    one, other = (load_file(run.model / "model.safetensors") for run in (whole, broken))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert facts(whole, EvaluationFinished)[-1].metrics == facts(broken, EvaluationFinished, 2)[-1].metrics


def test_killed_at_every_evaluation_a_classifier_is_chosen_by_the_same_figures(place: Workplace) -> None:
    """By SIGKILL before, in and after each evaluation and save; accuracy ends the run, macro F1 chooses the step."""
    write_pretrained(place.data / "model", "bert")
    parts = {
        "training": SHORT["training"] | {"epochs": 4, "early_stopping": {"metric": "accuracy", "patience": 2}},
        "evaluation": {"every_steps": 2, "samples": 0},
        "checkpoint": {"every_minutes": None, "best": "macro_f1", "keep": 1},
    }
    whole = job(place, **parts)
    place.prepare(whole)
    assert attempt(whole) == 0
    figures = {fact.step: fact.metrics["macro_f1"] for fact in facts(whole, EvaluationFinished) if fact.step}
    assert trained(whole).step == max(figures, key=lambda step: figures[step]), "of equals the earliest"
    runs = [job(place, **parts) for _ in range(3 * (len(figures) + 1) + 2)]
    for run in runs:
        run.write_plan(whole.plan())
    killed_attempts(runs, first=1, within=True)
    for run in runs:
        assert (finished(run, 2).reason, finished(run, 2).step) == (finished(whole).reason, finished(whole).step)
        assert finished(run, 2).result == finished(whole).result
        assert same_tensors(run.model / "model.safetensors", whole.model / "model.safetensors")


def test_the_snippet_gives_the_label_of_the_sample(place: Workplace) -> None:
    run = job(place, "builtin:roberta-tiny", training=SHORT["training"] | {"epochs": 4})
    place.prepare(run)
    assert attempt(run) == 0
    told = blocks((run.model / "README.md").read_text(), "text")[0]
    assert run_snippet(run.model) == told + "\n" and told in LABELS
    last = facts(run, EvaluationFinished)[-1]
    assert set(last.metrics) == {"accuracy", "macro_f1"}
    assert all(sample.target in LABELS and 0 < (sample.probability or 0) <= 1 for sample in last.samples)


def test_rows_may_have_any_number_of_labels(place: Workplace) -> None:
    rows = [{"text": row["text"], "labels": [["a", "b"], [], ["b"], "c"][n % 4]} for n, row in enumerate(texts())]
    place.rows("several.jsonl", rows)
    write_pretrained(place.data / "model", "distilbert")
    task = {"multi_label": True, "class_weights": "balanced"}
    run = place.job("several.jsonl", model="./model", task={"type": "classification"} | task,
                    data={"max_input_tokens": 32, "validation": 0.25}, **SHORT)  # fmt: skip
    place.prepare(run)
    assert [label.name for label in run.plan().data.labels] == ["a", "b", "c"]
    prepared = PreparedDataset.open(Path(str(run.plan().data.prepared)))
    assert {0, 1, 2} == set(
        np.concatenate([prepared.train.target_lengths, prepared.validation.target_lengths]).tolist()
    )
    assert attempt(run) == 0
    last = facts(run, EvaluationFinished)[-1]
    assert set(last.metrics) == {"subset_accuracy", "micro_f1", "macro_f1"}
    assert json.loads((run.model / "config.json").read_text())["problem_type"] == "multi_label_classification"


def test_labels_are_those_of_all_rows_whatever_came_first(place: Workplace) -> None:
    rows = [{"text": f"number {n} of many", "label": n % 12} for n in range(60)]
    place.rows("numbers.jsonl", [*rows, {"text": "the last of all", "label": "9999"}])
    run = place.job("numbers.jsonl", model="builtin:roberta-tiny", data={"validation": 0.2, "max_input_tokens": 16})
    place.prepare(run)
    assert [label.name for label in run.plan().data.labels] == [*map(str, range(12)), "9999"]


@pytest.mark.parametrize("labels", [[[1, 0, 0], [0, 1, 1]], [["refund", "refund"], ["other"]]])
def test_a_vector_of_0_and_1_is_no_list_of_labels(labels: list[Any], place: Workplace) -> None:
    place.rows("rows.jsonl", [{"text": row["text"], "label": labels[n % 2]} for n, row in enumerate(texts())])
    write_pretrained(place.data / "model", "roberta")
    with pytest.raises(BadData, match="the same label twice in a list") as caught:
        place.check(job(place, task={"multi_label": True}))
    assert "a vector of 0 and 1 is no list of labels" in str(caught.value.hint)


def test_labels_that_look_alike_and_the_new_head_are_in_the_preview(place: Workplace) -> None:
    alike = ["Refund", "refund", "re\u200bfund", "R\u00fcckgabe", "Ru\u0308ckgabe", "01", 1, False, 0]
    place.rows("rows.jsonl", [row | {"label": alike[n % 9]} for n, row in enumerate(texts(81))])
    write_pretrained(place.data / "model", "roberta")
    run = job(place)
    place.check(run)
    preview = DataPreview.model_validate_json((run.path / "preview.json").read_bytes())
    assert preview.labels_in_all == 9 and sum(label.rows for label in preview.labels) == 81
    groups = [["01", "1"], ["0", "false"], ["Refund", "refund", "re\u200bfund"], ["Ru\u0308ckgabe", "R\u00fcckgabe"]]
    assert sorted(map(sorted, preview.labels_alike)) == sorted(map(sorted, groups))
    assert set(preview.new_tensors) == NEW["roberta"]
    assert place.prepare_only(run)["data"]["labels"]["labels_alike"] == [list(group) for group in preview.labels_alike]


def test_the_plan_is_made_anew_where_later_rows_have_more_labels(
    planning: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "ROWS", 20)
    rows = texts(400)
    planning.rows("rows.jsonl", [row | {"label": "a" if n < 30 else f"label {n}"} for n, row in enumerate(rows)])
    write_pretrained(planning.data / "model", "roberta")
    run = job(planning)
    planning.check(run)
    before = run.plan()
    planning.prepare_only(run)
    plan = run.plan()
    assert before.memory and plan.memory and len(before.data.labels) == 1 and len(plan.data.labels) == 371
    stored = load_file(Path(str(plan.model.folder)) / "model.safetensors")
    assert plan.model.parameters == sum(each.numel() for each in stored.values()) > before.model.parameters
    assert plan.memory.trained_parameters == plan.model.parameters


def test_named_labels_have_the_order_of_the_job_and_others_are_rejected(place: Workplace) -> None:
    named = ["refund", "other"]
    with pytest.raises(BadData, match=r"a label that task\.labels does not name: 16"):
        place.check(job(place, "builtin:roberta-tiny", task={"labels": named}))
    run = job(place, "builtin:roberta-tiny", task={"labels": named}, data={"max_invalid_fraction": 0.5})
    place.prepare(run)
    assert [label.name for label in run.plan().data.labels] == named


@pytest.mark.parametrize(
    ("rows", "code"),
    [
        ([{"text": f"text {n}", "label": "same"} for n in range(20)], "too_few_labels"),
        ([{"text": f"text {n}", "label": f"label {n}"} for n in range(10_001)], "too_many_labels"),
    ],
)
def test_labels_that_tell_nothing_apart_are_refused(rows: list[Any], code: str, place: Workplace) -> None:
    place.rows("wrong.jsonl", rows)
    run = place.job("wrong.jsonl", model="builtin:roberta-tiny", data={"validation": 0.2, "max_input_tokens": 16})
    with pytest.raises(BadData) as caught:
        place.prepare(run)
    assert caught.value.detail_code == code


def test_options_and_limits_that_do_not_fit_are_refused(place: Workplace) -> None:
    with pytest.raises(Exception, match="`loss_on` is an option of the task causal"):
        parse_spec({"data": {"train": "x"}, "task": {"type": "classification", "loss_on": "all"}})
    write_pretrained(place.data / "model", "roberta")
    for parts, code in (
        ({"task": {"type": "auto", "loss_on": "all"}}, "option_of_another_task"),
        ({"data": {"max_input_tokens": 128}}, "limit_too_large"),
        ({"task": {"type": "auto"}, "checkpoint": {"best": "rougeL"}}, "unknown_metric"),
    ):
        with pytest.raises(Rejected) as caught:
            place.check(job(place, **parts))
        assert caught.value.detail_code == code


def test_the_task_is_that_of_the_model(place: Workplace) -> None:
    write_pretrained(place.data / "model", "modernbert")
    assert place.check(job(place, task={"type": "auto"}))["plan"]["task"] == "classification"


def test_what_is_in_the_store_is_complete_or_damaged(place: Workplace) -> None:
    write_pretrained(place.data / "model", "roberta")
    run = job(place)
    place.prepare(run)
    folder = Path(str(run.plan().model.folder))
    assert not layout.layout_of(json.loads((folder / "config.json").read_text())).new
    assert set(model_store.new_tensors(folder)) == NEW["roberta"]
    change(folder, lambda tensors: tensors.pop("classifier.dense.weight"))
    with pytest.raises(NotPrepared, match="has changed"):
        attempt(run)


def test_the_example_learns_its_six_classes(tmp_path: Path) -> None:
    place = Workplace(tmp_path, planned=False)
    shutil.copyfile(EXAMPLES.with_name("tickets.jsonl"), place.data / "tickets.jsonl")
    parts = json.loads(EXAMPLES.with_name("tickets.json").read_text())
    run = place.job(parts["data"].pop("train"), **parts)
    place.prepare(run)
    assert len(run.plan().data.labels) == 6
    assert attempt(run) == 0
    assert facts(run, EvaluationFinished)[-1].metrics["accuracy"] > 0.8
    matrix = ConfusionMatrix.model_validate_json((run.path / CONFUSION).read_bytes())
    assert len(matrix.labels) == 6 and sum(map(sum, matrix.rows)) == facts(run, EvaluationFinished)[-1].rows


@pytest.mark.skipif(not (SHARED_DATA / "cls_banking77_test.jsonl.gz").exists(), reason="needs shared/data")
def test_banking77_has_77_classes(tmp_path: Path) -> None:
    place = Workplace(tmp_path, planned=False)
    for part in ("train", "test"):
        shutil.copyfile(SHARED_DATA / f"cls_banking77_{part}.jsonl.gz", place.data / f"{part}.jsonl.gz")
    run = place.job("train.jsonl.gz", model="builtin:roberta-tiny", data={"validation": "test.jsonl.gz"})
    found = place.prepare(run)["data"]
    assert len(run.plan().data.labels) == 77 and found["labels"]["validation_only"] == []
    assert found["train_rows"] > 9_900 and found["validation_rows"] > 3_000
