"""Memory that really runs out, nothing injected: jobs through the API, on a CPU, under a hard limit below their need.

The limits were measured (MiB). What tensors need is what was predicted, to 0.1; Python's objects take up to 1.5 more.
A step's micro-batches have 6 rows of 128/128 tokens and need 57.9; cut in two they need 39.8. In between, from 47.5 on,
it is one of the two largest tensors (logits in fp32, and their log-softmax; 6 each) that does not fit. Below that it
may be a buffer of oneDNN's, which then makes no kernel any more in that thread. On a CPU no update needs more than the
passes: memory that runs out there is tested in process (tests/training/test_loop.py, test_start.py) and in the worker
(tests/worker/test_ending.py).
"""

from __future__ import annotations

import json
import random
import re
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import requests

from jobs.disk.rundir import RunDir
from jobs.events import AttemptEnded, JobFailed, JobSucceeded
from jobs.memory_plan import TEST_LIMIT
from jobs.sweeps.directory import find
from jobs.sweeps.record import TrialRecord
from jobs.trainer_facts import MemoryPlanned, OomRecovered
from tests.support.samples import facts_of
from tests.support.shared_stack import data_of, restarted
from tests.support.stack import Stack

MIB = 2**20
RECOVERS_AT = 52 * MIB
"""Of a window from 47.5 to 57.8."""
FLOOR = 34 * MIB
"""One row of 256/256 needs 36.1, its two largest tensors 2 each: a window from 33.6 to 36.1."""


def text(draw: random.Random, words: int) -> str:
    """Made-up words, a token or more each."""
    syllables = [consonant + vowel for consonant in "bdfklmnprst" for vowel in "aeiou"]
    return " ".join("".join(draw.choices(syllables, k=2)) for _ in range(words))


