"""Memory that runs out anywhere in a step: no step lost, no gradient changed, no weight updated twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.oom_exactness import FORMS, MethodName, TaskName, measure, wrong
from worker.training.machine.out_of_memory import is_out_of_memory


@pytest.mark.parametrize(
    ("task", "method", "every", "wrong_share"),
    [("seq2seq", "full", 17, 0.3), ("seq2seq", "lora", 23, 0.3), ("classification", "lora", 5, 0.2)],
)
def test_no_operation_of_a_step_is_a_bad_moment(
    tmp_path: Path, task: TaskName, method: MethodName, every: int, wrong_share: float
) -> None:
    """Every so manieth operation; `python -m benchmarks.oom_exactness` takes them all."""
    assert all(is_out_of_memory(form()) for form in FORMS)
    found = measure(tmp_path, every=every, others=6, task=task, method=method)
    assert wrong(found) == []
    assert found["points"] > 50 and found["dropout_points"] == 6 and found["optimizer_points"] == 12
    assert found["max_abs_diff"] < 1e-12 < found["gradient_scale"]
    assert found["naive_wrong_share"] > wrong_share, "the points are those where it matters"


def test_a_figure_that_is_wrong_is_named() -> None:
    good = dict.fromkeys(
        ("lost_steps", "double_steps", "rows_differ", "events_wrong", "streams_differ", "losses_differ",
         "optimizer_wrong", "max_abs_diff", "max_weight_diff"), 0,
    ) | {"recovery_ratio": 1.0}  # fmt: skip
    assert wrong(good) == []
    assert wrong(good | {"max_abs_diff": 1e-11, "rows_differ": 1}) == ["rows_differ", "max_abs_diff"]
    assert wrong(good | {"recovery_ratio": pytest.approx(1.5).expected}) == ["recovery_ratio"]
