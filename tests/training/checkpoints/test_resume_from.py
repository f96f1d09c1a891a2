"""`resume_from`: a job resumes from a checkpoint of another, which becomes its own."""

from __future__ import annotations

import copy
import dataclasses
import errno
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs.attempt import Finished
from jobs.disk.rundir import RunDir
from jobs.errors import DiskFull, NoValidCheckpoint, Rejected, StageError
from jobs.events import Adopted, JobCancelled, JobChecked, JobPaused, JobQueued, JobResumed
from jobs.plan import DataPlan, ModelPlan, SourceSummary, make_plan
from jobs.spec import parse_spec
from jobs.state import Stage
from jobs.text.units import format_number
from jobs.trainer_facts import EvaluationFinished, ModelLoaded
from service.answers.conversion import sentence
from tests.support.machine import free_bytes
from tests.support.samples import checked, prepared
from tests.training.attempts import attempt, checkpoints, facts, finished, logged, same_tensors, trained
from tests.training.checkpoints.damage import cut_short, flip_a_bit
from tests.training.conftest import RISING, WORDS
from tests.training.hub_server import COMMIT, running_hub
from tests.training.killed_adoptions import killed_adoptions
from tests.training.workplace import Workplace
from worker.supervise import stage_outcome
from worker.training.checkpoints.checkpoint import TrainState, verify
from worker.training.checkpoints.source_job import SourceJob, check_settings
from worker.training.checkpoints.tensorfile import write_bytes
from worker.training.row_figures import file_of
from worker.training.scores import statistics
from worker.training.steps import order
from worker.training.steps.shape import SafeSize

ROOT = Path(__file__).parents[3]
SETTINGS: dict[str, Any] = {
    "model": "./model",
    "data": {"validation": "held_out.jsonl", "max_input_tokens": 32, "max_target_tokens": 32},
    "training": {"epochs": 4, "batch_size": 8, "learning_rate": 0.01},
    "memory": {"micro_batch": 4, "optimizer": "adamw"},
    "log": {"every_steps": 4},
    "evaluation": {"every_steps": 5, "max_rows": 6, "samples": 2, "generate_rows": 0},
    "checkpoint": {"every_steps": 5, "every_minutes": None, "keep": 2},
}
STEP_7 = 4 + 7 + 3
"""Looks until an attempt stops at step 7, as in test_checkpoint.py: 21 steps, of which 5 is saved, too."""
LATER = "fedcba98" * 5
"""A later commit on the hub."""
TENSORS = ("model.safetensors", "optimizer.safetensors")


class StagesWorkplace(Workplace):
    """A tiny model and 41 rows, as in the other tests of training, but for all three stages."""

    source: RunDir
    """A job that was stopped, of the settings that the fixture names."""

    def job(self, train: str = "rows.jsonl", *, model: str = "./model", **parts: Any) -> RunDir:
        """`SETTINGS`, and what is said here."""
        merged = {key: SETTINGS[key] | parts.pop(key, {}) for key in SETTINGS if key != "model"}
        return super().job(train, model=model, **merged, **parts)

    def begun(self, stop_at: int = STEP_7, **parts: Any) -> RunDir:
        """A job that was stopped."""
        run = self.job(**parts)
        self.prepare(run)
        assert attempt(run, stop_at=stop_at) == 75
        return run

    def goes_on(self, source: str | RunDir, **parts: Any) -> tuple[RunDir, Adopted]:
        """A job that is prepared to resume from another."""
        run = self.job(resume_from=source.id if isinstance(source, RunDir) else source, **parts)
        return run, Adopted.model_validate(self.prepare(run)["adopted"])

    def refused(self, source: str | RunDir, *, late: bool = False, **parts: Any) -> StageError:
        """What check, or prepare after it, says against it."""
        run = self.job(resume_from=source.id if isinstance(source, RunDir) else source, **parts)
        if late:
            self.check(run)
        with pytest.raises(StageError) as caught:
            (self.prepare_only if late else self.check)(run)
        assert caught.value.hint, "there is a hint"
        assert not [name for name in checkpoints(run) if name.startswith("step-")]
        return caught.value


