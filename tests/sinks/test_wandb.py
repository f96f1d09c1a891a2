"""W&B through real child processes and the real library: online against a fake server, offline read back from disk."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from jobs.disk.rundir import RunDir, repair, truncate_metrics
from jobs.events import AttemptEnded, AttemptStarted, JobFailed, JobPaused, JobPauseRequested, JobQueued, JobResumed
from jobs.trainer_facts import Fault, OomRecovered
from tests.service.damage import destroyed
from tests.sinks import story
from tests.sinks.driving import closed, publishing, until
from tests.sinks.wandb_runs import (
    child,
    expected,
    history,
    offline_files,
    publish_in_a_process,
    records,
    sync,
    wandb_children,
)
from tests.support.fakes import WANDB_KEY, FakeDiscord, FakeWandb
from tests.support.processes import alive
from tests.support.samples import write_plan
from worker.feed import read_cursor
from worker.sinks.base import Sink
from worker.sinks.discord.sink import DiscordSink
from worker.sinks.discord.webhook import Webhook
from worker.sinks.wandb.sink import WandbSink


def tables(file: Path) -> list[tuple[int, list[list[Any]]]]:
    """(train/step, rows of the table) of each table of samples that a run's file points to."""
    return [
        (step, json.loads((file.parent / "files" / value).read_text())["data"])
        for step, value in history(file, "eval/samples.path")
    ]


def test_online_one_run_per_job_across_restarts_and_attempts(tmp_path: Path) -> None:
    run = story.submit(tmp_path)
    with FakeWandb() as server:
        with publishing(tmp_path, WandbSink(child, WANDB_KEY, server.url, flush_s=0.2)):
            story.start(run)
            story.train(run, 10, 100)
            until(lambda: read_cursor(run, "wandb").step == 100)
        assert server.runs["job-1"].complete, "finished in good order when publish stops"
        # Attempt 1 had reached step 120 when it crashed; attempt 2 begins at its checkpoint of step 50.
        story.train(run, 110, 120)
        crash = Fault(code="crash", message="Segmentation fault")
        run.append([AttemptEnded(reason="crash", step=120, checkpoint_step=50, error=crash), JobQueued()])
        run.append([AttemptStarted(worker="b", device="cpu")])
        truncate_metrics(run.metrics_file, 50)
        story.train(run, 60, 400, attempt=2)
        story.succeed(run, text="Boil ½ cup of rice.")
        with publishing(tmp_path, WandbSink(child, WANDB_KEY, server.url, flush_s=0.2)):
            until(lambda: closed(run, "wandb"))
        (seen,) = server.runs.values()
        assert (run.path / "wandb/url.txt").read_text().strip().endswith("/longhaul/runs/job-1")
        assert seen.rows("train/step", "train/loss") == expected(10, 400)
        assert seen.rows("train/step", "eval/loss", "eval/event") == [(0, 2.31, 7), (400, 0.91, 11)]
        assert seen.rows("train/tokens_per_s", "train/mfu", "train/padding_fraction")[0] == (14_700.0, 0.6014, 0.04)
        assert seen.rows("gpu/utilization", "gpu/power_w", "host/memory_used_bytes")[0] == (0.97, 412.5, 21 * 2**30)
        assert {key.split("/")[0] for row in seen.history for key in row if "/" in key} == {
            "train",
            "eval",
            "gpu",
            "host",
        }
        assert seen.tables("eval/samples") == [(400, [[400, *["Boil ½ cup of rice."] * 3]] * 2)]
        assert seen.alerts == [
            (
                "WARN",
                "chef: attempt 1 failed, trying again",
                "The trainer crashed at step 120 (the newest checkpoint is that of step 50: 70 steps are lost): "
                "Segmentation fault",
            )
        ]
        assert (seen.starts, seen.exit_code, seen.group, seen.name) == (2, 0, "job-1", "chef")
        assert (seen.summary["status"], seen.summary["attempts"]) == ("succeeded", 2)
        assert seen.config["training"]["value"]["batch_size"] == 128
        assert server.keys == {WANDB_KEY}
    written = b"".join(file.read_bytes() for file in run.path.rglob("*") if file.is_file())
    assert WANDB_KEY.encode() not in written


