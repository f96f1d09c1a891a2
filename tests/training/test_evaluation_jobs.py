"""Jobs of kind `evaluate`: a model as it is, measured on all rows; nothing is trained, held out or delivered."""

from __future__ import annotations

import pytest

from jobs.errors import Rejected, UserError
from jobs.export import ExportFormat
from jobs.spec import parse_spec
from jobs.trainer_facts import EvaluationFinished, MemoryPlanned
from tests.training.attempts import attempt, facts, trained
from tests.training.workplace import Workplace, pairs
from worker.training.export.export import export
from worker.training.journal import Journal

EVALUATION = {"every_steps": 5, "samples": 2}


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    place = Workplace(tmp_path_factory.mktemp("place"))
    place.rows("rows.jsonl", pairs(40))
    return place


def test_the_model_of_a_job_is_evaluated_as_that_job_did(place: Workplace) -> None:
    place.rows("held-out.jsonl", pairs(12, start=100))
    train = place.job(
        data={"validation": "held-out.jsonl"},
        training={"epochs": 2, "batch_size": 8, "learning_rate": 0.003},
        evaluation=EVALUATION,
    )
    place.prepare(train)
    assert attempt(train) == 0
    last = facts(train, EvaluationFinished)[-1]

    run = place.job("held-out.jsonl", model=train.id, kind="evaluate", evaluation=EVALUATION)
    prepared = place.prepare(run)
    assert prepared["steps"] == 0
    plan = run.plan()
    assert plan.data.validation_rows == 12
    assert plan.memory is not None and plan.memory.evaluation
    assert plan.memory.parts["gradients"] == plan.memory.parts["optimizer"] == 0
    assert "evaluation, micro-batch" in plan.memory.text
    assert attempt(run) == 0
    [measured] = facts(run, EvaluationFinished)
    assert (measured.step, measured.rows) == (0, 12)
    assert trained(train).step == last.step, "the last weights are those that were delivered"
    assert measured.loss == pytest.approx(last.loss, rel=1e-6)
    assert {each.generated for each in measured.samples} == {each.generated for each in last.samples}
    done = trained(run)
    assert (done.model, done.loss, done.step) == (None, measured.loss, 0)
    assert done.metrics == measured.metrics and "chrf" in done.metrics
    assert done.intervals == {} and not measured.best, "of 12 rows"
    assert (trained(train).metrics, done.first_loss) == (last.metrics, None)
    assert not run.model.exists() and not any(run.checkpoints.glob("*"))


def test_a_built_in_model_is_evaluated_on_every_row(place: Workplace) -> None:
    run = place.job(kind="evaluate", task="causal", model="builtin:qwen-tiny", evaluation=EVALUATION)
    place.prepare(run)
    assert attempt(run) == 0
    [measured] = facts(run, EvaluationFinished)
    assert measured.rows == 40 and measured.untrained and facts(run, MemoryPlanned)[0].evaluation
    assert trained(run).intervals == measured.intervals != {}


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ({"training": {"epochs": 2}}, "training"),
        ({"checkpoint": {"keep": 1}}, "checkpoint"),
        ({"method": "lora"}, "method"),
        ({"resume_from": "job-1"}, "resume_from"),
        ({"data": {"train": "rows.jsonl", "validation": 0.1}}, "data.validation"),
    ],
)
def test_what_an_evaluation_has_no_use_for_is_refused(parts: dict[str, object], named: str) -> None:
    with pytest.raises(UserError, match=f"leave {named} out"):
        parse_spec({"kind": "evaluate", "data": {"train": "rows.jsonl"}, **parts})


def test_its_specification_is_read_again_as_it_was() -> None:
    spec = parse_spec({"kind": "evaluate", "data": {"train": "rows.jsonl"}})
    assert parse_spec(spec.model_dump(mode="json")) == spec


def test_a_job_that_delivered_no_whole_model_is_named_with_what_helps(place: Workplace) -> None:
    run = place.job(kind="evaluate", model="job-nowhere")
    with pytest.raises(Rejected, match="there is no job job-nowhere"):
        place.check(run)
    lora = place.job()
    with pytest.raises(Rejected, match="has no model"):
        place.check(place.job(kind="evaluate", model=lora.id))
    lora.model.mkdir()
    (lora.model / "adapter_config.json").write_text("{}")
    with pytest.raises(Rejected, match="adapters alone") as refused:
        place.check(place.job(kind="evaluate", model=lora.id))
    assert f"`longhaul export {lora.id} --to merged`" in str(refused.value.hint)


def test_adapters_are_evaluated_in_their_merged_export(place: Workplace) -> None:
    train = place.job(
        method={"type": "lora"}, training={"epochs": 1, "batch_size": 8, "learning_rate": 0.01}, evaluation=EVALUATION
    )
    place.prepare(train)
    assert attempt(train) == 0
    with pytest.raises(Rejected, match="adapters alone"):
        place.prepare(place.job(model=train.id, kind="evaluate", evaluation=EVALUATION))

    export(train, Journal(train.attempt_file("export")), ExportFormat.MERGED, None)
    run = place.job(model=train.id, kind="evaluate", evaluation=EVALUATION)
    place.prepare(run)
    assert attempt(run) == 0
    base = place.job(model="builtin:t5-tiny", kind="evaluate", evaluation=EVALUATION)
    place.prepare(base)
    assert attempt(base) == 0
    tuned, before = (facts(each, EvaluationFinished)[0].loss for each in (run, base))
    assert tuned < before