def resumed_from(run: RunDir) -> SourceSummary:
    """What check says of the job that this one resumes from."""
    result = run.attempt_lines("check")[-1].model_dump()["result"]
    return SourceSummary.model_validate(result["plan"]["resume_from"])


MakePlace = Callable[..., StagesWorkplace]


@pytest.fixture(scope="module")
def _place_with(tmp_path_factory: pytest.TempPathFactory, _made_model: Path) -> MakePlace:
    """A place with a job that was stopped: made once, and put back at its path, which the plan names, for each test."""
    folder = tmp_path_factory.mktemp("resume_from")
    made: dict[str, tuple[StagesWorkplace, Path]] = {}

    def put_back(stop_at: int = STEP_7, **parts: Any) -> StagesWorkplace:
        key = json.dumps([stop_at, parts])
        shutil.rmtree(folder / "place", ignore_errors=True)
        if key not in made:
            place = with_rows(folder / "place", _made_model)
            place.source = place.begun(stop_at, **parts)
            made[key] = place, Path((folder / "place").rename(folder / f"begun-{len(made)}"))
        place, kept = made[key]
        shutil.copytree(kept, folder / "place")
        return copy.copy(place)

    return put_back


@pytest.fixture
def place(_place_with: MakePlace) -> StagesWorkplace:
    """Its source was stopped at step 7, and has a checkpoint of step 5, too."""
    return _place_with()


@pytest.fixture
def rising(_place_with: MakePlace) -> StagesWorkplace:
    """The validation loss of its source rises from step 8 on; it was stopped at step 19."""
    return _place_with(3 + 19 + 4 * 2, **RISING)


def with_rows(root: Path, model_folder: Path) -> StagesWorkplace:
    """Without a job."""
    place = StagesWorkplace(root)
    shutil.copytree(model_folder, place.data / "model")
    draw = random.Random(7)
    rows = []
    for _ in range(41 + 8):
        words = [draw.choice(WORDS) for _ in range(draw.randint(3, 14))]
        rows.append({"input": " ".join(words), "target": " ".join(reversed(words[::2]))})
    place.rows("rows.jsonl", rows[:41])
    place.rows("held_out.jsonl", rows[41:])
    return place


# -- what comes of it ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_with_the_same_settings_it_ends_like_a_run_that_was_never_interrupted(
    place: StagesWorkplace, optimizer: str
) -> None:
    memory: dict[str, Any] = {"memory": {"optimizer": optimizer}}
    whole = place.job(**memory)
    place.prepare(whole)
    assert attempt(whole) == 0
    source = place.begun(**memory)
    assert checkpoints(source) == ["step-00000005", "step-00000007"]
    run, adopted = place.goes_on(source, **memory)
    assert (adopted.source, adopted.step) == (f"{source.id}/step-00000007", 7)
    first, *_ = losses = [fact.loss for fact in facts(source, EvaluationFinished)]
    assert (adopted.path, adopted.first_loss, adopted.best_loss) == ("checkpoints/step-00000007", first, min(losses))
    told = f"continues from step 7 of {source.id}"
    assert resumed_from(run).text == told, (
        "as its rate is that of a run that was never interrupted, nothing is said of it"
    )
    assert attempt(run) == 0
    assert facts(run, ModelLoaded)[0].resumed_step == 7
    assert [row for row in logged(whole) if row[0] > 7] == logged(run)
    later = [fact.loss for fact in facts(whole, EvaluationFinished) if fact.step > 7]
    assert [fact.loss for fact in facts(run, EvaluationFinished)] == later
    for file in TENSORS:
        last = "checkpoints/step-00000021"
        assert same_tensors(run.path / last / file, whole.path / last / file)
    assert same_tensors(run.model / "model.safetensors", whole.model / "model.safetensors")
    assert finished(run).result == finished(whole).result
    assert checkpoints(source) == ["step-00000005", "step-00000007"], "nothing of the other job is changed"
    assert verify(source.checkpoints / "step-00000007").spec_sha256 == source.spec().sha256()


