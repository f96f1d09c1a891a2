"""Every command against the real service: what people read, what programs read, and what is refused."""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from jobs.events import (
    AttemptEnded,
    AttemptStarted,
    JobCancelled,
    JobFailed,
    JobPaused,
    JobQueued,
    JobResumed,
    JobValidated,
)
from jobs.heartbeat import Gpu
from jobs.process.secrets import read_keys
from jobs.text.units import GIB
from jobs.trainer_facts import Fault
from jobs.version import VERSION
from longhaul import Longhaul
from longhaul.commands.command import find_id
from longhaul.main import main
from longhaul.result_tables import print_checkpoints, print_workers
from longhaul.tables import print_jobs
from service.openapi.examples import by_schema
from tests.longhaul.conftest import Run
from tests.service.running import Service
from tests.service.seeded import seed_sweep
from tests.support.machine import longest_file
from tests.support.samples import checked, dataset_report, facts_of, heartbeat, metric_row, prepared

REPOSITORY = Path(__file__).resolve().parents[2]
REFERENCE = REPOSITORY / "docs" / "reference" / "job.md"


def test_a_list_says_where_jobs_failed_and_leaves_dry_runs_out(service: Service, run: Run) -> None:
    refused, crashed = service.submit(), service.submit()
    dry = service.post("/jobs?dry_run=true", json={"data": {"train": "rows.jsonl"}}).json()["id"]
    service.append(refused, JobFailed(error=Fault(code="no_rows", message="no row can be used", hint=None)))
    error = Fault(code="crash", message="the trainer crashed", hint=None)
    service.append(crashed, checked(), prepared(9), JobQueued(), AttemptStarted(worker="w", device="cpu"))
    service.append(crashed, AttemptEnded(reason="crash", error=error), JobFailed(error=error))
    shown = run("list")
    assert "  failed at check: no_rows  " in shown and "  failed: crash  " in shown and dry not in shown
    assert "  validating (dry run)  " in run("list", "--all")
    service.append(dry, checked(), JobValidated())
    assert [job["id"] for job in run("list", "--status", "validated", "--json")["data"]] == [dry]


def test_a_job_that_paused_by_itself_is_seen_and_begun_again(service: Service, run: Run) -> None:
    job = service.submit()
    error = Fault(code="no_valid_checkpoint", message="checkpoints/step-00000004 is gone", hint="bring it back")
    service.append(job, checked(), prepared(9), JobQueued())
    service.append(job, AttemptStarted(worker="w", device="cpu"))
    service.append(job, AttemptEnded(reason="no_valid_checkpoint", error=error), JobPaused(error=error))
    assert "paused: no_valid_checkpoint" in run("list")
    shown = run("show", job)
    assert "checkpoints/step-00000004 is gone [no_valid_checkpoint]" in shown and "bring it back" in shown
    assert f"{job} is queued" in run("resume", job)
    run("pause", job)
    assert run("resume", job, "--from-scratch", "--json")["status"] == "queued"
    assert [resumed.from_scratch for resumed in facts_of(service.run(job), JobResumed)] == [False, True]


# Clears the screen, sets the title, writes to the clipboard, overwrites the line, in C0 and in C1; reorders the line.
HOSTILE = "\x1b[2J\x1b]0;owned\x07\x9b31m\x9d52;c;cm0=\x9c\b\x7f\r\u202etxt.exe\u2066 [red]:smile:"
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def test_no_text_from_elsewhere_acts_on_the_terminal(service: Service, run: Run) -> None:
    """Names of columns, a trainer's output, what a worker says: read as they are, in JSON exact."""
    job = service.submit(data={"train": "a\x9b2J\u202eb\x7f.jsonl"}, metadata={"team": HOSTILE[:30]})
    error = Fault(code="no_usable_columns", message=f"columns: {HOSTILE}\n    7  job succeeded", hint=HOSTILE)
    service.append(job, checked(), prepared(9), JobQueued())
    service.append(job, AttemptStarted(worker=HOSTILE, device=HOSTILE), AttemptEnded(reason="crash", error=error))
    service.append(job, JobPaused(error=error))
    service.run(job).trainer_log.write_bytes(HOSTILE.encode() + b"\xff\x9b2J\nstep 1\rstep 2\r\n")
    service.store.workers.report(heartbeat("train-\x9b2J-1", why=HOSTILE))
    service.append(job, JobFailed(error=error))
    for command in (
        ["list"], ["show", job, "--events"], ["events", job], ["events", job, "-f"], ["logs", job],
        ["logs", job, "-f"], ["workers"], ["clone", job, "--set", f"name={HOSTILE}"], ["show", HOSTILE],
    ):  # fmt: skip
        refused = command[0] == "clone" or HOSTILE in command
        shown = run(*command, code=2 if refused else 0)
        assert not OBEYED.search(shown), command
    shown = run("watch", job, code=1)
    assert not OBEYED.search(shown) and "[red]:smile:" in shown and "txt.exe" in shown
    assert [line for line in run("events", job).splitlines() if line.startswith("    7  job")] == []
    assert "step 1\nstep 2\n" in run("logs", job)
    assert run("show", job, "--json")["error"] == error.model_dump()