@pytest.fixture(autouse=True)
def _rows(stack: Stack) -> None:
    draw = random.Random(3)
    for name, count in (("many", 96), ("few", 8), ("short", 4)):
        words = 20 if name == "short" else 260
        rows = [{"input": text(draw, words), "target": text(draw, words)} for _ in range(count)]
        (data_of(stack) / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def job(rows: str, tokens: int, *, batch_size: int, epochs: int = 2, **memory: Any) -> dict[str, Any]:
    """Epochs over rows that all have so many tokens on either side; nothing random in a step."""
    return {
        "name": "memory",
        "model": "builtin:t5-tiny",
        "data": {
            "train": f"{rows}.jsonl", "validation": "short.jsonl", "max_input_tokens": tokens,
            "max_target_tokens": tokens,
        },
        "training": {"epochs": epochs, "batch_size": batch_size, "learning_rate": 0.003, "dropout": 0.0},
        "memory": {"empty_cache_steps": 0, "optimizer": "adamw", "activation_checkpointing": 0, **memory},
        "log": {"every_steps": 1},
        "evaluation": {"samples": 0},
        "integrations": {"wandb": None, "discord": False},
    }  # fmt: skip


def limited(stack: Stack, limit: int | None) -> AbstractContextManager[None]:
    """Within, attempts get so many bytes."""
    return nullcontext() if limit is None else restarted(stack, "train", **{TEST_LIMIT: str(limit)})


def ended(stack: Stack, spec: dict[str, Any], limit: int | None) -> tuple[RunDir, JobSucceeded | JobFailed]:
    """The job and its end, with attempts that get `limit` bytes."""
    with limited(stack, limit):
        run = stack.submit(spec)
        end = stack.wait_for_event(run, "job.succeeded", "job.failed").fact
    assert isinstance(end, (JobSucceeded, JobFailed))
    return run, end


def test_a_job_that_gets_less_than_it_needs_recovers_and_learns_the_same(stack: Stack) -> None:
    spec = job("many", 128, batch_size=48, micro_batch=8)
    free, without = ended(stack, spec, None)
    short, with_limit = ended(stack, spec, RECOVERS_AT)
    assert isinstance(without, JobSucceeded) and isinstance(with_limit, JobSucceeded), stack.logs()
    assert facts_of(free, OomRecovered) == []

    # Planned for enough, and the plan stands: that there is less is found out when it runs out.
    [planned] = facts_of(short, MemoryPlanned)
    assert (planned.micro_batch, planned.changed) == (8, None) and planned.peak_bytes > RECOVERS_AT
    happened = facts_of(short, OomRecovered)
    assert [(fact.step, fact.cause, fact.micro_batch_before, fact.micro_batch_after) for fact in happened] == [
        (1, "exhausted", 8, 4)
    ], "once, in the first epoch; then its length bucket has its size"
    assert happened[0].report is not None and happened[0].bucket == "input ≤ 128, target ≤ 128"
    assert (short.path / happened[0].report / "report.json").exists()

    assert len(facts_of(short, AttemptEnded)) == 1
    assert with_limit.step == without.step == 4
    rows = short.metrics()
    assert [row.step for row in rows] == [row.step for row in free.metrics()] == [1, 2, 3, 4]
    for row, other in zip(rows, free.metrics(), strict=True):
        assert row.loss == pytest.approx(other.loss, abs=1e-3)
    assert with_limit.loss == pytest.approx(without.loss, abs=1e-3)
    assert {row.memory_planned_bytes for row in rows} == {planned.peak_bytes}


def test_under_the_floor_it_fails_with_what_would_fit(stack: Stack) -> None:
    run, end = ended(stack, job("few", 256, batch_size=4, micro_batch=1), FLOOR)
    assert isinstance(end, JobFailed), stack.logs()
    assert end.error.code == "out_of_memory"
    assert "step 1 at micro-batch 1" in end.error.message
    # Whether every second layer would do is a matter of a MiB.
    assert end.error.hint is not None
    assert re.fullmatch(
        r"set memory\.activation_checkpointing: (1|2), memory\.micro_batch: 1 \(predicted (29|33) MiB "
        r"instead of 36 MiB; the process got 3[2-5] MiB\)",
        end.error.hint,
    )
    assert facts_of(run, OomRecovered) == [] and len(facts_of(run, AttemptEnded)) == 1


def test_a_micro_batch_that_does_not_fit_the_budget_is_refused_with_the_nearest_that_does(stack: Stack) -> None:
    run = stack.submit(job("many", 128, batch_size=48, micro_batch=8, budget=0.05))
    failed = stack.wait_for_event(run, "job.failed", "job.checked").fact
    assert isinstance(failed, JobFailed)
    assert failed.error.code == "does_not_fit"
    assert "70 MiB" in failed.error.message and "51 MiB" in failed.error.message
    assert failed.error.hint is not None and "memory.activation_checkpointing: 1 it fits: 45 MiB" in failed.error.hint
    shown = stack.shown(run)
    assert (shown["status"], shown["error"]["code"]) == ("failed", "does_not_fit")


def test_a_trial_that_runs_out_of_memory_is_a_result_and_the_others_learn_what_they_do_without_it(stack: Stack) -> None:
    def trials(limit: int | None, *micro_batches: int) -> dict[Any, TrialRecord]:
        """Those of a sweep that has ended, by micro-batch."""
        body = {
            "job": job("many", 128, batch_size=48, epochs=1, on_oom="fail"),
            "space": {"memory.micro_batch": [*micro_batches]},
            "sampler": "grid",
            "keep_models": "all",
        }
        with limited(stack, limit):
            answer = requests.post(f"{stack.url}/sweeps", json=body, timeout=60)
            assert answer.status_code == 202, answer.text
            sweep = find(stack.runs, answer.json()["id"])
            record = stack.wait_for(
                lambda: each if (each := sweep.record()).ended is not None else None, "the end of the sweep", 200
            )
        return {trial.settings["memory.micro_batch"]: trial for trial in record.trials}

    free = trials(None, 4)
    short = trials(RECOVERS_AT, 8, 4)
    failed = short.pop(8)
    assert failed.outcome == "failed" and failed.error is not None and failed.error.code == "out_of_memory"
    for micro_batch, trial in short.items():
        assert (trial.outcome, trial.value) == ("succeeded", free[micro_batch].value)
        weights = [
            (stack.runs / each.jobs[0] / "model" / "model.safetensors").read_bytes()
            for each in (trial, free[micro_batch])
        ]
        assert weights[0] == weights[1]