def test_the_best_of_the_whole_run_becomes_the_model(rising: StagesWorkplace) -> None:
    whole = rising.job(**RISING)
    rising.prepare(whole)
    assert attempt(whole) == 0
    best = trained(whole).step
    assert best < 19
    source = rising.source
    run, adopted = rising.goes_on(source, **RISING)
    assert adopted.step == 19
    assert checkpoints(run) == [f"step-{best:08d}", "step-00000019"]
    shutil.rmtree(source.path)
    run.append([checked(), prepared(run.plan().steps, adopted=adopted)])
    assert run.record().first_loss == adopted.first_loss and run.record().best_loss == adopted.best_loss
    assert attempt(run) == 0
    assert trained(whole).kept_from is None
    assert trained(run) == trained(whole).model_copy(update={"kept_from": source.id})
    assert same_tensors(run.model / "model.safetensors", whole.model / "model.safetensors")
    assert f"The job {source.id} trained it; no step since was better." in (run.model / "README.md").read_text()


def test_other_settings_count_from_that_step_on(place: StagesWorkplace) -> None:
    source = place.source
    run, _ = place.goes_on(
        source,
        training={"learning_rate": 0.002, "epochs": 6, "lr_scheduler": "constant", "warmup_ratio": 0.0},
        log={"every_steps": 1},
        speed={"fused": False},
        checkpoint={"every_steps": 3},
    )
    assert attempt(run) == 0
    assert facts(run, ModelLoaded)[0].resumed_step == 7
    rows = run.metrics()
    assert [row.step for row in rows] == list(range(8, 32))
    assert {row.learning_rate for row in rows} == {0.002} and rows[-1].epoch == 6
    assert rows[-1].loss < source.metrics()[0].loss


def test_a_finished_job_is_given_more_epochs(place: StagesWorkplace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "LEAST_ROWS", 2)
    source = place.job()
    place.prepare(source)
    assert attempt(source) == 0
    assert place.refused(source).detail_code == "nothing_left"
    run, adopted = place.goes_on(source, training={"epochs": 6})
    assert adopted.step == 21
    [*_, last] = facts(source, EvaluationFinished)
    loss = f"continues from step 21 of {source.id}, where the validation loss was {last.loss:.4f}"
    assert (
        resumed_from(run).text
        == f"{loss}; the learning rate goes from {format_number(source.metrics()[-1].learning_rate)} to 0.003226"
    )
    assert attempt(run) == 0
    assert [row.step for row in run.metrics()] == [24, 28, 31]
    first_loss = facts(source, EvaluationFinished)[0].loss
    assert trained(run).first_loss == first_loss, "that of the whole run"
    assert file_of(run, 0).read_bytes() == file_of(source, 0).read_bytes()
    change = facts(run, EvaluationFinished)[-1].against_base["loss"].difference
    assert change == pytest.approx(facts(run, EvaluationFinished)[-1].loss - first_loss, abs=1e-4), "so is the base"
    assert trained(run).verdict is not None


def test_what_memory_taught_goes_along_only_where_it_is_planned_alike(place: StagesWorkplace) -> None:
    source = place.source
    learned = verify(source.checkpoints / "step-00000007")
    taught = {"input ≤ 64, target ≤ 64": SafeSize(1)}
    edit_state(source.checkpoints / "step-00000007", micro_batch=2, safe=taught)
    same, _ = place.goes_on(source)
    state = verify(same.checkpoints / "step-00000007")
    assert (state.micro_batch, state.safe, state.window, state.rng) == (2, taught, learned.window, learned.rng)
    other, _ = place.goes_on(source, memory={"micro_batch": 8})
    state = verify(other.checkpoints / "step-00000007")
    assert (state.micro_batch, state.safe, state.window, state.rng) == (8, {}, learned.window, learned.rng)
    assert attempt(other) == 0
    assert other.metrics()[0].micro_batch == 8


def test_losses_over_other_rows_are_not_compared(rising: StagesWorkplace) -> None:
    source = rising.source
    run, _ = rising.goes_on(source, **RISING | {"evaluation": RISING["evaluation"] | {"max_rows": 8}})
    assert checkpoints(run) == ["step-00000019"]
    state = verify(run.checkpoints / "step-00000019")
    assert (state.first_loss, state.best_loss, state.validation_loss) == (None, None, None)
    assert verify(source.checkpoints / "step-00000019").best_loss is not None