def test_help_names_every_command_once_and_the_exit_codes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for width in (44, 60, 120):
        monkeypatch.setenv("COLUMNS", f"{width}")
        with pytest.raises(SystemExit):
            main(["--help"])
        shown = capsys.readouterr().out
        assert max(map(len, shown.splitlines())) <= width and "a checkpoint and" in " ".join(shown.split())
    for title in (
        "new jobs:",
        "sweeps:",
        "what a job does:",
        "the queue:",
        "results:",
        "rows:",
        "the machine:",
        "exit codes:",
    ):
        assert f"\n{title}\n" in shown
    listed = re.findall(r"^  ([a-z]+) .*  \S", shown, re.MULTILINE)
    for name in listed:
        with pytest.raises(SystemExit) as asked:
            main([name, "--help"])
        assert asked.value.code == 0
        assert capsys.readouterr().out.startswith(f"usage: longhaul {name}")
    assert len(listed) == len(set(listed)) == 34


@pytest.mark.parametrize(
    ("command", "more"), [("list", "--staus failed"), ("show", "job-1 --jsn"), ("datasets show", "rows.jsonl --jsn")]
)
def test_a_mistyped_option_shows_the_usage_of_its_command(
    capsys: pytest.CaptureFixture[str], command: str, more: str
) -> None:
    with pytest.raises(SystemExit) as refused:
        main([*command.split(), *more.split()])
    assert refused.value.code == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"usage: longhaul {command} [-h]")
    assert "unrecognized arguments: --" in shown


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("", "which command? `longhaul --help` lists them"),
        ("lsit", "there is no command 'lsit'; did you mean list? `longhaul --help` lists all of them"),
        ("xyzzy", "there is no command 'xyzzy'; `longhaul --help` lists all of them"),
        ("submit rows.jsonl --sett a=b", "unrecognized arguments: --sett a=b; did you mean --set?"),
        ("list --staus=failed", "did you mean --status?"),
        ("list --status runing", "did you mean running?"),
        ("list --status done", "did you mean succeeded?"),
        ("submit rows.jsonl --model org/name", "did you mean --set model=org/name?"),
        ("submit --model org/name rows.jsonl", "did you mean --set model=org/name?"),
        ("plan rows.jsonl --lora_r 8", "did you mean --set method=lora --set method.rank=8?"),
        ("plan rows.jsonl --lora", "did you mean --set method=…?"),
        ("plan rows.jsonl --gradient-accumulation-steps 8", "did you mean --set training.batch_size=…? It counts the"),
        ("plan rows.jsonl --report-to wandb", "did you mean --set integrations=…?"),
        (
            "plan rows.jsonl --every_steps 50",
            "did you mean --set log.every_steps=… or --set checkpoint.every_steps=… or",
        ),
        ("plan rows.jsonl --output_dir x", "; the model is always in runs/JOB/model"),
        ("sweep rows.json --batch-size=8", "; did you mean --set job.training.batch_size=8?"),
        ("clone job-1 --hep", "unrecognized arguments: --hep; did you mean --help?"),
        ("datasets ad rows.jsonl", "did you mean add?"),
        ("completion bahs", "did you mean bash?"),
    ],
)
def test_a_mistyped_word_names_the_one_that_was_meant(
    capsys: pytest.CaptureFixture[str], written: str, said: str
) -> None:
    with pytest.raises(SystemExit) as refused:
        main(written.split())
    assert refused.value.code == 2
    assert said in capsys.readouterr().err


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0 and capsys.readouterr().out == f"longhaul {VERSION}\n"


