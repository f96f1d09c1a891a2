"""benchmarks.causal_throughput with a tiny model: our side is real but for its size; TRL is not installed here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from benchmarks import causal_throughput
from worker.training.tasks.causal import builtin

ROOT = Path(__file__).parents[2]


def test_ours_alone_trains_one_epoch_and_says_so() -> None:
    sizes = ["--shape", "tiny", "--rounds", "2", "--rows", "60", "--batch-size", "8", "--micro-batch", "4"]
    command = [sys.executable, "-m", "benchmarks.causal_throughput", "--threads", "1", *sizes]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "ours has run alone" in ran.stdout
    result = json.loads(ran.stdout.splitlines()[-1])
    assert result["broken"] == [] and list(result["contenders"]) == ["ours"]
    assert result["rows"] == 56, "whole steps of 8"
    ours = result["contenders"]["ours"]
    assert ours["steps"] == 7
    # 7 steps in 3 turns: 2, 3 and 2, of which the first is the warm-up.
    assert ours["rows_run"] == 40 and len(ours["rows_per_s_of_rounds"]) == 2
    assert ours["learned"] == pytest.approx(result["learned_per_row"] * 56)
    assert ours["end_loss"] < ours["start_loss"]
    assert result["rows_per_s_ours"] == ours["rows_per_s"] > 0
    assert 0 <= ours["padding"] < 0.3


def test_the_template_for_trl_writes_what_the_models_own_writes_and_marks_what_is_learned() -> None:
    chat = [
        {"role": role, "content": f"{role} speaks"} for role in ("system", "user", "assistant", "user", "assistant")
    ]
    rendered: Any = render_jinja_template(
        [chat], chat_template=causal_throughput.TEMPLATE, return_assistant_tokens_mask=True
    )
    [text], [spans] = rendered
    assert text == render_jinja_template([chat], chat_template=builtin.CHAT_TEMPLATE)[0][0]
    assert [text[begin:end] for begin, end in spans] == ["assistant speaks<|im_end|>"] * 2


def contender(*seconds: float, **changes: Any) -> dict[str, Any]:
    """What is known of one whose rounds of 100 tokens took so long."""
    rounds = [
        causal_throughput.rated({"tokens": 100, "seconds": one, "cpu_seconds": 2 * one}, mean_tokens=10)
        for one in seconds
    ]
    return {"rounds": rounds, "learned": 50, "steps": 4, "start_loss": 8.0, "end_loss": 5.0} | changes


def test_ratios_are_medians_of_rounds() -> None:
    # The machine was ten times slower in the second round, for both.
    table = {"ours": contender(1.0, 10.0, 1.0), "trl": contender(2.0, 20.0, 6.0)}
    assert table["ours"]["rounds"][0]["rows_per_s"] == 10.0
    assert causal_throughput.compared(table) == {"vs_trl": 2.0, "cpu_vs_trl": 2.0}


def test_limits() -> None:
    def broken(ratios: dict[str, float], **ours: Any) -> list[str]:
        table = {"ours": contender(1.0, **ours), "trl": contender(2.0), "trl_packed": contender(1.2, steps=5)}
        return causal_throughput.broken(ratios, table, 50)

    good = {"vs_trl": 2.0, "vs_trl_packed": 1.15}
    assert broken(good, end_loss=5.02) == []
    assert broken(good | {"vs_trl": 1.99}) == ["vs_trl 1.99 < 2.0"]
    assert broken(good, end_loss=5.04) == ["the held-out loss of ours is 0.0400 above that of the others"]
    assert broken(good, learned=49) == ["ours has learned 49 tokens of 50"]
    alone = {"ours": contender(1.0)}
    assert causal_throughput.broken({}, alone, 50) == []