def test_losses_of_an_earlier_version_which_evaluated_the_first_rows_are_not_compared(rising: StagesWorkplace) -> None:
    source = rising.source
    plan = source.plan()
    first = plan.model_copy(update={"data": plan.data.model_copy(update={"evaluation_rows": "first"})})
    source.write_plan(first)
    run, _ = rising.goes_on(source, **RISING)
    assert verify(run.checkpoints / "step-00000019").best_loss is None and not file_of(run, 0).exists()
    source.write_plan(plan)
    run, _ = rising.goes_on(source, **RISING)
    assert verify(run.checkpoints / "step-00000019").best_loss is not None and file_of(run, 0).exists()


def test_an_earlier_checkpoint_can_be_named_and_a_resumed_job_be_gone_on_from(place: StagesWorkplace) -> None:
    source = place.source
    first, adopted = place.goes_on(f"{source.id}/step-00000005")
    assert (adopted.source, adopted.step) == (f"{source.id}/step-00000005", 5)
    second, adopted = place.goes_on(first)
    assert adopted.source == f"{first.id}/step-00000005"
    shutil.rmtree(source.path)
    shutil.rmtree(first.path)
    assert attempt(second) == 0
    assert facts(second, ModelLoaded)[0].resumed_step == 5


def test_the_time_is_that_of_the_steps_that_are_left(place: StagesWorkplace) -> None:
    source = place.source
    run, _ = place.goes_on(source)
    whole, left = source.plan(), run.plan()
    assert whole.time is not None and left.time is not None and whole.steps == left.steps == 21
    assert left.time.model_flops == pytest.approx(whole.time.model_flops * 14 / 21)


def test_events_and_record_say_from_where_it_goes_on(place: StagesWorkplace) -> None:
    source = place.source
    flip_a_bit(source.checkpoints / "step-00000007")
    run = place.job(resume_from=source.id)
    checked = place.check(run)
    before = checked["plan"]["resume_from"]
    assert (before["job"], before["step"], before["optimizer"], before["loss"]) == (source.id, 7, "adamw", None)
    run.append([JobChecked(plan=checked["plan"])])
    place.prepare_only(run)
    end = run.attempt_lines("prepare")[-1]
    assert isinstance(end, Finished)
    record, events = run.append(stage_outcome(run, run.record(), Stage.PREPARE, end))
    assert (record.checkpoint, record.progress_step, record.steps) == ("checkpoints/step-00000005", 5, 21)
    text = sentence(events[0])
    assert f"21 steps to train (from {source.id}/step-00000005 on)" in text
    assert text.endswith("; skipped: step-00000007: model.safetensors is damaged: its sha256 is another")
    record, _ = run.append([JobCancelled(checkpoint=record.checkpoint)])
    assert record.checkpoint == "checkpoints/step-00000005"


# -- what the checkpoint is made of ----------------------------------------------------------------------------------


def test_weights_and_states_are_linked_and_stay_when_the_other_job_is_deleted(place: StagesWorkplace) -> None:
    source = place.source
    run, adopted = place.goes_on(source)
    for file in TENSORS:
        mine, theirs = (each.checkpoints / "step-00000007" / file for each in (run, source))
        assert mine.stat().st_ino == theirs.stat().st_ino
    shutil.rmtree(source.path)
    assert place.prepare_only(run)["adopted"] == adopted.model_dump(), "a preparation that is repeated"
    assert attempt(run) == 0
    assert facts(run, ModelLoaded)[0].resumed_step == 7


