"""The table of metrics."""

from __future__ import annotations

import pytest

from jobs.evaluation_metrics import EvaluationMetric, metrics_of, metrics_text


@pytest.mark.parametrize(
    ("task", "several", "names"),
    [
        ("seq2seq", False, "loss perplexity token_accuracy exact_match chrf bleu rouge1 rouge2 rougeL"),
        ("causal", False, "loss perplexity token_accuracy exact_match chrf bleu rouge1 rouge2 rougeL"),
        ("classification", False, "loss accuracy macro_f1"),
        ("classification", True, "loss macro_f1 micro_f1 subset_accuracy"),
    ],
)
def test_a_task_has_its_metrics(task: str, several: bool, names: str) -> None:
    assert " ".join(metrics_of(task, multi_label=several)) == names


def test_only_of_losses_less_is_better() -> None:
    assert {str(each) for each in EvaluationMetric if not each.higher_is_better} == {"loss", "perplexity"}


def test_figures_are_worded_also_those_of_a_newer_version() -> None:
    figures = {"macro_f1": 0.89344, "chrf": 41.234, "perplexity": 1234.5, "comet_score": 0.5}
    assert metrics_text(figures) == "macro F1 0.8934, chrF 41.2, perplexity 1,234.500, comet score 0.5000"
