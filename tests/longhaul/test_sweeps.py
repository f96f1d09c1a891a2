"""`longhaul sweep`: what is sent, what is refused before it is, and what people see of trials."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from jobs.events import AttemptEnded, JobPaused
from jobs.redis.connection import Tickets, connect
from jobs.redis.store import make_id, make_job, submitted_of
from jobs.sweeps.directory import SweepDir, find
from jobs.sweeps.events import SweepEnded, TrialEnded, TrialStarted
from jobs.trainer_facts import Fault
from longhaul import ApiError, Longhaul, Unreachable
from longhaul.main import main
from longhaul.sweep_tables import print_sweep, print_sweeps, short_names, watch_sweep
from tests.longhaul.conftest import Run
from tests.service.running import Service
from tests.service.seeded import seed_sweep, start_trial
from tests.support.samples import RUNNING
from tests.support.stack import ROOT

SWEEP: dict[str, Any] = {
    "name": "tickets",
    "job": {"model": "builtin:t5-tiny", "data": {"train": "rows.jsonl"}},
    "space": {"training.learning_rate": {"range": [1e-5, 1e-3], "log": True}, "training.batch_size": [16, 32]},
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits a second for the next look."""
    monkeypatch.setattr("longhaul.sweep_tables.POLL_S", 0.02)


def written(name: str = "sweep.json", **more: Any) -> str:
    """A sweep file."""
    Path(name).write_text(json.dumps({**SWEEP, **more}))
    return name


def directory(service: Service, sweep: str) -> SweepDir:
    """Of an existing sweep."""
    return find(service.settings.runs, sweep)


def test_a_file_is_submitted_with_changes(run: Run, service: Service) -> None:
    shown = run("sweep", written())
    sweep = re.match(r"(sweep-\w+) is running: 20 trials at most\n", shown)
    assert sweep and f"follow it with: longhaul sweep watch {sweep[1]}" in shown
    changes = (
        "max_trials=3", "name=2024", "job.training.epochs=1", "job.name=7", "job.method=full",
        "space.training.batch_size=[8]", "space.training.learning_rate.log=false", "space.training.seed.int=[1,4]",
    )  # fmt: skip
    made = run("sweep", "sweep.json", *(word for change in changes for word in ("--set", change)), "--json")
    asked = made["specification"]
    assert (made["name"], made["max_trials"]) == ("2024", 3)
    assert (asked["job"]["training"], asked["job"]["name"], asked["job"]["method"]) == ({"epochs": 1}, "7", "full")
    assert asked["space"]["training.batch_size"]["choice"] == [8]
    assert asked["space"]["training.learning_rate"]["log"] is False
    assert asked["space"]["training.seed"]["int"] == [1, 4]
    first = run("sweep", "--idempotency-key", "once", "sweep.json", "--json")
    again = run("sweep", "submit", "sweep.json", "--idempotency-key", "once", "--json")
    assert first["id"] == again["id"]
    assert "asha with 20 trials" in run("sweep", "sweep.json", "--set", "pruning=asha")


def test_what_is_no_sweep_is_refused_here(run: Run) -> None:
    written()
    Path("rows.jsonl").write_text('{"input": "a", "target": "b"}\n')
    Path("job.json").write_text(json.dumps(SWEEP["job"]))
    Path("list.json").write_text("3")
    Path("broken.json").write_text('{"job": ')
    for file, said in [
        ("rows.jsonl", "rows.jsonl holds rows, and no sweep"),
        ("job.json", "submit it with: longhaul submit job.json"),
        ("list.json", 'a sweep is a JSON object; the minimum is {"job": {…}, "space": {…}}'),
        ("broken.json", "broken.json is not JSON: Expecting value at line 1, column 9"),
        ("none.json", "none.json: No such file or directory; give a sweep file (.json)\n"),
    ]:
        assert said in run("sweep", file, code=2)
    for change, said in [
        ("max_trials", "write key.dotted=value, for example --set max_trials=30"),
        ("training.epochs=3", "the keys of the job begin with job."),
        ("space.training.batch_size.log=true", "training.batch_size is [16, 32] and has no keys"),
        ("space.training.batch=[1]", "space.training.batch: unknown key"),
        ("trials=3", "`longhaul keys --sweep`"),
    ]:
        assert said in run("sweep", "sweep.json", "--set", change, code=2)
    assert "submit it with: longhaul sweep sweep.json" in run("submit", "sweep.json", code=2)
    assert run("sweep", "list") == "no sweeps yet: longhaul sweep FILE\n"


