"""The `longhaul` command against the real service: what it prints, and its exit codes."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from jobs.events import (
    AnyFact,
    AttemptEnded,
    AttemptStarted,
    JobFailed,
    JobPaused,
    JobQueued,
    JobSucceeded,
    JobValidated,
    TaskSubmitted,
    TaskWaiting,
)
from jobs.trainer_facts import CheckpointSaved, EvaluationFinished, Fault, ModelLoaded, OomRecovered, Sample
from longhaul.api import Longhaul
from longhaul.main import main
from longhaul.watch import watch
from tests.service.running import TINY, Service
from tests.support.redis_server import free_port
from tests.support.samples import checked, metric_row, prepared, time_summary
from tests.support.stack import ROOT

NEEDED = "about 2.0 h at the nominal peak of an RTX 5090 (about 5.0 h expected)"
TIME = time_summary(hours_at_limit=2.0, hours_expected=5.0, text=NEEDED)
SAMPLE = Sample(input="leeks\n" + "and more " * 30, target="Boil them.", generated="Boil boil.")
START: tuple[AnyFact, ...] = (
    checked(),
    prepared(20, train_rows=400, rejected={"empty": 2}, duplicates=39, time=TIME),
    JobQueued(),
    AttemptStarted(worker="w", device="cpu"),
    ModelLoaded(parameters=1000, parameter_bytes=2000, dtype="bfloat16", device="cpu", seconds=0.1, peak_ratio=1.0),
    EvaluationFinished(step=0, loss=6.0, rows=4, seconds=0.1, best=True, samples=[SAMPLE, SAMPLE]),
)
END: tuple[AnyFact, ...] = (
    OomRecovered(step=3, micro_batch_before=8, micro_batch_after=4, message="m", milliseconds_lost=5.0),
    CheckpointSaved(step=20, path="checkpoints/step-00000020", bytes=10**9, seconds=2.0),
    AttemptEnded(reason="done", step=20),
    JobSucceeded(model="model", step=20, loss=2.5, first_loss=6.0),
)
FAILED = JobFailed(error=Fault(code="bad_data", message="no row can be used", hint="look at the report"))


@pytest.fixture
def job_file(tmp_path: Path) -> str:
    file = tmp_path / "job.json"
    file.write_text(json.dumps(TINY))
    return str(file)


def test_submit_show_list_steer(service: Service, job_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", job_file, "--json", "--set", "name=chef", "--idempotency-key", "k"]) == 0
    job = json.loads(capsys.readouterr().out)
    assert (job["name"], job["status"]) == ("chef", "validating")
    assert main(["submit", job_file, "--json", "--set", "name=chef", "--idempotency-key", "k"]) == 0
    assert json.loads(capsys.readouterr().out)["id"] == job["id"]
    service.append(job["id"], *START)
    assert main(["show", job["id"], "--events"]) == 0
    shown = capsys.readouterr().out
    for part in (
        "running",
        "step 0 of 20",
        f"prepared: 400 training rows, 2 rejected, 39 duplicates left out, 20 steps to train; {NEEDED}",
        f"time needed       {NEEDED}",
        "6.0000",
        "model loaded once",
    ):
        assert part in shown
    assert main(["list"]) == 0
    assert job["id"] in capsys.readouterr().out
    assert main(["pause", job["id"]]) == 0
    assert "running, pause requested" in capsys.readouterr().out
    assert main(["resume", job["id"]]) == 0
    assert main(["cancel", job["id"]]) == 0
    assert "cancel requested" in capsys.readouterr().out
    service.append(job["id"], *END)
    assert main(["cancel", job["id"]]) == 2
    assert "already ended (succeeded)" in capsys.readouterr().err


def test_on_names_the_engine_of_a_job_and_show_its_task(
    service: Service, job_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", job_file, "--on", "cluster", "--json"]) == 0
    job = json.loads(capsys.readouterr().out)
    assert (job["spec"]["resources"]["engine"], job["engine"], job["task"]) == ("cluster", "cluster", None)
    started = AttemptStarted(worker="w", device="cuda", engine="cluster")
    waits = TaskWaiting(task="7", message="PENDING (Priority)")
    service.append(
        job["id"], checked(), prepared(9), JobQueued(), started, TaskSubmitted(engine="cluster", task="7"), waits
    )
    assert main(["show", job["id"]]) == 0
    shown = capsys.readouterr().out
    assert re.search("engine +cluster, task 7", shown)
    assert re.search(r"waits because +it waits on the engine cluster: PENDING \(Priority\)", shown)
    page = service.get(f"/jobs/{job['id']}", headers={"Accept": "text/html"}).text
    assert "on the engine cluster, task 7" in page and "It waits on the engine cluster: PENDING (Priority)." in page
    assert main(["submit", job_file, "--on", "No Engine"]) == 2
    assert "resources.engine" in capsys.readouterr().err


def test_refusals_name_the_field_and_the_way_out(
    service: Service, job_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", job_file, "--set", "data.train=../x.jsonl"]) == 2
    error = capsys.readouterr().err
    assert "data.train" in error
    assert "outside the data directory" in error
    assert "hint: " in error
    assert main(["submit", job_file, "--set", "training.epoch=3"]) == 2
    assert "training.epoch: unknown key" in capsys.readouterr().err
    assert main(["show", "job-unknown"]) == 2
    assert list(service.settings.runs.iterdir()) == []


def test_a_wrong_key_and_nobody_there(
    service: Service, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LONGHAUL_API_KEY", "wrong-key")
    assert main(["list"]) == 2
    error = capsys.readouterr().err
    assert "LONGHAUL_API_KEY" in error
    assert "wrong-key" not in error
    monkeypatch.setenv("LONGHAUL_URL", f"http://127.0.0.1:{free_port()}")
    assert main(["list"]) == 3
    error = capsys.readouterr().err
    assert "longhaul local" in error
    assert "Traceback" not in error


def test_a_url_that_cannot_be_one_is_told_from_a_service_that_is_down(
    service: Service, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for url in ("htp://x", "http://", "http://[::1"):
        monkeypatch.setenv("LONGHAUL_URL", url)
        assert main(["list"]) == 2
        error = capsys.readouterr().err
        assert "LONGHAUL_URL: " in error and "longhaul local" not in error
        with pytest.raises(ValueError, match=r"http://|IPv6"):
            Longhaul(url)
    monkeypatch.setenv("LONGHAUL_URL", service.url.replace("http:", "https:"))
    assert main(["list"]) == 3
    error = capsys.readouterr().err
    assert "no TLS connection to https://" in error and "begins with http://" in error and "local`" not in error


def test_watch_tells_the_story_and_its_exit_code_is_the_jobs(
    service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    job = service.submit()

    def work() -> None:
        for fact in (*START, *END):
            service.append(job, fact)
            time.sleep(0.05)

    thread = threading.Thread(target=work)
    thread.start()
    assert main(["watch", job]) == 0
    thread.join()
    out = capsys.readouterr().out
    story = [
        "submitted as 'tiny'", "checked:", "prepared: 400 training rows", "waits for its turn",
        "attempt 1 started on cpu",
        "1,000 parameters", "validation loss 6.0000", "input      leeks and more", "target     Boil them.",
        "generated  Boil boil.", "micro-batches of 4 instead of 8",
        "checkpoint saved (954 MiB", "the trainer has finished", "succeeded: the model of step 20", "model is in",
        f"fetch the model with: longhaul download {job}",
    ]  # fmt: skip
    places = [out.find(part) for part in story]
    assert -1 not in places, story[places.index(-1)]
    assert places == sorted(places)
    assert f"runs/{job}/model" in out
    assert out.count("Boil boil.") == 1, "one sample"
    assert max(len(line) for line in out.splitlines() if "and more" in line) <= 200, "and a line of it"


def test_watch_can_be_entered_late(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    job = service.submit()
    service.append(job, *START)
    checkpoint = CheckpointSaved(step=1, path="checkpoints/step-00000001", bytes=1, seconds=0.1)
    service.append(job, *[checkpoint] * 20, *END)
    assert main(["watch", job]) == 0
    out = capsys.readouterr().out
    assert "earlier events" in out
    assert "submitted as" not in out
    assert "succeeded" in out


def test_watch_of_jobs_that_end_otherwise(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    failed, dry = service.submit(), service.submit()
    service.append(failed, FAILED)
    assert main(["watch", failed]) == 1
    out = capsys.readouterr().out
    assert "no row can be used" in out
    assert "look at the report" in out
    service.append(dry, checked(), JobValidated())
    assert main(["watch", dry, "--json"]) == 0
    types = [json.loads(line)["type"] for line in capsys.readouterr().out.splitlines()]
    assert types == ["job.submitted", "job.checked", "job.validated"]
    assert main(["watch", "job-unknown"]) == 2


def ctrl_c(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_ctrl_c_leaves_the_job_alone(
    service: Service, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = service.submit()
    monkeypatch.setattr("longhaul.commands.following.watch", ctrl_c)
    assert main(["watch", job]) == 130
    assert f"watch it again with: longhaul watch {job}" in capsys.readouterr().out
    monkeypatch.setattr(Longhaul, "events", ctrl_c)
    assert main(["watch", job, "--json"]) == 130
    answer = capsys.readouterr()
    assert f"watch it again with: longhaul watch {job}" in answer.err and answer.out == ""
    assert service.get(f"/jobs/{job}").json()["status"] == "validating"


def test_ctrl_c_says_how_the_job_stands(
    service: Service, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = service.submit()
    monkeypatch.setattr("longhaul.commands.following.watch", ctrl_c)

    def output() -> str:
        assert main(["watch", job]) == 130
        return capsys.readouterr().out

    service.append(job, checked(), prepared(9), JobQueued())
    assert "the job is queued and continues without you" in output()
    service.append(job, AttemptStarted(worker="w", device="cpu"))
    assert "the job continues;" in output()
    service.post(f"/jobs/{job}/pause")
    assert "the job is running, and a pause is requested" in output()
    service.append(job, AttemptEnded(reason="interrupted"), JobPaused())
    assert f"the job is paused until somebody resumes it (longhaul resume {job})" in output()
    service.post(f"/jobs/{job}/cancel")
    assert "the job has ended: cancelled" in output()


def test_logs_follow_to_the_end(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    job = service.submit()
    service.run(job).trainer_log.write_text("one\ntwo\n")
    assert main(["logs", job, "--tail", "1"]) == 0
    assert capsys.readouterr().out == "two\n"

    def work() -> None:
        time.sleep(0.3)
        with open(service.run(job).trainer_log, "a") as file:
            file.write("three ½\n")
        service.append(job, FAILED)

    thread = threading.Thread(target=work)
    thread.start()
    assert main(["logs", job, "-f"]) == 0
    thread.join()
    assert capsys.readouterr().out == "one\ntwo\nthree ½\n"


def test_a_terminal_sees_bar_figures_and_time_left(service: Service) -> None:
    job = service.submit()
    service.append(job, *START)

    screen = io.StringIO()
    ticks = 0

    def tick() -> None:
        nonlocal ticks
        ticks += 1
        if ticks == 2:
            row = metric_row(
                10, at=time.time(), loss=3.25, rows_per_s=12.5, tokens_per_s=4321.0, mfu=0.417, eta_s=3600.0,
                memory_bytes=3 * 2**30,
            )  # fmt: skip
            service.store.set_latest(job, row)
        if ticks == 4:
            service.append(job, *END)

    with Longhaul(service.url, service.settings.api_key) as api:
        console = Console(file=screen, force_terminal=True, width=140, color_system=None)
        ended = watch(api, job, console=console, tick=tick)
    assert ended["status"] == "succeeded"
    shown = screen.getvalue()
    assert f"step 0/20 · {NEEDED}" in shown, "until there are figures"
    assert "step 10/20 · 1 h left · training loss 3.2500 · 12.5 rows/s · 3.0 GiB · MFU 41.7 % · 4,321 tokens/s" in shown
    assert "━" in screen.getvalue()


@pytest.mark.parametrize("module", ["requests", "rich", "longhaul.api"])
def test_ctrl_c_while_it_is_still_imported_is_quiet(module: str) -> None:
    code = f"""
import sys
class CtrlC:
    def find_spec(self, name, *_):
        if name == {module!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, CtrlC())
from longhaul.main import main
sys.exit(main(["list"]))
"""
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (130, "")