def test_a_run_says_what_was_decided_and_shows_what_people_compare(tmp_path: Path) -> None:
    """Config, tags, notes and summary as a server gets them, of a trial; which figures have a panel, read back from the
    file. Artifacts have not been asked for.
    """
    metadata = {"team": "kitchen", "notes": "with half of the rows"}
    run = story.submit(tmp_path, name="chef 0", metadata=metadata, sweep="sweep-1")
    write_plan(run, prepared="/gone/0a1b2c3d")
    make_model(run)
    with FakeWandb() as server:
        with publishing(tmp_path, WandbSink(child, WANDB_KEY, server.url, flush_s=0.2)):
            story.start(run)
            story.train(run, 10, 400)
            story.succeed(run, better_step=20)
            until(lambda: closed(run, "wandb"))
        (seen,) = server.runs.values()
    assert (seen.summary["chosen_by"], seen.summary["better_step"]) == ("loss", 20)
    assert (seen.job_type, seen.group, seen.name, seen.artifacts) == ("train", "sweep-1", "chef 0", [])
    assert (seen.tags, seen.notes) == (["sweep:sweep-1", "team:kitchen"], "with half of the rows")
    config = {key: each["value"] for key, each in seen.config.items() if key != "_wandb"}
    assert config["memory"]["optimizer"] == "adamw" and config["memory"]["micro_batch"] == 8
    assert config["speed"]["compile"] is False
    assert (config["data"]["rows"], config["parameters"], config["steps"]) == (8, 1, 1)
    assert config["versions"].keys() == {"longhaul", "torch", "transformers", "tokenizers"}
    assert not {"integrations", "log", "name"} & config.keys() and "auto" not in json.dumps(
        config["memory"] | {"budget": 0}
    )
    losses = [loss for _, loss in expected(10, 400)]
    assert seen.summary["train/loss"] == {"min": min(losses), "last": losses[-1]}
    assert seen.summary["eval/loss"] == {"min": 0.91, "last": 0.91}
    [file] = offline_files(run)
    options = {
        record["metric"].get("name"): record["metric"]["options"] for record in records(file) if "metric" in record
    }
    hidden = {name for name, each in options.items() if each.get("hidden")}
    assert {"train/attempt", "eval/event", "train/step"} <= hidden and "train/loss" not in hidden


def test_offline_history_row_by_row_and_one_file_per_start(tmp_path: Path) -> None:
    run = story.submit(tmp_path)
    with publishing(tmp_path, WandbSink(child, flush_s=0.2)):
        story.start(run)
        story.train(run, 10, 100)
        until(lambda: read_cursor(run, "wandb").step == 100)
        pids = wandb_children()
        assert pids
        arguments = b"".join(Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids)
        assert b"worker.sinks.wandb.child_process" in arguments
    story.train(run, 110, 400)
    run.append([story.evaluation(400, 0.93, samples=1, text="\x1bBoil ½\u202e cup of rice.")])
    run.append([OomRecovered(step=401, micro_batch_before=8, micro_batch_after=4, message="no", milliseconds_lost=9.0)])
    error = Fault(code="non_finite", message="the loss is NaN at step 401", hint="lower training.learning_rate")
    run.append([AttemptEnded(reason="non_finite", step=401, error=error), JobFailed(error=error)])
    with publishing(tmp_path, WandbSink(child, flush_s=0.2)):
        until(lambda: closed(run, "wandb"))
    assert not wandb_children(), "nobody outlives publish"
    first, second = offline_files(run)
    assert history(first, "train/loss") == expected(10, 100)
    assert history(first, "eval/loss") == [(0, 2.31)]
    assert history(second, "train/loss") == expected(110, 400)
    assert tables(second) == [(400, [[400, *["Boil ½ cup of rice."] * 3]])]
    alerts = [(record["alert"]["level"], record["alert"]["title"]) for record in records(second) if "alert" in record]
    assert alerts == [("WARN", "chef: out of memory, recovered"), ("ERROR", "chef: failed")]
    runs = [record["run"] for file in (first, second) for record in records(file) if record["type"] == "run"]
    assert {each["run_group"] for each in runs} == {"job-1"}
    assert {each["run_id"] for each in runs} == {"job-1"}
    (end,) = [record["exit"] for record in records(second) if record["type"] == "exit"]
    assert end["exit_code"] == 1


