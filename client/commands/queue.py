"""Jobs as they stand: list, show, and what steers them."""

from __future__ import annotations

import sys
from typing import Any

from client import tables
from client.commands.command import Call, Commands
from client.jobfile import BadInput
from jobs.state import Status


def add(commands: Commands) -> None:
    """list, show, priority, pause, resume, cancel, delete."""
    listing = commands.add("list", _list, "jobs, newest first")
    listing.add_argument(
        "--status",
        action="append",
        choices=[status.value for status in Status],
        help="in this state; more than once: or",
    )
    listing.add_argument(
        "--where", action="append", default=[], metavar="KEY=VALUE", help="with this in metadata; more than once: and"
    )
    listing.add_argument("--after", metavar="ID", help="the page after this job")
    listing.add_argument("--limit", type=int, default=20)
    show = commands.add("show", _show, "one job: state, figures, cause of failure, checkpoints", shown="ID")
    show.add_argument("id", metavar="ID")
    show.add_argument("--events", action="store_true", help="with everything that happened to it")
    priority = commands.add("priority", _steer, "let it go before or after others; −100 to 100", shown="ID N")
    priority.add_argument("id", metavar="ID")
    priority.add_argument("priority", type=int, metavar="N", help="higher runs first; 0 is usual")
    for name, tells in (
        ("pause", "checkpoint, and give the card back until resumed"),
        ("resume", "go on with a paused job"),
        ("cancel", "stop a job for good"),
    ):
        commands.add(name, _steer, tells, shown="ID").add_argument("id", metavar="ID")
    delete = commands.add("delete", _delete, "remove an ended job and all its files; asks first", shown="ID")
    delete.add_argument("id", metavar="ID")
    delete.add_argument("-y", "--yes", action="store_true", help="do not ask")


def _list(call: Call) -> int:
    given = call.given
    with call.connect() as api:
        page = api.list(after=given.after, limit=given.limit, status=given.status, metadata=_labels(given.where))
    return call.answer(page, lambda: tables.print_jobs(page, call.console, filtered=bool(given.status or given.where)))


def _labels(where: list[str]) -> dict[str, str]:
    labels: dict[str, str] = {}
    for each in where:
        key, equals, value = each.partition("=")
        if not key or not equals:
            raise BadInput(f"--where {each}: write KEY=VALUE, for example --where team=kitchen")
        if labels.setdefault(key, value) != value:
            raise BadInput(f"--where {each}: {key} cannot be {labels[key]!r} and {value!r} at once")
    return labels


def _show(call: Call) -> int:
    with call.connect() as api:
        job = api.get(call.given.id)
        events = list(api.past_events(call.given.id)) if call.given.events else []
        checkpoints = [] if call.given.json else list(api.checkpoints(call.given.id))

    def people() -> None:
        tables.print_job(job, call.console, checkpoints)
        tables.print_events(events, call.console)

    return call.answer({**job, "events": events} if call.given.events else job, people)


def _steer(call: Call) -> int:
    given = call.given
    with call.connect() as api:
        match given.command:
            case "priority":
                job = api.set_priority(given.id, given.priority)
            case "pause":
                job = api.pause(given.id)
            case "resume":
                job = api.resume(given.id)
            case _:
                job = api.cancel(given.id)
    return call.answer(job, lambda: call.say(_standing(job)))


def _standing(job: dict[str, Any]) -> str:
    parts = [f"{job['id']} is {job['status']}"]
    if job["request"] != "none":
        parts.append(f"{job['request']} requested")
    if job["position"] is not None:
        parts.append(f"{job['position']} jobs before it (priority {job['priority']})")
    return ", ".join(parts)


def _delete(call: Call) -> int:
    with call.connect() as api:
        if not call.given.yes:
            job = api.get(call.given.id)
            _confirm(call, f"remove {job['name']} ({job['id']}, {job['status']}) with its model, checkpoints and log?")
        gone = api.delete(call.given.id)
    return call.answer(gone, lambda: call.say(f"{gone['id']} is gone"))


def _confirm(call: Call, question: str) -> None:
    """Raises BadInput unless the answer is yes."""
    if not sys.stdin.isatty():
        raise BadInput("nobody can be asked here: say --yes to remove it")
    call.errors.print(f"{question} [y/N] ", end="", markup=False, soft_wrap=True)
    if input().strip().lower() not in ("y", "yes"):
        raise BadInput("nothing was removed")