def test_a_mistyped_word_is_no_file(capsys: pytest.CaptureFixture[str], run: Run) -> None:
    for words in (["sweep", "shwo", "last"], ["sweep", "--help"], ["sweep"]):
        with pytest.raises(SystemExit):
            run(*words)
    shown = capsys.readouterr()
    assert "did you mean show?" in shown.err and "the following arguments are required: FILE|submit" in shown.err
    assert "usage: longhaul sweep [-h]" in shown.out


def test_a_sweep_is_shown_with_its_trials_the_best_first(run: Run, service: Service) -> None:
    sweep = seed_sweep(service, ended=False)
    directory(service, sweep).append([TrialEnded(trial=3, outcome="succeeded", value=1.25, values=[1.0, 1.5])])
    shown = run("sweep", "show", sweep)
    lines = shown.splitlines()
    rows = [line.split() for line in lines[1 + next(at for at, line in enumerate(lines) if "settings" in line) :]]
    assert [row[:2] for row in rows] == [["3", "1.2500"], ["0", "1.5000"], ["2", "2.5000"], ["1", "–"]]
    assert "failed: out_of_memory  no room" in shown and "worse than the median of 5 others at evaluation 1" in shown
    assert "4 of 20: 2 succeeded, 1 pruned, 1 failed" in shown and "loss, less is better" in shown
    assert "trial 3: loss 1.2500 (mean of 1.0000, 1.5000), learning_rate 0.0004, batch_size 16" in shown
    assert f"job-{sweep[6:]}-3" in shown
    found = run("sweep", "show", sweep, "--json")
    assert (found["best"]["number"], len(found["all_trials"])) == (3, 4)
    heads, *table = csv.reader(io.StringIO(run("sweep", "show", sweep, "--csv")))
    assert heads[-2:] == ["training.learning_rate", "training.batch_size"] and len(table) == 4
    assert f"{sweep}  running    4/20  loss 1.2500" in run("sweep", "list")
    assert [each["id"] for each in run("sweep", "list", "--json")] == [sweep]
    assert "there is no sweep sweep-unknown" in run("sweep", "show", "sweep-unknown", code=2)


