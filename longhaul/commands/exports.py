"""The model of a job for other programs, and on the hub."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from jobs.answers import Export, Push
from jobs.export import DTYPES, ExportFormat
from jobs.text.units import format_number
from longhaul.api import Longhaul
from longhaul.commands.command import ACTS, JOB_ENDED_BADLY, Call, Commands, print_json
from longhaul.commands.results import fetched
from longhaul.figures import size
from longhaul.jobfile import BadInput

LOOK_S = 1.0
Work = TypeVar("Work", Export, Push)


def add(commands: Commands) -> None:
    """export, push."""
    formats = [format.value for format in ExportFormat]
    export = commands.add(
        "export",
        _export,
        "write the model for another program, verified by it, and download it",
        shown="ID --to FORMAT",
    )
    export.add_argument("id", metavar="ID")
    export.add_argument("--to", required=True, choices=formats, metavar="FORMAT", help=", ".join(formats))
    of_format = "; ".join(f"{format}: {', '.join(dtypes)}" for format, dtypes in DTYPES.items())
    export.add_argument(
        "--dtype",
        metavar="TYPE",
        help=f"of the weights (default: that of the model): {of_format}; merged: that of the model, float32",
    )
    export.add_argument("--dir", type=Path, metavar="DIR", help="target folder (default: the id of the job)")
    export.add_argument("--no-download", action="store_true", help="leave it on the server")
    export.add_argument("--cancel", action="store_true", help="end the one that waits or is being made")
    push = commands.add("push", _push, "upload the model, with a model card, to the hub", shown="ID ORG/NAME")
    push.set_defaults(**ACTS)
    push.add_argument("id", metavar="ID")
    push.add_argument("repository", metavar="ORG/NAME")
    push.add_argument("--license", metavar="LICENSE", help="of the model, as the hub names it: apache-2.0, mit, other")
    push.add_argument("--public", action="store_true", help="a repository that is made is public (default: private)")
    push.add_argument("--export", choices=formats, metavar="FORMAT", help="upload this export in place of model/")


def _export(call: Call) -> int:
    given = call.given
    with call.connect() as api:
        job = given.id
        if given.cancel:
            api.cancel_export(job, given.to)
            return call.answer({"cancelled": given.to}, lambda: call.say(f"the export to {given.to} is cancelled"))
        asked = api.export(job, given.to, dtype=given.dtype)
        if (old := asked["report"]) is not None:
            call.note(
                f"replaces {asked['path']} (in {old['dtype']}) once it is verified: one export of a format is kept"
            )
        made = _awaited(
            call,
            asked,
            lambda: _made(api, job, given.to),
            f"until it is made the same command follows it, and with --cancel ends it; then: longhaul download {job} "
            f"exports/{given.to}",
        )
        if made["status"] != "done":
            return _failed(call, made, f"export to {given.to}")
        folder = given.dir if given.dir is not None else Path(job)
        if not given.no_download:
            fetched(call, api, str(made["path"]), folder, option="--dir")
    found = made["report"] or {}

    def people() -> None:
        check, all_bytes = found["verification"], sum(each["bytes"] for each in found["files"])
        call.say(
            f"{given.to} ({found['dtype']}), {size(all_bytes)}: {check['runtime']} gives {check['tokens']:,} held-out "
            f"tokens the log-probabilities of the model, up to {format_number(check['difference'], 2)} nats on average "
            f"(limit {check['limit']:g})"
        )
        call.say(f"in {made['path']}/ of the job" if given.no_download else f"in {folder / str(made['path'])}")

    return call.answer(made, people)


def _made(api: Longhaul, job: str, format: str) -> Export:
    """How far it is. Raises BadInput."""
    for each in api.exports(job):
        if each["format"] == format:
            return each
    raise BadInput(f"the export to {format} was cancelled: `longhaul export {job} --to {format}` begins another")


def _push(call: Call) -> int:
    given = call.given
    if not given.license:
        raise BadInput(
            "push needs the licence of the model: add --license apache-2.0 (or mit, cc-by-4.0, other, …); the licence "
            "of the base model may bind you"
        )
    with call.connect() as api:
        job = given.id
        asked = api.push(job, given.repository, license=given.license, public=given.public, export=given.export)
        pushed = _awaited(call, asked, lambda: api.pushed(job), "the same command follows it")
        if pushed["status"] != "done":
            return _failed(call, pushed, f"upload to {given.repository}")
    return call.answer(pushed, lambda: call.say(f"uploaded to {pushed['repository']}"))


def _awaited(call: Call, work: Work, look: Callable[[], Work], later: str) -> Work:
    """What became of it. Each new state is a line beside the answer. `later`: how somebody who leaves finds it."""
    told = ""
    try:
        while work["status"] in ("queued", "running"):
            now = _state(work)
            if now != told:
                call.note(now)
                told = now
            time.sleep(LOOK_S)
            work = look()
    except KeyboardInterrupt:
        call.note(f"the server continues; {later}")
        raise
    return work


def _state(work: Export | Push) -> str:
    error, phase = work["error"], work.get("phase")
    match phase:
        case _ if error is not None:
            return f"waits for a worker: {error['message']}; {error['hint']}"
        case _ if work["status"] == "queued":
            return "waits for its turn"
        case "load":
            return "reading the model"
        case "save":
            return "writing"
        case _:
            return "comparing it with the model" if phase else "starting"


def _failed(call: Call, work: Work, what: str) -> int:
    error = work["error"]
    assert error is not None, "what failed says why"
    if call.given.json:
        print_json(work)
    else:
        hint = f"; {error['hint']}" if error["hint"] else ""
        call.note(f"the {what} failed ({error['code']}): {error['message']}{hint}")
    return JOB_ENDED_BADLY