def test_rows_that_lie_anywhere_are_enough_for_a_job(run: Run) -> None:
    Path("recipes.jsonl").write_text('{"input": "a", "target": "b"}\n')
    assert "uploaded recipes.jsonl (30 B) as dataset:recipes.jsonl" in run("submit", "recipes.jsonl")
    job = run("submit", "recipes.jsonl", "--json", "--set", "training.epochs=1")
    assert (job["name"], job["training_file"]) == ("recipes", "dataset:recipes.jsonl")
    assert job["spec"]["training"]["epochs"] == 1
    os.mkdir("folder.jsonl")
    assert "folder.jsonl: Is a directory" in run("submit", "folder.jsonl", code=2)
    os.mkfifo("pipe.jsonl")
    for command in (["submit"], ["datasets", "add"]):  # it would wait for a writer for ever
        assert "pipe.jsonl: is not a regular file; write" in run(*command, "pipe.jsonl", code=2)
    os.mkdir("data")
    os.rename("recipes.jsonl", "data/recipes.jsonl")
    assert run("submit", "data/recipes.jsonl", "--json")["training_file"] == "recipes.jsonl"
    assert run("submit", "data/recipes.jsonl", "--json", "--upload")["training_file"] == "dataset:recipes.jsonl"


@pytest.mark.parametrize("command", ["submit", "plan"])
def test_a_job_that_is_wrong_besides_its_rows_uploads_nothing(run: Run, command: str) -> None:
    Path("recipes.jsonl").write_text('{"input": "a", "target": "b"}\n')
    for change, refusal in [
        ("training.epochs", "write key.dotted=value"),
        ("training.epoch=3", "training.epoch: unknown key"),
        ("training.epochs=-1", "training.epochs"),
    ]:
        assert refusal in run(command, "recipes.jsonl", "--set", change, code=2)
    assert run("datasets", "--json") == [] and run("list", "--json")["data"] == []


def test_a_clone_with_changes_and_one_that_goes_on(run: Run, service: Service) -> None:
    first = service.submit(metadata={"team": "kitchen"})
    clone = run("clone", first, "--set", "name=again", "--set", "metadata=null", "--json")
    assert (clone["name"], clone["metadata"], clone["cloned_from"]) == ("again", {}, first)
    assert f"cloned from    {first}" in run("show", clone["id"])
    assert run("clone", first, "--resume", "--json")["spec"]["resume_from"] == first
    assert "training.epoch: unknown key" in run("clone", first, "--set", "training.epoch=3", code=2)
    assert "there is no job" in run("clone", "job-unknown", code=2)


def test_the_queue_is_read_filtered_and_reordered(run: Run, service: Service) -> None:
    first = service.submit(metadata={"team": "kitchen"})
    second = service.submit(metadata={"team": "garden"})
    moved = run("priority", second, "7")
    assert f"{second} is validating, number 1 in the queue (priority 7)" in moved
    running = service.submit()
    service.append(running, checked(), prepared(9), JobQueued(), AttemptStarted(worker="w", device="cpu"))
    assert run("priority", running, "10") == f"{running} is running, priority 10\n"
    service.append(running, JobCancelled())
    lines = run("list", "--status", "validating").splitlines()
    assert lines[0].split() == ["name", "id", "status", "pos.", "prio.", "step", "loss", "submitted", "left"]
    assert [line.split()[:5] for line in lines[1:]] == [
        ["tiny", second, "validating", "1", "7"],
        ["tiny", first, "validating", "2", "0"],
    ]
    service.append(first, JobCancelled())
    assert [job["id"] for job in run("list", "--status", "cancelled", "--json")["data"]] == [running, first]
    both = run("list", "--status", "cancelled", "--status", "validating", "--json")["data"]
    assert [job["id"] for job in both] == [running, second, first]
    assert [job["id"] for job in run("list", "--where", "team=garden", "--json")["data"]] == [second]
    assert "no such jobs" in run("list", "--where", "team=garden", "--status", "failed")
    assert "write KEY=VALUE" in run("list", "--where", "team", code=2)
    assert "cannot be 'a' and 'b' at once" in run("list", "--where", "team=a", "--where", "team=b", code=2)
    refused = run("priority", second, "101", code=2)
    assert "priority" in refused and "100" in refused


