"""How benchmarks.causal_throughput compares; `make bench-smoke` runs it."""

from __future__ import annotations

from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from benchmarks import causal_throughput
from benchmarks.versus import below, compared, rated
from worker.training.tasks.causal import builtin


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
        rated({"rows": 10, "tokens": 100, "seconds": one, "cpu_seconds": 2 * one}, "tokens", 10) for one in seconds
    ]
    return {"rounds": rounds, "learned": 50, "steps": 4, "start_loss": 8.0, "end_loss": 5.0} | changes


def test_ratios_are_medians_of_rounds() -> None:
    # The machine was ten times slower in the second round, for both.
    table = {"ours": contender(1.0, 10.0, 1.0), "trl": contender(2.0, 20.0, 6.0)}
    assert table["ours"]["rounds"][0]["rows_per_s"] == 10.0
    assert compared(table) == {"vs_trl": 2.0, "cpu_vs_trl": 2.0}


def test_limits() -> None:
    good = {"vs_trl": 2.0, "vs_trl_packed": 1.15}
    limits = causal_throughput.LIMITS
    assert below(good, limits) == [] == below({}, limits)
    assert below(good | {"vs_trl": 1.99}, limits) == ["vs_trl 1.99 < 2.0"]


def test_what_has_to_hold_at_any_size() -> None:
    def wrong(**ours: Any) -> list[str]:
        table = {"ours": contender(1.0, **ours), "trl": contender(2.0), "trl_packed": contender(1.2, steps=5)}
        return causal_throughput.wrong(table, 50)

    assert wrong(end_loss=5.02) == []
    assert wrong(end_loss=5.04) == ["the held-out loss of ours is 0.0400 above that of the others"]
    assert wrong(learned=49) == ["ours has learned 49 tokens of 50"]
    assert causal_throughput.wrong({"ours": contender(1.0)}, 50) == []
    nothing = contender(1.0, end_loss=8.0)
    assert causal_throughput.wrong({"ours": nothing}, 50) == ["ours has learned nothing: 8.0000 to 8.0000"]