def make_model(run: RunDir) -> None:
    run.model.mkdir()
    (run.model / "model.safetensors").write_bytes(b"weights")


def test_rows_and_model_are_artifacts_by_reference_if_the_job_wants_them(tmp_path: Path) -> None:
    run = story.submit(tmp_path, integrations={"wandb": {"artifacts": True}})
    write_plan(run, prepared="/gone/0a1b2c3d")
    make_model(run)
    story.start(run)
    story.train(run, 10, 100)
    with publishing(tmp_path, WandbSink(child, flush_s=0.2)):
        until(lambda: read_cursor(run, "wandb").step == 100)
    story.succeed(run)
    with publishing(tmp_path, WandbSink(child, flush_s=0.2)):
        until(lambda: closed(run, "wandb"))
    read = [record["artifact"] for file in offline_files(run) for record in records(file) if "artifact" in record]
    rows = ("dataset", "rows-0a1b2c3d", [("longhaul://prepared/0a1b2c3d", None)])
    model = ("model", "model-job-1", [((run.model / "model.safetensors").absolute().as_uri(), "7")])
    shown = [
        (each["type"], each["name"], [(part["ref"], part.get("size")) for part in each["manifest"]["contents"]])
        for each in read
    ]
    assert shown == [rows, rows, model]
    assert len({each["digest"] for each in read}) == 2, "a restart makes no new version"
    told = json.loads(read[-1]["metadata"])
    assert told == {"job": "job-1", "base_model": run.spec().model, "step": 400, "loss": 0.91}
    assert not list(run.path.glob("wandb/**/model.safetensors")), "no bytes"
    run.model.rename(tmp_path / "elsewhere")  # on another machine there is no model
    with FakeWandb() as server:
        sync(server, *sorted((run.path / "wandb").glob("*run-*")))
        (seen,) = server.runs.values()
    # `wandb sync` sends the runs of a job beside each other.
    assert sorted(logged[:2] for logged in seen.artifacts) == [rows[:2], rows[:2], model[:2]]


