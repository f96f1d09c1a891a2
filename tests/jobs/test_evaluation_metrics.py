"""The table of metrics."""

from __future__ import annotations

import pytest

from jobs.evaluation_metrics import EvaluationMetric, chosen_text, is_better, metric_scale, metrics_of
from jobs.trainer_facts import EvaluationFinished
from jobs.verdict import BaseDifference


@pytest.mark.parametrize(
    ("task", "several", "names"),
    [
        ("seq2seq", False, "loss perplexity token_accuracy exact_match chrf bleu rouge1 rouge2 rougeL"),
        ("causal", False, "loss perplexity token_accuracy exact_match chrf bleu rouge1 rouge2 rougeL"),
        ("classification", False, "loss accuracy macro_f1"),
        ("classification", True, "loss macro_f1 micro_f1 subset_accuracy"),
        ("regression", False, "loss mse rmse mae pearson spearman"),
    ],
)
def test_a_task_has_its_metrics(task: str, several: bool, names: str) -> None:
    assert " ".join(metrics_of(task, multi_label=several)) == names


ERRORS = {"loss", "perplexity", "mse", "rmse", "mae"}


def test_only_of_losses_and_errors_less_is_better() -> None:
    assert {str(each) for each in EvaluationMetric if not each.higher_is_better} == ERRORS


def test_scales() -> None:
    scales = {each: metric_scale(each) for each in EvaluationMetric}
    assert {each for each, scale in scales.items() if scale is None} == ERRORS
    assert {each for each, scale in scales.items() if scale == "correlations"} == {"pearson", "spearman"}
    assert {each for each, scale in scales.items() if scale == "scores"} == {"chrf", "bleu"}
    assert metric_scale("comet_score") is None


def test_figures_are_worded_also_those_of_a_newer_version() -> None:
    figures = {"macro_f1": 0.89344, "chrf": 41.234, "perplexity": 1234.5, "comet_score": 0.5}
    seen = EvaluationFinished(step=0, loss=1.0, rows=1, seconds=1.0, best=True, metrics=figures)
    assert seen.metrics_text == "macro F1 0.8934, chrF 41.2, perplexity 1,234.500, comet score 0.5000"


def test_metrics_that_stay_at_0_are_counted_and_the_one_that_judges_is_first() -> None:
    figures = {"perplexity": 2.1, "exact_match": 0.0, "chrf": 12.3, "bleu": 0.0, "rouge1": 0.0, "rougeL": 0.0}
    seen = EvaluationFinished(step=5, loss=1.0, rows=9, seconds=1.0, best=True, metrics=figures, judged_by="chrf")
    assert seen.metrics_text == "chrF 12.3, perplexity 2.100, 4 other metrics are 0"
    assert seen.figures_text == (
        "validation loss 1.0000, perplexity 2.100 over 9 rows, chrF 12.3 over generated texts (4 other metrics are 0)"
    )
    fell = BaseDifference(difference=-0.4, low=-0.5, high=-0.3)
    moved = seen.model_copy(update={"judged_by": "exact_match", "against_base": {"bleu": fell}})
    assert moved.metrics_text.startswith("exact match 0.0000, perplexity 2.100, chrF 12.3, BLEU 0.0, 2 other")


def test_the_words_of_a_choice_name_a_better_step_that_is_missing() -> None:
    metrics = {"macro_f1": 0.8934}
    assert chosen_text("macro_f1", 1.0, metrics) == "the best by macro F1, 0.8934"
    assert chosen_text("macro_f1", 1.0, metrics, 1200) == (
        "the best by macro F1 of what was saved, 0.8934; step 1,200 was better, and its checkpoint is missing"
    )
    assert chosen_text("macro_f1", 1.0, metrics, kept_from="job-1") == (
        "the best by macro F1, 0.8934; no step since was better, so that it is still the model of job-1"
    )


def test_as_good_is_not_better() -> None:
    assert is_better(1.0, None) and is_better(0.9, 1.0)
    assert not is_better(1.0, 1.0) and not is_better(None, 1.0) and not is_better(None, None)
