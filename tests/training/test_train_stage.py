"""The trainer as the supervisor runs it: a real process, its attempt file, its exit codes."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from jobs.attempt import Finished, Heartbeat, TrainResult
from jobs.disk.rundir import RunDir
from jobs.errors import Rejected
from jobs.events import AnyFact
from jobs.trainer_facts import CheckpointSaved, EvaluationFinished, ModelLoaded
from tests.training.attempts import attempt, facts, finished, logged, same_tensors, trained
from tests.training.conftest import MakeRun
from tests.training.forked import Forked, stage
from worker.training.__main__ import main, set_library_switches
from worker.training.journal import Journal
from worker.training.machine.device import hold_job
from worker.training.steps import order

ROOT = Path(__file__).parents[2]


def start(run: RunDir, number: int) -> Forked:
    return stage("train", run.path, "--attempt", str(number))


def begun_by_hand(run: RunDir) -> tuple[int, str, str]:
    """Its first attempt, as a program of its own: exit code, stdout and stderr."""
    command = [sys.executable, "-m", "worker.training", "train", str(run.path)]
    environment = os.environ | {"LONGHAUL_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("method", ["full", "lora"])
def test_sigterm_finishes_the_step_saves_and_the_next_attempt_goes_on_bit_for_bit(
    make_run: MakeRun, method: str
) -> None:
    long = {
        "method": {"type": "lora", "rank": 4, "merge": True} if method == "lora" else method,
        "training": {"epochs": 6}, "evaluation": {"every_steps": 10, "samples": 1}, "checkpoint": {"every_steps": 50},
    }  # fmt: skip
    whole, broken = make_run("whole", **long), make_run("broken", **long)
    real = Journal.note

    def note(journal: Journal, fact: AnyFact) -> None:
        real(journal, fact)
        if isinstance(fact, EvaluationFinished) and fact.step == 10:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)  # a second one changes nothing

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "note", note)
        code, _, log = start(broken, 1).wait()
    assert code == 75, log
    stopped = finished(broken)
    assert stopped.reason == "interrupted" and 10 <= stopped.step < 31
    assert facts(broken, CheckpointSaved)[-1].step == stopped.step

    code, _, log = start(broken, 2).wait()
    assert code == 0, log
    code, _, log = begun_by_hand(whole) if method == "full" else start(whole, 1).wait()
    assert code == 0, log
    assert facts(broken, ModelLoaded, 2)[0].resumed_step == stopped.step
    assert len(logged(whole)) == 8 and logged(broken) == logged(whole)
    assert finished(broken, 2).result == finished(whole).result
    assert same_tensors(broken.model / "model.safetensors", whole.model / "model.safetensors")
    assert "step 31 of 31: training loss " in log
    if method == "full":  # a process of its own, which sets how loud libraries are before it imports them
        [warning] = [line for line in log.splitlines() if line.split()[2] != "INFO"]
        assert "plan.json is of a version that did not plan memory" in warning, "no library adds to it"
    model, info = AutoModelForSeq2SeqLM.from_pretrained(whole.model, output_loading_info=True)
    assert not any(info.values())
    assert model.generate(torch.tensor([[5, 6, 7, 1]]), max_new_tokens=5).shape[0] == 1


def test_a_run_does_not_go_on_in_an_order_that_it_did_not_begin_in(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run()
    assert attempt(run, stop_at=12) == 75
    monkeypatch.setattr(order, "VERSION", order.VERSION + 1)
    with pytest.raises(Rejected, match=f"began with rows in order {order.VERSION - 1}") as caught:
        attempt(run, 2)
    assert caught.value.detail_code == "other_order"


def test_a_run_says_in_order_what_it_does_and_learns(make_run: MakeRun) -> None:
    run = make_run(
        training={"epochs": 8, "dropout": 0.0}, memory={"empty_cache_steps": 12}, evaluation={"every_steps": 20}
    )
    assert attempt(run) == 0
    phases = [line.phase for line in run.attempt_lines(1) if isinstance(line, Heartbeat)]
    assert phases[:4] == ["load", "evaluate", "generate", "step"]
    assert {"save"} <= set(phases)
    seen = facts(run, EvaluationFinished)
    assert seen[0].step == 0 and seen[-1].step == 41
    assert all(len(fact.samples) == 2 and fact.rows == 6 for fact in seen)
    assert seen[0].samples[0].target.split() == [
        word for n, word in enumerate(reversed(seen[0].samples[0].input.split())) if n % 3 != 2
    ]
    rows = run.metrics()
    assert [row.step for row in rows] == [*range(4, 41, 4), 41]
    # After the last step: one more evaluation, as long as the one before, and a checkpoint.
    assert rows[0].eta_s > 0 and rows[-1].eta_s > seen[-2].seconds
    assert rows[-1].cache_clears == 3 and rows[-1].cache_clear_s > 0
    assert rows[-1].epoch == 8 and rows[-1].micro_batch == 4
    assert rows[-1].loss < rows[0].loss - 0.5


def test_without_validation_rows_there_are_no_evaluations(
    make_run: MakeRun, dataset_folder: Path, tmp_path: Path
) -> None:
    run = make_run(checkpoint={"every_steps": None, "every_minutes": 1e-9, "keep": 99})
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in dataset_folder.iterdir():
        (bare / file.name).write_bytes(b"" if file.name == "validation.rows" else file.read_bytes())
    manifest = json.loads((bare / "manifest.json").read_text())
    manifest["files"]["validation.rows"] = {"bytes": 0, "sha256": hashlib.sha256().hexdigest()}
    (bare / "manifest.json").write_text(json.dumps(manifest))
    plan = run.plan()
    run.write_plan(plan.model_copy(update={"data": plan.data.model_copy(update={"prepared": str(bare)})}))
    assert attempt(run) == 0
    assert facts(run, EvaluationFinished) == []
    assert trained(run) == TrainResult(model="model", loss=None, first_loss=None, step=21)
    assert len(facts(run, CheckpointSaved)) == 21  # minutes count from step to step then


def test_every_typed_error_ends_the_attempt_file_and_gives_its_exit_code(
    make_run: MakeRun, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONGHAUL_DEVICE", "cpu")
    busy = make_run("busy")
    lock = hold_job(busy)
    assert main(["train", str(busy.path), "--attempt", "1"]) == 75
    assert finished(busy).reason == "device_busy"
    lock.close()

    wild = make_run("wild", training={"learning_rate": 1.0, "max_grad_norm": None, "epochs": 1})
    monkeypatch.setattr(
        "worker.training.loop.learning_rate", lambda step, **training: float("inf") if step == 3 else 1e-3
    )
    assert main(["train", str(wild.path), "--attempt", "1"]) == 78
    last = finished(wild)
    assert last.reason == "non_finite" and last.error is not None and "step 4" in last.error.message

    (model_folder / "config.json").write_text(
        (model_folder / "config.json")
        .read_text()
        .replace('"tie_word_embeddings": false', '"tie_word_embeddings": true')
    )
    refused = make_run("rejected")
    assert main(["train", str(refused.path), "--attempt", "7"]) == 77
    last = finished(refused, 7)
    assert last.reason == "rejected" and last.error is not None
    assert last.error.code == "untied_head" and last.error.hint


def test_other_errors_are_a_crash_without_a_last_line(make_run: MakeRun) -> None:
    run = make_run()
    run.plan_file.write_text("{")
    code, _, log = start(run, 1).wait()
    assert code == 1 and "ValidationError" in log
    assert not any(isinstance(line, Finished) for line in run.attempt_lines(1))


def test_library_switches_leave_what_the_user_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "TOKENIZERS_PARALLELISM", "TORCHINDUCTOR_COMPILE_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    set_library_switches("check")
    assert os.environ["HF_HUB_OFFLINE"] == "0"
    set_library_switches("train")
    assert os.environ["PYTORCH_ALLOC_CONF"] == "max_split_size_mb:64"
    assert os.environ["HF_HUB_OFFLINE"] == "1"


@pytest.mark.parametrize(
    ("stage", "given", "spins"), [("train", None, "1000"), ("check", None, None), ("train", "ACTIVE", None)]
)
def test_only_threads_of_training_spin(
    monkeypatch: pytest.MonkeyPatch, stage: str, given: str | None, spins: str | None
) -> None:
    monkeypatch.setattr(os, "environ", {} if given is None else {"OMP_WAIT_POLICY": given})
    set_library_switches(stage)
    assert os.environ["OMP_WAIT_POLICY"] == (given or "PASSIVE")
    assert os.environ.get("GOMP_SPINCOUNT") == spins