@pytest.mark.parametrize("width", [40, 60, 80, 100])
def test_a_narrow_terminal_shows_short_ids_that_lead_to_the_jobs_and_names_whole(service: Service, width: int) -> None:
    name = "a-name-that-is-far-too-long-for-this"
    job = service.submit(name=name)
    error = Fault(code="no_valid_checkpoint", message="m", hint=None)
    service.append(job, checked(), prepared(9), JobQueued(), AttemptStarted(worker="w", device="cpu"))
    service.append(job, AttemptEnded(reason="no_valid_checkpoint", error=error), JobPaused(error=error))
    other = service.submit(name="recipes")
    shown = printed(width, lambda console, api: print_jobs(api.list(), console), service)
    lines = shown.splitlines()
    start, end = lines[0].index("name"), lines[0].index(" id") + 1
    short = [line[end:].split()[0] for line in lines[1:] if line[end : end + 1].strip()]
    with Longhaul(service.url, service.settings.api_key) as api:
        assert [find_id(api, each, "show") for each in short] == [other, job]
    at = next(at for at, line in enumerate(lines) if short[1] in line)
    assert "".join(line[start:end].strip() for line in lines[at:]) == name
    assert max(map(len, lines)) <= max(width, 8 + 2 + 20 + 2 + 8) and "…" not in shown
    assert "no_valid_checkpoint" in shown or width == 40


def test_sixty_columns_have_room_for_step_loss_and_time_left() -> None:
    job = {**by_schema()["Job"], "best_loss": 1.3982, "estimated_finish": time.time() + 899}
    page: Any = {"data": [job, {**job, "id": "job-06e1m9rr2b1w0h7n4v8s"}], "has_more": False}
    shown = printed(60, lambda console, _: print_jobs(page, console)).splitlines()
    assert {"id", "status", "step", "loss", "left"} <= {*shown[0].split()}
    assert max(map(len, shown)) <= 60 and "4,200/85,157" in shown[1] and "1.3982" in shown[1]


@pytest.mark.parametrize(("columns", "whole"), [("60", False), ("", True)])
def test_a_pipe_is_as_wide_as_columns_says(service: Service, columns: str, whole: bool) -> None:
    job = service.submit(name="recipes")
    environment = {**os.environ, "COLUMNS": columns}
    command = [sys.executable, "-m", "longhaul.main", "list"]
    lines = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    assert (job in lines[1]) == whole == ("submitted" in lines[0])
    assert job.partition("-")[2][:8] in lines[1] and (whole or max(map(len, lines)) <= 60)


def test_narrow_tables_of_workers_and_checkpoints_show_ids_whole() -> None:
    job = "job-01m830fe2at3h8g66z00"
    gpu = Gpu(uuid="GPU-1", name="NVIDIA RTX 5090", memory_bytes=32 * 2**30, driver="580.1")
    worker: Any = {**heartbeat("train-1", pid=7, gpu=gpu).model_dump(), "healthy": True, "why": None, "job": job}
    worker |= {"job_since": 0, "heartbeat_age_s": 3.0}
    checkpoint: Any = {"id": f"{job}:step-00000040", "step_number": 40, "metrics": {"valid_loss": 1.5}, "bytes": 1}
    checkpoint["created_at"] = 0
    for width in (40, 60, 80):
        shown = printed(width, lambda console, _: print_workers([worker], console))
        shown += printed(width, lambda console, _: print_checkpoints([checkpoint], console))
        assert job in shown and checkpoint["id"] in shown and "1.5000" in shown and "…" not in shown
    assert "580.1" in shown and "40" in shown


def printed(width: int, show: Callable[[Console, Any], None], service: Service | None = None) -> str:
    """What a terminal of this width shows."""
    screen = io.StringIO()
    with Longhaul(*(service.url, service.settings.api_key) if service else ()) as api:
        show(Console(file=screen, width=width), api)
    return screen.getvalue()


def test_where_there_is_no_job_none_is_the_last(run: Run) -> None:
    assert "there is no job yet, so none is the last" in run("watch", "last", code=2)


