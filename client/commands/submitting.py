"""New jobs: submit, plan, clone."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from client.api import Longhaul
from client.bars import bar
from client.commands.command import Call, Commands, ending, print_json
from client.commands.following import watched
from client.jobfile import BadInput, changed, read_job
from client.plan import dry_run, print_plan, write_picture
from client.rows import at_the_service
from client.tables import print_job


def add(commands: Commands) -> None:
    """submit, plan, clone."""
    submit = commands.add(
        "submit", _submit, "submit a job file (.json), or rows (.jsonl, .csv, …) as they are", shown="FILE"
    )
    _file(submit, "schedule.epochs=3")
    _new(submit)
    plan = commands.add("plan", _plan, "what a job would need of memory, time and disk; trains nothing", shown="FILE")
    _file(plan, "memory.budget=24")
    plan.add_argument("--png", type=Path, metavar="FILE", help="write a picture of it")
    clone = commands.add("clone", _clone, "submit a job's specification again, with changes", shown="ID")
    clone.add_argument("id", metavar="ID")
    clone.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change it; =null removes it")
    clone.add_argument("--resume", action="store_true", help="begin with that job's newest checkpoint")
    _new(clone)


def _file(parser: argparse.ArgumentParser, example: str) -> None:
    parser.add_argument("file", metavar="FILE", help="a job (.json), or rows: then all else is as by default")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=f"e.g. {example}")
    parser.add_argument("--upload", action="store_true", help="send a file of rows even if it is in the data directory")


def _new(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--watch", action="store_true", help="stay and follow it")
    parser.add_argument("--dry-run", action="store_true", help="check only, do not train")
    parser.add_argument("--idempotency-key", metavar="KEY", help="sending it twice with one key makes one job")


def _submit(call: Call) -> int:
    with call.connect() as api:
        job = _read(call, api)
        made = api.submit(job, idempotency_key=call.given.idempotency_key, dry_run=call.given.dry_run)
        return _made(call, api, made)


def _clone(call: Call) -> int:
    given = call.given
    changes = changed({"resume_from": given.id} if given.resume else {}, given.set)
    with call.connect() as api:
        made = api.clone(given.id, changes, idempotency_key=given.idempotency_key, dry_run=given.dry_run)
        return _made(call, api, made)


def _made(call: Call, api: Longhaul, job: dict[str, Any]) -> int:
    if call.given.watch:
        return watched(call, api, job["id"])

    def people() -> None:
        call.say(f"{job['id']} is {job['status']}")
        call.say(f"follow it with: longhaul watch {job['id']}", "dim")

    return call.answer(job, people)


def _plan(call: Call) -> int:
    with call.connect() as api:
        ended, plan = dry_run(api, _read(call, api), call.errors)
        if plan is not None and call.given.png is not None:
            write_picture(api, ended["id"], call.given.png)
    if call.given.json:
        shown = None if plan is None else plan.model_dump()
        print_json({"job": ended["id"], "status": ended["status"], "error": ended["error"], "plan": shown})
    elif plan is None:
        print_job(ended, call.console)
    else:
        print_plan(plan, call.console)
    return ending(ended)


def _read(call: Call, api: Longhaul) -> dict[str, Any]:
    """The job to send; its rows are uploaded where that is needed."""
    data = Path(call.environment.get("LONGHAUL_DATA") or "data")

    def rows(file: str) -> str:
        try:
            with bar(call.errors) as told:
                return at_the_service(
                    api, file, data=data, upload=call.given.upload, say=call.note, on_progress=partial(told, file)
                )
        except OSError as error:
            raise BadInput(f"{file}: {error.strerror}") from None

    return read_job(call.given.file, call.given.set, rows=rows)
