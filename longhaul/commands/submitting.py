"""New jobs: submit, plan, preview, clone, keys."""

from __future__ import annotations

import argparse
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path

from jobs.answers import Job, JsonObject
from jobs.preview import DataPreview
from longhaul.api import ApiError, Longhaul
from longhaul.commands.command import BAD_INPUT, LEFT, OK, Call, Commands, print_json, write_file
from longhaul.commands.following import watch_to_end
from longhaul.figures import bar
from longhaul.jobfile import BadInput, apply_changes, at_the_service, read_job
from longhaul.keys import keys_below, print_keys
from longhaul.plan import DryRun, can_check, dry_run, fits, print_fits, print_plan, too_few
from longhaul.preview import print_preview

NOT_SUBMITTED = "the check is cancelled, and nothing was submitted"


def add(commands: Commands) -> None:
    """submit, plan, preview, clone, keys."""
    submit = commands.add(
        "submit", _submit, "submit a job file (.json) or a file of rows (.jsonl, .csv, …)", shown="FILE"
    )
    _file(submit, "training.epochs=3")
    _new(submit)
    plan = commands.add("plan", _plan, "predict memory, time and disk of a job; trains nothing", shown="FILE")
    _file(plan, "memory.budget=24")
    plan.add_argument("--png", type=Path, metavar="FILE", help="write a picture of the memory plan")
    plan.add_argument("--hours", type=_hours, metavar="N", help="say what fits into so many hours, and what would")
    preview = commands.add("preview", _preview, "show three rows of a job as the model gets them", shown="ID")
    preview.add_argument("id", metavar="ID")
    clone = commands.add("clone", _clone, "submit the specification of a job again, with changes", shown="ID")
    clone.add_argument("id", metavar="ID")
    clone.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a key; =null resets it")
    clone.add_argument("--resume", action="store_true", help="start at the newest checkpoint of that job")
    _new(clone)
    keys = commands.add("keys", _keys, "list the keys of a job file: values, default, meaning", shown="[PREFIX]")
    keys.add_argument("prefix", nargs="?", default="", metavar="PREFIX", help="e.g. training, or training.epochs")
    keys.add_argument("--sweep", action="store_true", dest="of_a_sweep", help="of a sweep file instead")


def _hours(given: str) -> float:
    try:
        hours = float(given)
    except ValueError:
        hours = 0.0
    if not 0 < hours <= 10_000:
        raise argparse.ArgumentTypeError(f"a number of hours, such as 40, and not {given!r}")
    return hours


def _file(parser: argparse.ArgumentParser, example: str) -> None:
    parser.add_argument("file", metavar="FILE", help="a job file (.json), or rows to train on with the defaults")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=f"e.g. {example}")
    parser.add_argument("--on", metavar="ENGINE", help="train on this engine, such as a Slurm cluster")
    parser.add_argument("--upload", action="store_true", help="upload the rows even if they are in the data directory")