def test_a_job_is_meant_by_the_beginning_of_its_id_by_its_name_or_as_the_last(run: Run, service: Service) -> None:
    first, second = service.submit(), service.submit(name="other")
    differ = next(at for at in range(len(first)) if first[at] != second[at])
    common, unique = first[:differ], first[: differ + 1]
    assert run("show", unique, "--json")["id"] == first
    assert "submitted as 'tiny'" in run("events", unique)
    assert f"{first} is" in run("cancel", unique)
    ambiguous = run("cancel", common, code=2)
    assert f"{common} can be {second} (other, validating), {first} (tiny, cancelled): write more of the id" in ambiguous
    assert run("show", "last", "--json")["id"] == run("show", "other", "--json")["id"] == second
    clone = run("clone", "other", "--no-check", "--json")["id"]
    shown = run("show", "other")
    assert f"2 jobs are called other; the newest is meant, {clone}; for another give its id\n" in shown
    assert f"other · {clone}" in shown
    for command in (["cancel"], ["delete", "-y"], ["pause"], ["resume"], ["repair"], ["priority"], ["push"]):
        more = {"priority": ["7"], "push": ["org/name", "--license", "mit"]}.get(command[0], [])
        assert f"other can be {clone} (other, validating), {second}" in run(*command, "other", *more, code=2)
    assert f"there is no job {unique}u" in run("show", f"{unique}u", code=2), "no id has a u"
    assert "there is no job othre\n  hint: did you mean other?" in run("show", "othre", code=2)
    assert run("clone", unique, "--resume", "--json")["spec"]["resume_from"] == first


def test_every_key_of_a_job_is_listed(run: Run) -> None:
    known = {key["name"]: key for key in run("keys", "--json")}
    assert known["training.epochs"] == {
        "name": "training.epochs", "values": "integer, 1 to 10,000", "default": "5",
        "meaning": "Passes over all rows.", "holds_keys": False,
    }  # fmt: skip
    listed = re.findall(r"^\| `([a-z_.\[\]]+)` \|", REFERENCE.read_text(), re.MULTILINE)
    assert set(listed) == {key["name"] for key in known.values() if "." in key["name"] or not key["holds_keys"]}
    assert "data.train  string, 1 to 1,024 characters or list of object; required" in run("keys", "data.tr")
    assert "default 512" in run("keys", "max_input_tokens")
    for written in ("data.train.source", "data.train[].source", "data.train.0.source"):
        assert run("keys", written).startswith("data.train[].source  string")
    for written, meant in [
        ("traning", "training"),
        ("training.epohcs", "training.epochs"),
        ("epoch", "training.epochs"),
        ("lr", "training.learning_rate"),
        ("data.train_file", "data.train"),
        ("data.label", "data.target"),
    ]:
        assert f"did you mean {meant}?" in run("keys", written, code=2)
    assert "hint: the model is always in runs/JOB/model" in run("keys", "output_dir", code=2)


def test_the_next_page_has_the_same_filters(run: Run, service: Service) -> None:
    jobs = [service.submit(metadata={"team": "big kitchen"}) for _ in range(3)]
    options = ["--status=validating", "--where=team=big kitchen", "--limit=1"]
    more = f"longhaul list --status=validating '--where=team=big kitchen' --limit=1 --after {jobs[-1]}"
    assert f"more: {more}\n" in run("list", *options)
    following = shlex.split(more)[1:]
    assert jobs[1] in run(*following) and jobs[0] in run(*following[:-1], jobs[1])