def test_a_paused_trial_is_shown_with_its_cause_and_how_it_continues(
    run: Run, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = seed_sweep(service, ended=False)
    job = start_trial(service, sweep, 4)
    full = Fault(code="disk_full", message="the disk is full", hint="make room")
    service.append(job, *RUNNING, AttemptEnded(reason="disk_full", step=5), JobPaused(error=full))
    why = f"the disk is full; make room; then `longhaul resume {job}`"
    shown = run("sweep", "show", sweep)
    assert "1 running, 1 paused, 1 failed" in shown and f"no trial starts now: {why}" in " ".join(shown.split())
    row = next(line for line in shown.splitlines() if line.split()[:2] == ["4", "–"])
    assert " paused " in row and "the disk is full" in row
    heads, *table = csv.reader(io.StringIO(run("sweep", "show", sweep, "--csv")))
    assert table[4][heads.index("status")] == "paused" and table[4][heads.index("cause")] == why

    def ends(_: float) -> None:
        directory(service, sweep).append([SweepEnded(reason="done", best=0)])

    monkeypatch.setattr("longhaul.sweep_tables.time.sleep", ends)  # between two looks
    shown = run("sweep", "watch", sweep)
    assert shown.count(f"trial 4 paused: learning_rate 0.0001, batch_size 16 ({why})") == 1


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_narrow_terminal_shows_what_matters_whole(service: Service, width: int) -> None:
    sweep = seed_sweep(service, ended=True)
    screen = io.StringIO()
    console = Console(file=screen, width=width)
    with Longhaul(service.url, service.settings.api_key) as api:
        print_sweep(api.sweep(sweep), api.sweep_trials(sweep), console)
        print_sweeps(list(api.sweeps()), console)
    shown = screen.getvalue()
    assert max(map(len, shown.splitlines())) <= width and "…" not in shown
    assert sweep in shown and "1.5000" in shown and "learning_rate" in shown and "pruned" in shown


def test_keys_that_end_alike_are_written_whole() -> None:
    assert short_names(["training.seed", "data.seed", "method.rank"]) == {
        "training.seed": "training.seed", "data.seed": "data.seed", "method.rank": "rank",
    }  # fmt: skip


def test_who_watches_reads_each_trial_once_and_the_best_at_the_end(
    run: Run, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = seed_sweep(service, ended=False)
    service.run(f"job-{sweep[6:]}-3").model.mkdir(parents=True)

    def proceeds() -> Iterator[None]:
        directory(service, sweep).append([TrialEnded(trial=3, outcome="succeeded", value=1.0, values=[1.0], seconds=5)])
        yield
        directory(service, sweep).append([SweepEnded(reason="done", best=3)])
        yield

    steps = proceeds()
    monkeypatch.setattr("longhaul.sweep_tables.time.sleep", lambda _: next(steps))  # between two looks
    shown = run("sweep", "watch", sweep[:-1])
    for number in range(4):
        assert len(re.findall(rf"^\S+  trial {number} \w+", shown, re.MULTILINE)) == 1
    assert "trial 1 failed: out_of_memory, 1 s: learning_rate 0.0002, batch_size 16 (no room)" in shown
    assert "trial 3 succeeded, loss 1.0000, 5 s: learning_rate 0.0004, batch_size 16 · best: trial 3, 1.0000" in shown
    assert f"longhaul sweep show {sweep}" in shown and f"longhaul download job-{sweep[6:]}-3" in shown
    *trials, last = map(json.loads, json_lines(run, "sweep", "watch", sweep))
    assert [each["number"] for each in trials] == [0, 1, 2, 3] and last["status"] == "succeeded"


def test_of_a_best_trial_whose_job_was_deleted_its_model_is_not_offered(run: Run, service: Service) -> None:
    sweep = seed_sweep(service, ended=True)
    job = f"job-{sweep[6:]}-0"
    service.run(job).model.rmdir()
    shown = " ".join(run("sweep", "watch", sweep).split())
    assert f"{job} (its model is gone)" in shown and f"longhaul download {job}" not in shown
    assert f"train it again with: longhaul sweep repeat {sweep}" in shown


def json_lines(run: Run, *words: str) -> list[str]:
    """What a command prints with --json, a line each."""
    return str(run(*words, "--js")).splitlines()  # the fixture parses what --json prints as one


def test_the_exit_code_says_whether_there_is_a_best_trial(run: Run, service: Service) -> None:
    sweep = run("sweep", written(), "--json")["id"]
    fault = Fault(code="bad_data", message="no row can be used", hint="look at the rows")
    started = TrialStarted(
        trial=0, settings={"training.batch_size": 16, "training.learning_rate": 1e-4}, jobs=["job-a"]
    )
    failed = TrialEnded(trial=0, outcome="failed", error=fault)
    directory(service, sweep).append([started, failed, SweepEnded(reason="failures", error=fault)])
    shown = run("sweep", "watch", sweep, code=1)
    assert "no row can be used [bad_data]" in shown and "look at the rows" in shown
    assert "failed (too many trials in a row failed alike)" in shown and "longhaul download" not in shown
    without = run("sweep", written(), "--json")["id"]
    directory(service, without).append([SweepEnded(reason="done")])
    run("sweep", "watch", without, code=1)


def test_who_leaves_is_told_how_to_come_back(
    run: Run, service: Service, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("longhaul.sweep_tables.time.sleep", interrupt)
    shown = run("sweep", written(), "--watch", "--no-check", code=130)
    [sweep] = service.get("/sweeps").json()["data"]
    back = f"the sweep continues without you; watch it again with: longhaul sweep watch {sweep['id']}\n"
    assert shown.endswith(back) and sweep["status"] == "running"
    assert main(["sweep", "watch", sweep["id"], "--json"]) == 130
    answer = capsys.readouterr()
    assert answer.err.endswith(back) and answer.out == ""


def test_an_outage_is_said_once_and_waited_for(run: Run, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = seed_sweep(service, ended=False)
    real, away = Longhaul.sweep, [Unreachable("x"), ApiError("y", status=503, code="store_unavailable")]
    asked: list[str] = []

    def flaky(api: Longhaul, which: str) -> Any:
        asked.append(which)
        if len(asked) > 1 and away:
            raise away.pop()
        if not away:
            directory(service, sweep).append(lambda record: [] if record.ended else [SweepEnded(reason="done")])
        return real(api, which)

    monkeypatch.setattr(Longhaul, "sweep", flaky)
    monkeypatch.setattr("longhaul.connection.PAUSE_S", 0.01)
    shown = run("sweep", "watch", sweep)
    assert shown.count("trying again") == 1 and "succeeded" in shown


def test_a_terminal_has_a_line_that_stands(service: Service) -> None:
    sweep = seed_sweep(service, ended=True)
    screen = io.StringIO()
    with Longhaul(service.url, service.settings.api_key) as api:
        ended = watch_sweep(api, sweep, Console(file=screen, width=60, force_terminal=True, color_system=None))
    assert ended["status"] == "succeeded"
    assert "succeeded · 4 of 20: 1 succeeded, 1 pruned, 1 failed," in screen.getvalue()
    assert max(len(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", line)) for line in screen.getvalue().splitlines()) <= 120


def test_a_sweep_is_cancelled_repeated_and_deleted(run: Run, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = seed_sweep(service, ended=False)
    assert run("sweep", "cancel", sweep) == f"{sweep} is running, cancel requested\n"
    assert "running (cancel requested)" in run("sweep", "show", sweep)
    for options in ([], ["--yes"]):
        assert f"sweep {sweep} still runs: cancel it first" in run("sweep", "delete", sweep, *options, code=2)
    again = run("sweep", "repeat", sweep, "--json")
    assert (again["max_trials"], again["parameters"]) == (5, ["training.seed"])
    other = run("sweep", "repeat", sweep, "--trial", "2", "--seeds", "3", "--json")
    assert other["max_trials"] == 3
    assert other["specification"]["job"]["training"]["learning_rate"] == pytest.approx(3e-4)
    assert "has no trial 9" in run("sweep", "repeat", sweep, "--trial", "9", code=2)
    directory(service, sweep).append([TrialEnded(trial=3, outcome="cancelled"), SweepEnded(reason="cancelled")])
    assert "add --yes" in run("sweep", "delete", sweep, code=2)
    assert f"{sweep} is deleted" in run("sweep", "delete", sweep, "--yes")
    assert {each["id"] for each in run("sweep", "list", "--json")} == {again["id"], other["id"]}


def test_a_sweep_is_meant_by_the_beginning_of_its_id_by_its_name_or_as_the_last(run: Run, service: Service) -> None:
    assert "there is no sweep yet" in run("sweep", "show", "last", code=2)
    first = run("sweep", written(), "--json")["id"]
    second = run("sweep", written("other.json"), "--set", "name=other", "--json")["id"]
    assert run("sweep", "show", "last", "--json")["id"] == run("sweep", "show", "other", "--json")["id"] == second
    assert run("sweep", "show", "tickets", "--json")["id"] == first
    assert "there is no sweep tickest\n  hint: did you mean tickets?" in run("sweep", "show", "tickest", code=2)
    again = run("sweep", written(), "--json")["id"]
    assert f"2 sweeps are called tickets; the newest is meant, {again}" in run("sweep", "show", "tickets")
    for command in ("cancel", "delete"):
        assert f"tickets can be {again} (tickets, running), {first}" in run("sweep", command, "tickets", code=2)
    directory(service, again).append([SweepEnded(reason="cancelled")])
    run("sweep", "delete", again, "-y")
    ambiguous = run("sweep", "cancel", "sweep-", code=2)
    assert f"sweep- can be {second} (other, running), {first} (tickets, running): write more of the id" in ambiguous


@pytest.mark.parametrize("command", [["show"], ["watch"], ["cancel"], ["delete", "-y"]])
def test_who_asks_the_jobs_for_a_sweep_is_told_where_it_is(run: Run, service: Service, command: list[str]) -> None:
    sweep = seed_sweep(service, ended=False)
    for named in (sweep, service.get(f"/sweeps/{sweep}").json()["name"]):
        shown = run(*command, named, code=2)
        assert f"{named} is a sweep" in shown and f"hint: longhaul sweep {command[0]} {named}\n" in shown


@pytest.mark.parametrize(
    ("words", "left_at", "said"),
    [
        (["sweep", "sweep.json"], "submit_sweep", "the sweep may have been submitted: longhaul sweep list shows it"),
        (
            ["sweep", "repeat", "last"],
            "repeat_trial",
            "the sweep may have been submitted: longhaul sweep list shows it",
        ),
        (["submit", "job.json"], "submit", "the job may have been submitted: longhaul list shows it"),
        (
            ["submit", "job.json"],
            "events",
            "the check is cancelled, and nothing was submitted (--no-check submits a job",
        ),
        (
            ["sweep", "sweep.json"],
            "events",
            "the check is cancelled, and nothing was submitted (--no-check submits a s",
        ),
        (["plan", "job.json"], "events", "the check is cancelled, and nothing was submitted\n"),
    ],
)
def test_who_leaves_before_the_answer_is_told_what_there_is(
    run: Run, service: Service, monkeypatch: pytest.MonkeyPatch, words: list[str], left_at: str, said: str
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    written()
    Path("job.json").write_text(json.dumps(SWEEP["job"]))
    seed_sweep(service, ended=False)
    monkeypatch.setattr(Longhaul, left_at, interrupted)
    monkeypatch.setattr("longhaul.commands.submitting.can_check", lambda _: left_at == "events")
    assert said in run(*words, code=130)
    assert all(job["status"] == "cancelled" for job in service.get("/jobs?dry_runs=true").json()["data"])


def test_lists_of_jobs_have_trials_when_they_are_asked_for(run: Run, service: Service) -> None:
    assert run("list") == "no jobs yet (--trials shows those of sweeps): longhaul submit FILE\n"
    assert run("list", "--trials") == "no jobs yet: longhaul submit FILE\n"
    job, sweep = service.submit(), run("sweep", written(), "--json")["id"]
    spec = directory(service, sweep).spec().trial({"training.batch_size": 16, "training.learning_rate": 1e-4})
    tickets = Tickets(connect(service.settings.redis_url))
    trials = [make_id(), make_id()]
    for trial in trials:
        make_job(service.settings.runs, service.store, tickets, trial, spec, submitted_of(spec, sweep=sweep))

    def listed(*options: str) -> set[str]:
        return {each["id"] for each in run("list", "--json", *options)["data"]}

    assert listed() == {job}
    assert listed("--trials") == {job, *trials}
    assert listed("--sweep", sweep) == listed("--sweep", "tickets") == set(trials)
    assert f"longhaul list --sweep={sweep} --limit=1 --after" in run("list", "--sweep", "last", "--limit", "1")
    assert "longhaul list --trials --limit=1 --after" in run("list", "--trials", "--limit", "1")
    assert f"trial of       {sweep}" in run("show", trials[0])


def test_every_key_of_a_sweep_is_listed(run: Run) -> None:
    known = {key["name"]: key for key in run("keys", "--sweep", "--json")}
    assert known["max_failures"]["values"] == "integer, 1 to 10,000"
    assert known["space.KEY.choice"]["values"] == "list of anything or null"
    page = (ROOT / "docs" / "reference" / "sweep.md").read_text()
    listed = set(re.findall(r"^\| `([a-z_]+)` \|", page, re.MULTILINE))
    assert listed == {name.removeprefix("space.KEY.") for name in known}
    assert "did you mean sampler?" in run("keys", "--sweep", "samplr", code=2)
    assert "no key of a sweep is called xyzzy" in run("keys", "--sweep", "xyzzy", code=2)


def test_the_example_and_the_one_of_the_page_are_taken(run: Run, service: Service) -> None:
    example = ROOT / "examples" / "sweep.json"
    assert run("sweep", str(example), "--json")["metric"] == "macro_f1"
    [of_the_page] = re.findall(r"^```json\n(.*?)^```", (ROOT / "docs" / "sweeps.md").read_text(), re.M | re.S)
    Path("page.json").write_text(of_the_page)
    assert run("sweep", "page.json", "--json")["parameters"] == list(json.loads(of_the_page)["space"])


def test_the_library_has_it_all(service: Service) -> None:
    with Longhaul(service.url, service.settings.api_key) as api:
        made = api.submit_sweep(SWEEP, idempotency_key="once")
        assert api.submit_sweep(SWEEP, idempotency_key="once")["id"] == made["id"]
        assert [each["id"] for each in api.sweeps()] == [made["id"]]
        assert api.sweep(made["id"])["trials"] == {} and api.sweep_trials(made["id"]) == []
        assert api.sweep_csv(made["id"]).startswith("trial,status,loss,")
        with pytest.raises(ApiError) as none:
            api.repeat_trial(made["id"])
        assert none.value.status == 409
        assert api.cancel_sweep(made["id"])["cancel_requested"]
        directory(service, made["id"]).append([SweepEnded(reason="cancelled")])
        assert api.delete_sweep(made["id"])["deleted"]
        ended = seed_sweep(service, ended=True)
        assert api.repeat_trial(ended, trial=1, seeds=2)["max_trials"] == 2
        assert api.list(sweep=ended)["data"] == api.list(trials=True)["data"] == []