def test_where_links_are_not_possible_it_is_copied_if_there_is_room(
    place: StagesWorkplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_link(*arguments: object) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    source = place.source
    monkeypatch.setattr(os, "link", no_link)
    with monkeypatch.context() as patch:
        free_bytes(patch, 150_000)
        run = place.job(resume_from=source.id)
        patch.setattr("worker.training.planning.stages.plan_disk", lambda *arguments: None)
        patch.setattr("worker.training.planning.memory_plan.plan_disk", lambda *arguments: None)
        place.check(run)
        with pytest.raises(DiskFull, match="can only be copied") as caught:
            place.prepare_only(run)
        assert caught.value.detail_code == "no_room"
    place.prepare_only(run)
    assert checkpoints(run) == ["step-00000005", "step-00000007"], "the best there is, and the newest"
    assert not (run.checkpoints / "step-00000007" / TENSORS[0]).samefile(
        source.checkpoints / "step-00000007" / TENSORS[0]
    )
    assert attempt(run) == 0
    assert facts(run, ModelLoaded)[0].resumed_step == 7


def test_a_damaged_one_is_passed_over_for_the_one_before(place: StagesWorkplace) -> None:
    source = place.source
    flip_a_bit(source.checkpoints / "step-00000007")
    _, adopted = place.goes_on(source)
    assert adopted.step == 5
    assert adopted.passed_over == ["step-00000007: model.safetensors is damaged: its sha256 is another"]
    assert checkpoints(source) == ["step-00000005", "step-00000007"], "it is the other job's to reject"
    error = place.refused(f"{source.id}/step-00000007", late=True)
    assert error.detail_code == "no_checkpoint" and "model.safetensors is damaged" in str(error)
    assert f"set resume_from: {source.id}, " in str(error.hint)
    cut_short(source.checkpoints / "step-00000005")
    error = place.refused(source, late=True)
    assert "step-00000007: model.safetensors is damaged" in str(error) and "step-00000005: opt" in str(error)
    cut_short(source.checkpoints / "step-00000007")
    assert "optimizer.safetensors has 1000 bytes" in str(place.refused(source)), "which check sees, too"


def test_one_that_is_pruned_meanwhile_is_passed_over_for_the_newest_there_is_then(
    place: StagesWorkplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = place.source
    run = place.job(resume_from=source.id)
    place.check(run)
    real = shutil.copyfile

    def while_it_trains_on(one: Path, other: Path) -> Path:
        folder = source.checkpoints / "step-00000007"
        if one.parent == folder and folder.exists():
            edit_state(folder.rename(source.checkpoints / "step-00000008"), step=8)
        return Path(real(one, other))

    monkeypatch.setattr(shutil, "copyfile", while_it_trains_on)
    adopted = place.prepare_only(run)["adopted"]
    assert adopted["step"] == 8 and adopted["passed_over"] == ["step-00000007: state.json is missing"]


def test_one_that_was_damaged_after_it_was_taken_is_not_replaced_by_the_beginning(place: StagesWorkplace) -> None:
    run, _ = place.goes_on(place.source)
    for name in checkpoints(run):
        flip_a_bit(run.checkpoints / name)
    with pytest.raises(
        NoValidCheckpoint, match=r"step-00000007: model.safetensors is damaged.*; checkpoints/step-0000"
    ):
        attempt(run)
    shutil.rmtree(run.checkpoints)
    with pytest.raises(NoValidCheckpoint, match="is gone"):
        attempt(run, 2)
    run.append([checked(), prepared(21), JobQueued(), JobPaused()])
    run.append([JobResumed(from_scratch=True)])
    assert attempt(run, 3) == 0
    assert run.metrics()[0].step == 4 and facts(run, EvaluationFinished, 3)[0].step == 0


def test_an_adoption_killed_at_any_point_is_completed_by_the_next(tmp_path: Path) -> None:
    # kill -9 at 40 lines spread over the code that takes over two checkpoints.
    points = list(killed_adoptions(tmp_path, 40))
    both = ["step-00000001", "step-00000002"]
    assert len(points) == 40 and all(point["killed"] for point in points)
    assert len({point["place"] for point in points}) > 20
    for point in points:
        assert set(point["found"]) <= set(both), point
        assert point["left"] == both and point["own"] and point["other_untouched"], point
        assert not point["complete"] or point["found"] == both, point
    assert {len(point["found"]) for point in points} == {0, 1, 2}


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "param", "said"),
    [
        ({"training": {"seed": 7}}, "training.seed", "training.seed is 7 here and 42 there"),
        ({"training": {"batch_size": 4}}, "training.batch_size", "training.batch_size is 4 here and 8 there"),
        ({"data": {"max_input_tokens": 16}}, "data.max_input_tokens", "data.max_input_tokens is 16 here and 32 there"),
        ({"data": {"validation": 0.5}}, "data.validation", "is 0.5 here and 'held_out.jsonl' there"),
        ({"model": "builtin:t5-tiny"}, "model", "model is 'builtin:t5-tiny' here and './model' there"),
    ],
)
def test_another_run_is_refused_with_both_values(
    place: StagesWorkplace, parts: dict[str, Any], param: str, said: str
) -> None:
    error = place.refused(place.source, **parts)
    assert (error.detail_code, error.param, error.reason) == ("other_run", param, "rejected")
    assert said in str(error)