def test_what_is_removed_is_asked_about(run: Run, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    job = service.submit()
    for options in ([], ["--yes"]):
        refused = run("delete", job, *options, code=2)
        assert f"job {job} is validating: cancel it first" in refused and "add --yes" not in refused
    service.append(job, JobCancelled())
    assert "add --yes" in run("delete", job, code=2)
    monkeypatch.setattr(sys, "stdin", FakeTerminal("n\n"))
    refused = run("delete", job, code=2)
    assert f"delete tiny ({job}, cancelled)" in refused and "nothing was deleted" in refused
    monkeypatch.setattr(sys, "stdin", FakeTerminal("y\n"))
    assert f"{job} is deleted" in run("delete", job)
    assert not service.run(job).exists()
    other = service.submit()
    service.append(other, JobCancelled())
    assert run("delete", other, "--yes", "--json")["deleted"] is True


class FakeTerminal(io.StringIO):
    """Somebody who answers."""

    def isatty(self) -> bool:
        return True


def test_events_are_listed_and_followed_to_the_last(run: Run, service: Service) -> None:
    job = service.submit()
    service.append(job, checked())
    shown = run("events", job)
    assert "submitted as 'tiny'" in shown and "checked" in shown
    assert "submitted as" not in run("events", job, "--after", "1")
    service.append(job, JobCancelled())
    shown = run("events", job, "--follow").splitlines()
    assert [line.split()[0] for line in shown] == ["1", "2", "3"]
    assert run("events", job, "--after", "2", "--json")["type"] == "job.cancelled"


def test_metrics_are_small_curves(run: Run, service: Service) -> None:
    job = service.submit()
    assert run("metrics", job) == "no metrics yet\n"
    assert run("metrics", job, "--json")["data"] == []
    rows = [metric_row(step, loss=10 / step, memory_bytes=3 * GIB).model_dump_json() for step in range(1, 201)]
    service.run(job).metrics_file.write_text("\n".join(rows) + "\n")
    shown = run("metrics", job)
    assert "steps " in shown and " to 200" in shown
    loss = next(line for line in shown.splitlines() if line.startswith("loss"))
    assert "█" in loss and loss.rstrip().split()[-3] == loss.rstrip().split()[-2], "it falls: the last is the lowest"
    assert "3.0 GiB" in shown
    assert len(run("metrics", job, "--points", "5", "--fields", "loss", "--json")["data"]) == 5
    assert "nonsense" in run("metrics", job, "--fields", "nonsense", code=2)


def test_checkpoints_files_and_download(run: Run, service: Service) -> None:
    job = service.submit()
    folder = service.run(job)
    assert run("checkpoints", job) == "no checkpoint yet\n"
    folder.model.mkdir()
    (folder.model / "config.json").write_text("{}")
    (folder.model / "model.safetensors").write_bytes(b"x" * 3000)
    folder.metrics_file.write_text("{}")
    listed = run("files", job)
    assert "model/model.safetensors" in listed and f"longhaul download {job} trainer.log" in listed
    assert "2 files, 3 KiB, in " in run("download", job)
    assert Path(job, "model", "model.safetensors").read_bytes() == b"x" * 3000
    assert {one["path"] for one in run("download", job, "model", "metrics.jsonl", "--to", "both", "--json")} == {
        "both/model/config.json", "both/model/model.safetensors", "both/metrics.jsonl"
    }  # fmt: skip
    assert "in my-model" in run("download", job, "--to", "my-model") and Path("my-model/config.json").exists()
    [one] = run("download", job, "model/config.json", "--to", "there", "--json")
    assert one == {"path": "there/model/config.json", "bytes": 2}
    assert f"list them with: longhaul files {job}" in run("download", job, "model", "modell", code=2)
    Path("taken").write_text("")
    assert "--to taken" in run("download", job, "--to", "taken", code=2)
    with longest_file(1000):
        full = run("download", job, "--to", "full", code=2)
    assert "--to full: File too large" in full and "None" not in full
    assert f"{job}.html, " in run("report", job) and Path(f"{job}.html").read_text().endswith("</html>")
    assert run("report", job, "--out", "it.html", "--json")["bytes"] == Path("it.html").stat().st_size
    assert "--out taken/x" in run("report", job, "--out", "taken/x", code=2)
    folder.trainer_log.write_text("step 1\n")
    run("download", job, "trainer.log")
    assert Path(job, "trainer.log").read_text() == "step 1\n"


def test_data_sets(run: Run) -> None:
    assert "longhaul datasets add FILE" in run("datasets")
    Path("rows.jsonl").write_text('{"input": "a", "target": "b"}\n')
    assert "a job names it dataset:rows.jsonl" in run("datasets", "add", "rows.jsonl")
    Path("störungen.csv").write_text("input,target\na,b\n")
    named = "dataset:st-rungen.csv"
    assert f"a job names it {named}" in run("datasets", "add", "störungen.csv")
    assert run("submit", "störungen.csv", "--no-check", "--json")["training_file"] == named
    run("datasets", "add", "störungen.csv", "--name", "störungen.csv", code=2)
    assert "is needed by 1 open job" in run("datasets", "rm", named, "--yes", code=2)
    made = run("datasets", "add", "rows.jsonl", "--name", "other.jsonl", "--json")
    assert (made["name"], made["bytes"]) == ("other.jsonl", 30)
    assert [each["name"] for each in run("datasets", "--json")] == ["other.jsonl", "rows.jsonl", "st-rungen.csv"]
    assert run("datasets", "--json", "show", "rows.jsonl")["name"] == "rows.jsonl"
    assert "none: no existing job has prepared it" in run("datasets", "show", "dataset:rows.jsonl")
    assert "`longhaul datasets`" in run("datasets", "show", "dataset:other.csv", code=2)
    assert "dataset:rows.jsonl" in run("datasets")
    Path("rows.jsonl").write_text("{}\n")
    assert "rows.jsonl" in run("datasets", "add", "rows.jsonl", code=2)
    assert "No such file" in run("datasets", "add", "nothing.jsonl", code=2)
    Path("empty.jsonl").touch()
    refused = run("datasets", "add", "empty.jsonl", code=2)
    assert "empty.jsonl is empty" in refused and "hint: send a file with at least one row" in refused
    assert "add --yes" in run("datasets", "rm", "rows.jsonl", code=2)
    assert "rows.jsonl is deleted" in run("datasets", "rm", "dataset:rows.jsonl", "-y")
    assert "rows.jsonl" in run("datasets", "rm", "rows.jsonl", code=2)


def test_a_data_set_accounts_for_every_row(run: Run, service: Service) -> None:
    Path("rows.jsonl").write_text('{"input": "a", "target": "b"}\n')
    job = run("submit", "rows.jsonl", "--json")["id"]
    report = dataset_report(rows_read=1300, kept=295, duplicates=1, rejected={"not JSON": 1001, "empty target": 3})
    (service.run(job).path / "dataset.json").write_text(report.model_dump_json())
    lines = {" ".join(line.split()) for line in run("datasets", "show", "rows.jsonl").splitlines()}
    assert {"rows read 1,300", "kept 295", "duplicates 1", f"prepared by {job}", "noticed 0"} <= lines
    assert "rejected 1,004 (not JSON: 1,001, empty target: 3)" in lines


def test_workers(run: Run, service: Service) -> None:
    assert "no workers" in run("workers")
    gpu = Gpu(uuid="GPU-1", name="NVIDIA RTX 5090", memory_bytes=32 * 2**30, driver="580.1")
    why = "no usable GPU: the driver is too old"
    service.store.workers.report(heartbeat("train-box-7-abc", why=why, pid=7, device="cuda", gpu=gpu))
    shown = run("workers")
    assert "NVIDIA RTX 5090, 32.0 GiB, driver 580.1" in shown
    assert "NVIDIA RTX 5090 was never examined: `longhaul doctor` does it" in shown
    assert "train takes no work: no usable GPU" in shown
    assert run("workers", "--json")["data"][0]["pid"] == 7


def test_a_worker_of_an_engine_names_it_and_its_gpu_is_not_examined_here() -> None:
    gpu = Gpu(uuid="cluster/0", name="NVIDIA H100", memory_bytes=80 * 2**30, driver="")
    workers: Any = [
        heartbeat(f"train-box-{pid}-abc", device=device, gpu=has, slot=0, pid=pid, engine=engine).model_dump()
        | {"job": None, "job_since": None, "heartbeat_age_s": 3.0}
        for pid, device, has, engine in (
            (70, "cuda", gpu, "cluster"),
            (71, "cpu", None, "small"),
            (72, "cpu", None, None),
        )
    ]
    shown = printed(200, lambda console, _: print_workers(workers, console))
    assert "NVIDIA H100, 80.0 GiB, engine cluster" in shown and "cpu, engine small" in shown
    assert "doctor" not in shown and "slots" not in shown


def test_slots_of_a_gpu_are_one_line_and_one_for_each_more_that_works() -> None:
    gpu = Gpu(uuid="GPU-1", name="NVIDIA RTX 5090", memory_bytes=32 * 2**30, driver="580.1")
    workers: Any = [
        heartbeat(f"train-box-7{slot}-abc", device="cuda", gpu=gpu, slot=slot, pid=70 + slot).model_dump()
        | {"job": "job-01m830fe2at3h8g66z00" if slot == 2 else None, "job_since": None, "heartbeat_age_s": 3.0}
        for slot in (3, 0, 1, 2)
    ]
    shown = printed(200, lambda console, _: print_workers(workers, console))
    first, second = (line for line in shown.splitlines() if line.startswith("train"))
    assert "70" in first and "NVIDIA RTX 5090, 32.0 GiB, driver 580.1, 4 slots" in first
    assert "72" in second and "job-01m830fe2at3h8g66z00" in second and "slot 2 of NVIDIA RTX 5090" in second
    assert shown.count("was never examined") == 1


def test_boxes_are_shown_where_there_are_several_and_a_clock_that_differs() -> None:
    def worker(box: str, **more: Any) -> Any:
        facts = {"job": None, "job_since": None, "heartbeat_age_s": 3.0}
        return heartbeat(f"train-{box}-7-abc", device="cpu", box=box, pid=7, **more).model_dump() | facts

    alone, other = worker("main"), worker("gpu2", clock_ahead_s=-3600.0)
    assert "box" not in printed(200, lambda console, _: print_workers([alone], console))
    shown = printed(200, lambda console, _: print_workers([alone, other], console))
    head, *lines = shown.splitlines()
    assert head.split()[:2] == ["stage", "box"] and [line.split()[1] for line in lines[:2]] == ["gpu2", "main"]
    assert "the clock of train on gpu2 is 1 h behind that of Redis: set both by NTP" in shown
    publish = worker("main", versions={"longhaul": "1.1.0"}) | {"stage": "publish"}
    older = worker("gpu2", versions={"longhaul": "1.0.0"})
    shown = printed(200, lambda console, _: print_workers([publish, older], console))
    assert "train on gpu2 is of Longhaul 1.0.0, and publish of 1.1.0: update that box" in shown


def test_a_key_and_its_line(run: Run) -> None:
    made = run("key", "ann", "--json")
    assert list(read_keys(made["line"])) == ["ann"] and made["key"] not in made["line"]
    assert "ann" in run("key", "ann")
    assert "cannot name a key" in run("key", "no good", code=2)


def test_without_a_key_it_says_where_one_is(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The .env that lies here is named, not read."""
    monkeypatch.delenv("LONGHAUL_API_KEY")
    Path(".env").write_text("LONGHAUL_API_KEY=test-key-123\n")
    refused = run("list", code=2)
    assert "an API key is needed" in refused and "grep ^LONGHAUL_API_KEY= .env" in refused


def test_show_tells_why_it_failed(run: Run, service: Service) -> None:
    job = service.submit()
    service.append(
        job, JobFailed(error=Fault(code="bad_data", message="no row can be used", hint="look at the report"))
    )
    shown = run("show", job)
    assert "no row can be used [bad_data]" in shown and "look at the report" in shown
    assert run("metrics", job) == "no metrics: the job is failed\n", "none will come"
    assert run("checkpoints", job) == "no checkpoint: the job is failed\n"


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("su", {"submit"}),
        ("show ", {"job-1", "chef"}),
        ("logs -f ch", {"chef"}),
        ("submit ", {"rows.jsonl"}),
        ("list --status fai", {"failed"}),
        ("datasets s", {"show"}),
        ("sweep sh", {"show"}),
        ("sweep ro", {"rows.jsonl"}),
        ("sweep show ", {"sweep-1"}),
    ],
)
def test_bash_completes_commands_jobs_files_and_choices(tmp_path: Path, typed: str, offered: set[str]) -> None:
    (tmp_path / "rows.jsonl").touch()
    script = """
        longhaul() {
            if [ "$*" = "completion jobs" ]; then printf 'job-1\\nchef\\n';
            elif [ "$*" = "completion sweeps" ]; then echo sweep-1; else "$PYTHON" -m longhaul.main "$@"; fi
        }
        eval "$(longhaul completion bash)"
        COMP_WORDS=(longhaul "$@"); COMP_CWORD=$#; COMP_LINE="longhaul $*"; COMP_POINT=${#COMP_LINE}
        completer=$(complete -p longhaul); completer=${completer##*-F }
        "${completer%% *}" longhaul "${COMP_WORDS[$COMP_CWORD]}" "${COMP_WORDS[$COMP_CWORD-1]}"
        printf '%s\\n' "${COMPREPLY[@]}"
    """
    environment = {"PATH": os.environ["PATH"], "PYTHON": sys.executable, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        ["bash", "-c", script, "bash", *typed.split(" ")], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert set(done.stdout.split()) == offered, done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_every_command_and_option(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in ("submit", "no-check", "checkpoints", "datasets", "longhaul completion jobs"):
        assert word in script


def test_jobs_are_offered_by_id_and_by_name(run: Run, service: Service) -> None:
    job = service.submit(name="chef")
    assert run("completion", "jobs").split() == [job, "chef"]
    sweep = seed_sweep(service, ended=True)
    assert run("completion", "sweeps").split() == [sweep, "sweep"]
