"""New jobs: submit, plan, clone."""

from __future__ import annotations

import argparse
import uuid
from functools import partial
from pathlib import Path

from longhaul.answers import JobDict, JsonObject
from longhaul.api import ApiError, Longhaul
from longhaul.bars import bar
from longhaul.commands.command import Call, Commands, ending, print_json
from longhaul.commands.following import watch_to_end
from longhaul.jobfile import BadInput, apply_changes, read_job
from longhaul.plan import dry_run, print_plan, write_picture
from longhaul.rows import at_the_service
from longhaul.tables import print_job


def add(commands: Commands) -> None:
    """submit, plan, clone."""
    submit = commands.add(
        "submit", _submit, "submit a job file (.json) or a file of rows (.jsonl, .csv, …)", shown="FILE"
    )
    _file(submit, "training.epochs=3")
    _new(submit)
    plan = commands.add("plan", _plan, "predict memory, time and disk of a job; trains nothing", shown="FILE")
    _file(plan, "memory.budget=24")
    plan.add_argument("--png", type=Path, metavar="FILE", help="write a picture of the memory plan")
    clone = commands.add("clone", _clone, "submit the specification of a job again, with changes", shown="ID")
    clone.add_argument("id", metavar="ID")
    clone.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a key; =null resets it")
    clone.add_argument("--resume", action="store_true", help="start at the newest checkpoint of that job")
    _new(clone)


def _file(parser: argparse.ArgumentParser, example: str) -> None:
    parser.add_argument("file", metavar="FILE", help="a job file (.json), or rows to train on with the defaults")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=f"e.g. {example}")
    parser.add_argument("--upload", action="store_true", help="upload the rows even if they are in the data directory")


def _new(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--watch", action="store_true", help="follow the job to its end")
    parser.add_argument("--dry-run", action="store_true", help="check only, do not train")
    parser.add_argument("--idempotency-key", metavar="KEY", help="the same key and job, sent twice, create one job")


def _submit(call: Call) -> int:
    with call.connect() as api:
        job = _read(call, api)
        made = api.submit(job, idempotency_key=call.given.idempotency_key, dry_run=call.given.dry_run)
        return _made(call, api, made)


def _clone(call: Call) -> int:
    given = call.given
    with call.connect() as api:
        changes = apply_changes({"resume_from": given.id} if given.resume else {}, given.set)
        made = api.clone(given.id, changes, idempotency_key=given.idempotency_key, dry_run=given.dry_run)
        return _made(call, api, made)


def _made(call: Call, api: Longhaul, job: JobDict) -> int:
    if call.given.watch:
        return watch_to_end(call, api, job["id"])

    def people() -> None:
        call.say(f"{job['id']} is {job['status']}")
        if job["waiting_reason"]:
            call.say(f"it will wait: {job['waiting_reason']}", "yellow")
        call.say(f"follow it with: longhaul watch {job['id']}", "dim")

    return call.answer(job, people)


def _plan(call: Call) -> int:
    with call.connect() as api:
        ended, plan = dry_run(api, _read(call, api), call.errors)
        if plan is not None and call.given.png is not None:
            write_picture(api, ended["id"], call.given.png)
    if call.given.json:
        shown = None if plan is None else plan.model_dump()
        print_json(
            {
                "job": ended["id"],
                "status": ended["status"],
                "error": ended["error"],
                "plan": shown,
                "gpus": ended["gpus"],
            }
        )
    elif plan is None:
        print_job(ended, call.console)
    else:
        print_plan(plan, ended, call.console)
    return ending(ended)


def _read(call: Call, api: Longhaul) -> JsonObject:
    """The job to send; its rows are uploaded where that is needed."""
    data = Path(call.environment.get("LONGHAUL_DATA") or "data")

    def rows(file: str) -> str:
        try:
            with bar(call.errors) as report:
                return at_the_service(
                    api,
                    file,
                    data=data,
                    upload=call.given.upload,
                    before_upload=partial(_check_all_but_rows, call, api),
                    say=call.note,
                    on_progress=partial(report, file),
                )
        except OSError as error:
            raise BadInput(f"{file}: {error.strerror}") from None

    return read_job(call.given.file, call.given.set, rows=rows)


def _check_all_but_rows(call: Call, api: Longhaul) -> None:
    """Raise what is wrong with the job besides its rows. No job is made: the data set that it names is nowhere."""
    nowhere = f"dataset:{uuid.uuid4().hex}.jsonl"
    job = read_job(call.given.file, [*call.given.set, f"data.train={nowhere}"], rows=lambda _: nowhere)
    try:
        api.submit(job, dry_run=True)
    except ApiError as error:
        if error.param != "data.train":
            raise