@pytest.mark.parametrize(("there", "fraction"), [(0.01, 0.01), ("auto", 0.07), ("held_out.jsonl", None)])
def test_auto_holds_out_what_the_other_job_did(there: float | str, fraction: float | None) -> None:
    ours, theirs = (
        parse_spec({"data": {"train": "rows.jsonl", "validation": each}}) for each in ("auto", there)
    )  # fmt: skip
    data = DataPlan(train="x", input="x", target="x", rows=9, validation_fraction=0.07 if there == "auto" else None)
    plan = make_plan(theirs, ModelPlan(source="x", parameters=1), data)
    state = TrainState(step=1, spec_sha256="", micro_batch=1)
    assert SourceJob(RunDir(Path("x")), theirs, plan, None, state).validation_fraction == fraction
    if fraction is None:
        with pytest.raises(Rejected) as refused:
            check_settings(ours, theirs, "job-1")
        assert str(refused.value.hint).startswith("set data.validation=held_out.jsonl, or leave resume_from out")
    else:
        check_settings(ours, theirs, "job-1")


def test_all_that_differs_is_named_at_once(place: StagesWorkplace) -> None:
    error = place.refused(place.source, training={"seed": 7, "batch_size": 4}, data={"normalize": False})
    assert error.param == "data.normalize"
    for said in ("data.normalize is False here and True there", "training.seed is 7", "training.batch_size is 4"):
        assert said in str(error)


def test_the_optimizer_is_kept_and_another_one_refused(place: StagesWorkplace) -> None:
    source = place.begun(memory={"optimizer": "adafactor"})
    error = place.refused(source, memory={"optimizer": "adamw"})
    assert (error.detail_code, error.param) == ("other_optimizer", "memory.optimizer")
    assert "set memory.optimizer: adafactor, or auto" in str(error.hint)
    run, _ = place.goes_on(source, memory={"optimizer": "auto"})
    plan = run.plan()
    assert plan.memory is not None and plan.resolved.optimizer == "adafactor"
    assert {each.optimizer for each in plan.memory.candidates} == {"adafactor"}
    assert plan.memory.why.startswith("the run has states of adafactor; ")
    assert attempt(run) == 0


def test_where_nothing_is_left_to_do_it_is_refused(place: StagesWorkplace) -> None:
    source = place.source
    error = place.refused(source, training={"epochs": 1})
    assert (error.detail_code, error.param) == ("nothing_left", "resume_from")
    assert f"{source.id}/step-00000007 is at step 7, and training.epochs=1 allows 6 steps in all" in str(error)
    run, adopted = place.goes_on(f"{source.id}/step-00000005", training={"epochs": 1})
    assert (adopted.step, run.plan().steps) == (5, 6)


def test_what_is_not_there_is_refused(place: StagesWorkplace) -> None:
    assert place.refused("job-99").detail_code == "no_such_job"
    idle = place.job()
    error = place.refused(idle)
    assert error.detail_code == "no_checkpoint" and "it has none at all" in str(error.hint)
    source = place.source
    error = place.refused(f"{source.id}/step-00000006")
    assert error.detail_code == "no_checkpoint"
    assert "it has step-00000007, step-00000005" in str(error.hint)
    source.write_plan(
        source.plan().model_copy(update={"data": source.plan().data.model_copy(update={"complete": False})})
    )
    assert "was never prepared" in str(place.refused(source))


def test_another_order_of_rows_is_refused(place: StagesWorkplace, monkeypatch: pytest.MonkeyPatch) -> None:
    source = place.source
    monkeypatch.setattr(order, "VERSION", order.VERSION + 1)
    assert place.refused(source).detail_code == "other_order"