@pytest.mark.parametrize("model", [True, False])
def test_artifacts_of_an_online_run_and_a_model_that_is_gone(
    model: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = story.submit(tmp_path, integrations={"wandb": {"artifacts": True}})
    write_plan(run, prepared="/gone/0a1b2c3d")
    if model:
        make_model(run)
    story.start(run)
    story.train(run, 10, 400)
    story.succeed(run)
    with FakeWandb() as server:
        with publishing(tmp_path, WandbSink(child, WANDB_KEY, server.url, flush_s=0.2)):
            until(lambda: closed(run, "wandb"))
        (seen,) = server.runs.values()
    names = [("dataset", "rows-0a1b2c3d"), ("model", "model-job-1")]
    assert [logged[:2] for logged in seen.artifacts] == names[: 1 + model]
    assert (seen.exit_code, seen.summary["status"]) == (0, "succeeded")
    assert ("not all artifacts are in its W&B run: model-job-1" in caplog.text) is not model
    assert "model.safetensors" not in seen.files


def test_unreachable_becomes_offline_and_complete(tmp_path: Path) -> None:
    run = story.submit(tmp_path)
    story.start(run)
    story.train(run, 10, 400)
    story.succeed(run)
    with FakeDiscord() as discord:
        discord.hang()
        sinks: list[Sink] = [
            WandbSink(child, WANDB_KEY, "http://127.0.0.1:9", flush_s=0.2),
            DiscordSink(Webhook(discord.url)),
        ]
        with publishing(tmp_path, *sinks):
            until(lambda: closed(run, "wandb"))
            discord.release()
    (file,) = offline_files(run)
    assert file.parent.name.startswith("offline-run-")
    assert history(file, "train/loss") == expected(10, 400)
    assert history(file, "eval/loss") == [(0, 2.31), (400, 0.91)]


def test_publish_killed_and_its_child_killed_no_row_is_missing(tmp_path: Path) -> None:
    run = story.submit(tmp_path)
    story.start(run)
    story.train(run, 10, 100)
    process = publish_in_a_process(tmp_path)
    until(lambda: read_cursor(run, "wandb").step == 100)
    (pid,) = wandb_children(process.pid)
    process.kill()
    process.wait()
    until(lambda: not alive(pid))
    story.train(run, 110, 200)
    with publishing(tmp_path, WandbSink(child, mode="offline", flush_s=0.2)):
        until(lambda: read_cursor(run, "wandb").step == 200)
        story.train(run, 210, 300)
        (pid,) = wandb_children()
        os.kill(pid, signal.SIGKILL)
        until(lambda: read_cursor(run, "wandb").step == 300)
    first, second, third = offline_files(run)
    assert history(first, "train/loss") == expected(10, 100), "what the cursor counts as sent is on disk"
    assert history(second, "train/loss")[:10] == expected(110, 200)
    assert history(third, "train/loss") == expected(210, 300)


def test_a_paused_job_holds_no_process_and_a_refused_one_no_run(tmp_path: Path) -> None:
    paused, refused = story.submit(tmp_path, "job-1"), story.submit(tmp_path, "job-2")
    story.start(paused)
    paused.append([JobPauseRequested(), AttemptEnded(reason="interrupted", step=0), JobPaused()])
    refused.append([JobFailed(error=Fault(code="no_such_file", message="no"))])
    with publishing(tmp_path, WandbSink(child, flush_s=0.2)):
        until(lambda: closed(refused, "wandb") and read_cursor(paused, "wandb").event == paused.record().number)
        assert not wandb_children()
        paused.append([JobResumed()])
        until(lambda: read_cursor(paused, "wandb").event == paused.record().number)
        assert not wandb_children()
    assert not (refused.path / "wandb").exists()
    assert len(offline_files(paused)) == 1


def test_what_follows_a_repair_is_told_under_numbers_that_were_told_before(tmp_path: Path) -> None:
    run = story.submit(tmp_path)
    story.start(run)
    run.append([story.evaluation(step, 2.0) for step in (10, 20, 30)])
    with FakeWandb() as server:
        with publishing(tmp_path, WandbSink(child, WANDB_KEY, server.url, flush_s=0.2)):
            until(lambda: read_cursor(run, "wandb").event == 10)
            destroyed(run, 5)
            repair(run)
            run.append([AttemptStarted(worker="b", device="cpu"), story.LOADED, story.evaluation(40, 1.0)])
            until(lambda: read_cursor(run, "wandb").event == 8)
        (seen,) = server.runs.values()
        assert seen.rows("train/step", "eval/event") == [(0, 7), (10, 8), (20, 9), (30, 10), (40, 8)]


def test_a_job_that_paused_by_itself_calls_for_a_person(tmp_path: Path) -> None:
    """Also when publish was away meanwhile, and no process holds the run."""
    run = story.submit(tmp_path)
    error = Fault(code="no_valid_checkpoint", message="checkpoints/step-00000040 is gone", hint="bring it back")
    with FakeWandb() as server:
        with publishing(tmp_path, WandbSink(child, WANDB_KEY, server.url, flush_s=0.2)):
            story.start(run)
            until(lambda: read_cursor(run, "wandb").event == run.record().number)
        run.append([AttemptEnded(reason="no_valid_checkpoint", error=error), JobPaused(error=error)])
        with publishing(tmp_path, WandbSink(child, WANDB_KEY, server.url, flush_s=0.2)):
            until(lambda: read_cursor(run, "wandb").event == run.record().number)
            assert not wandb_children()
        (seen,) = server.runs.values()
        said = "no_valid_checkpoint: checkpoints/step-00000040 is gone\nbring it back"
        assert seen.alerts == [("ERROR", "chef: paused", said)]
        assert (seen.summary["status"], seen.summary["error_code"]) == ("paused", "no_valid_checkpoint")