def _new(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--watch", action="store_true", help="follow the job to its end")
    parser.add_argument("--dry-run", action="store_true", help="check only, do not train")
    unchecked(parser)
    parser.add_argument("--idempotency-key", metavar="KEY", help="the same key and job, sent twice, create one job")


def unchecked(parser: argparse.ArgumentParser, what: str = "the job is checked in its turn") -> None:
    """--no-check."""
    parser.add_argument("--no-check", action="store_true", help=f"submit at once; {what}")


def _submit(call: Call) -> int:
    with call.connect() as api:
        return _new_job(call, api, partial(api.submit, _read(call, api)))


def _clone(call: Call) -> int:
    given = call.given
    with call.connect() as api:
        changes = apply_changes({"resume_from": given.id} if given.resume else {}, given.set)
        return _new_job(call, api, partial(api.clone, given.id, changes))


def _new_job(call: Call, api: Longhaul, make: Callable[..., Job]) -> int:
    """Check the job by a dry run, show some of its rows, and make it."""
    given = call.given
    try:
        found = check_first(call, api, make, wait=given.dry_run)
    except KeyboardInterrupt:
        call.left(f"{NOT_SUBMITTED} (--no-check submits a job at once; it is then checked in its turn)")
        return LEFT
    if found is not None:
        if found.preview is None:
            return rejected(call, found.job)
        if not given.json:
            print_preview(found.preview, call.console)
            for few in too_few(found.plan, found.job) if found.plan else []:
                call.say(few, "yellow")
        if given.dry_run:
            return call.answer(found.job, lambda: call.say("the job can be trained; nothing was submitted"))
        with suppress(ApiError):  # it is in no list in any case
            api.delete(found.job["id"])
    try:
        job = make(idempotency_key=given.idempotency_key)
    except KeyboardInterrupt:  # the service may have it, and its answer is not here yet
        call.left("the job may have been submitted: longhaul list shows it")
        return LEFT
    if given.watch:
        return watch_to_end(call, api, job["id"])

    def people() -> None:
        call.say(f"{job['id']} is {job['status']}")
        if job["waiting_reason"]:
            call.say(f"it will wait: {job['waiting_reason']}", "yellow")
        call.say(f"follow it with: longhaul watch {job['id']}", "dim")

    return call.answer(job, people)


def check_first(call: Call, api: Longhaul, make: Callable[..., Job], *, wait: bool = False) -> DryRun | None:
    """A dry run of a new job; None: --no-check, or no worker is there, which is said. `wait`: for one.

    KeyboardInterrupt cancels it.
    """
    if not wait and call.given.no_check:
        return None
    if wait or can_check(api):
        return dry_run(api, make, call.errors)
    call.note("no worker is there to check the job: it is submitted unchecked")
    return None


def rejected(call: Call, job: Job) -> int:
    """Say why *check* rejected a dry run. Returns BAD_INPUT."""
    error = job["error"]
    if call.given.json:
        print_json(job)
        return BAD_INPUT
    raise BadInput(error["message"] if error else f"the check is {job['status']}", hint=error and error.get("hint"))


def _plan(call: Call) -> int:
    hours: float | None = call.given.hours
    with call.connect() as api:
        asked = _read(call, api)
        if hours is not None:  # to compare with: all that the job would do without a limit of its own
            asked = apply_changes(asked, ["training.max_hours=null"])
        try:
            found = dry_run(api, partial(api.submit, asked), call.errors)
            fitting = [] if hours is None or found.plan is None else list(fits(api, asked, found, hours, call.errors))
        except KeyboardInterrupt:
            call.left(NOT_SUBMITTED)
            return LEFT
        if found.plan is not None and call.given.png is not None:
            write_file(api.plan_picture(found.job["id"]), call.given.png)
    job = found.job
    if call.given.json:
        print_json(
            {
                "job": job["id"],
                "status": job["status"],
                "error": job["error"],
                "plan": found.plan and found.plan.model_dump(),
                "preview": found.preview and found.preview.model_dump(),
                "gpus": job["gpus"],
                **({"hours": hours, "fits": [asdict(each) for each in fitting]} if hours is not None else {}),
            }
        )
    elif found.plan is None or found.preview is None:
        return rejected(call, job)
    else:
        print_plan(found.plan, found.preview, job, call.console)
        if hours is not None:
            print_fits(fitting, hours, call.console)
    return OK if job["status"] == "validated" else BAD_INPUT


def _keys(call: Call) -> int:
    found = keys_below(call.given.prefix, sweep=call.given.of_a_sweep)
    return call.answer([asdict(key) for key in found], lambda: print_keys(found, call.console))


def _preview(call: Call) -> int:
    with call.connect() as api:
        found = api.preview(call.given.id)
    return call.answer(found, lambda: print_preview(DataPreview.model_validate(found), call.console))


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

    return read_job(call.given.file, _changes(call), rows=rows)


def _changes(call: Call) -> list[str]:
    """What `--set` and `--on` change of the job."""
    return [*call.given.set, *([] if call.given.on is None else [f"resources.engine={call.given.on}"])]


def _check_all_but_rows(call: Call, api: Longhaul) -> None:
    """Raise what is wrong with the job besides its rows. No job is made: the data set that it names is nowhere."""
    nowhere = f"dataset:{uuid.uuid4().hex}.jsonl"
    job = read_job(call.given.file, [*_changes(call), f"data.train={nowhere}"], rows=lambda _: nowhere)
    try:
        api.submit(job, dry_run=True)
    except ApiError as error:
        if error.param != "data.train":
            raise