@pytest.mark.parametrize(
    ("changed", "model"),
    [("rows.jsonl", "./model"), ("held_out.jsonl", "./model"), ("rows.jsonl", "builtin:t5-tiny")],
)
def test_rows_that_were_changed_since_are_refused(place: StagesWorkplace, changed: str, model: str) -> None:
    source = place.source if model == "./model" else place.begun(model=model)
    with open(place.data / changed, "a") as file:
        file.write('{"input": "w1 w2 w3", "target": "w3"}\n')
    error = place.refused(source, late=True, model=model)
    assert (error.detail_code, error.param) == ("other_run", "data.train")
    assert "rows.jsonl are not those that" in str(error)


def test_the_same_rows_prepared_by_another_version_are_the_same(place: StagesWorkplace) -> None:
    source = place.source
    plan = source.plan()
    earlier = Path(str(plan.data.prepared))
    renamed = earlier.rename(earlier.with_name("prepared-by-another-version"))
    source.write_plan(plan.model_copy(update={"data": plan.data.model_copy(update={"prepared": str(renamed)})}))
    _, adopted = place.goes_on(source)
    assert adopted.step == 7 and earlier.is_dir()


def test_a_model_that_was_changed_since_is_refused(place: StagesWorkplace) -> None:
    source = place.source
    config = json.loads((place.data / "model/config.json").read_text())
    (place.data / "model/config.json").write_text(json.dumps(config | {"dropout_rate": 0.5}))
    error = place.refused(source, late=True)
    assert (error.detail_code, error.param) == ("other_run", "model")


def test_a_hub_model_and_data_set_are_those_of_the_commits_that_the_run_began_with(
    place: StagesWorkplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.settings = dataclasses.replace(place.settings, offline=False)
    with running_hub(monkeypatch) as hub:
        hub.repositories |= {"models/cooks/t5": place.data / "model", "datasets/cooks/rows": place.data / "set"}
        (place.data / "set").mkdir()
        for part, name in (("train", "rows.jsonl"), ("validation", "held_out.jsonl")):
            shutil.copy(place.data / name, place.data / "set" / f"{part}.jsonl")
        named: dict[str, Any] = {"train": "cooks/rows", "model": "cooks/t5",
                                 "data": {"validation": "cooks/rows:validation"}}  # fmt: skip
        source = place.begun(**named)
        assert source.plan().model.revision == COMMIT
        hub.commit = LATER
        run, _ = place.goes_on(source, **named)
        assert (run.plan().model, run.plan().data) == (source.plan().model, source.plan().data)
        anew = place.job(**named)
        place.check(anew)
        assert anew.plan().model.revision == anew.plan().data.train_revision == LATER


def edit_state(folder: Path, **changes: Any) -> None:
    """Change state.json of a checkpoint, and its manifest with it."""
    state = verify(folder).model_copy(update=changes)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["state.json"] = write_bytes(folder / "state.json", state.model_dump_json().encode())
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_a_job_resumes_on_more_or_fewer_gpus(place: StagesWorkplace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGHAUL_DEVICE", "cpu")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    same: dict[str, Any] = {"training": {"dropout": 0.0}, "log": {"every_steps": 1}}
    whole = place.job(**same)
    place.prepare(whole)
    assert attempt(whole) == 0
    first = place.begun(resources={"gpus": 2}, **same)
    second, adopted = place.goes_on(first, resources={"gpus": 1}, **same)
    assert adopted.step == 7
    assert attempt(second, stop_at=4 + 7 + 3) == 75
    stopped = finished(second).step
    assert 7 < stopped < 21
    third, adopted = place.goes_on(second, resources={"gpus": 2}, **same)
    assert adopted.step == stopped and attempt(third) == 0
    seen = [row for run, last in ((first, 7), (second, stopped), (third, 21)) for row in logged(run) if row[0] <= last]
    seen = list({row[0]: row for row in seen}.values())
    assert [row[0] for row in seen] == [row[0] for row in logged(whole)] == list(range(1, 22))
    assert [row[1] for row in seen] == pytest.approx([row[1] for row in logged(whole)], rel=0.02)
    assert (third.model / "model.safetensors").exists()
