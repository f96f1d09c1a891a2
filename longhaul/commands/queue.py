"""Jobs as they stand: list, show, and what steers them."""

from __future__ import annotations

from jobs.answers import Job
from jobs.state import CANCEL_FIRST, DAMAGED, Status, is_open
from longhaul import tables
from longhaul.commands.command import ACTS, Call, Commands, confirm
from longhaul.jobfile import BadInput

PAGE = 20


def add(commands: Commands) -> None:
    """list, show, priority, pause, resume, cancel, repair, delete."""
    listing = commands.add("list", _list, "list jobs, newest first")
    listing.add_argument(
        "--status",
        action="append",
        default=[],
        choices=[*(status.value for status in Status), DAMAGED],
        help="only jobs in this state; repeat for more states",
    )
    listing.add_argument(
        "--where",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="only jobs with this metadata; may be repeated",
    )
    listing.add_argument("--trials", action="store_true", help="show trials of sweeps, too")
    listing.add_argument("--sweep", metavar="ID", help="only trials of this sweep")
    listing.add_argument("--all", action="store_true", help="show dry runs, too")
    listing.add_argument("--after", metavar="ID", help="start after this job: last of the page before")
    listing.add_argument("--limit", type=int, default=PAGE, help=f"jobs to show (default: {PAGE})")
    show = commands.add("show", _show, "show a job: state, figures, error, checkpoints", shown="ID")
    show.add_argument("id", metavar="ID")
    show.add_argument("--events", action="store_true", help="show its events, too")
    priority = commands.add("priority", _control, "change the priority of a job, −100 to 100", shown="ID N")
    priority.add_argument("id", metavar="ID")
    priority.add_argument("priority", type=int, metavar="N", help="higher runs first; the default is 0")
    for name, tells in (
        ("pause", "save a checkpoint and release the GPU until the job is resumed"),
        ("resume", "resume a paused job"),
        ("cancel", "stop a job for good"),
    ):
        command = commands.add(name, _control, tells, shown="ID")
        command.set_defaults(**ACTS)
        command.add_argument("id", metavar="ID")
        if name == "resume":
            command.add_argument(
                "--from-scratch",
                action="store_true",
                help="start again at step 0, from the model's original weights; deletes all checkpoints",
            )
    repair = commands.add("repair", _repair, "cut off damaged events and all later ones; a copy is kept", shown="ID")
    repair.add_argument("id", metavar="ID")
    delete = commands.add("delete", _delete, "delete an ended or damaged job and all its files; asks first", shown="ID")
    delete.add_argument("id", metavar="ID")
    delete.add_argument("-y", "--yes", action="store_true", help="do not ask")
    for parser in (priority, repair, delete):
        parser.set_defaults(**ACTS)


def _list(call: Call) -> int:
    given = call.given
    with call.connect() as api:
        page = api.list(
            after=given.after, limit=given.limit, status=given.status, metadata=_labels(given.where),
            dry_runs=given.all, sweep=given.sweep, trials=given.trials,
        )  # fmt: skip
    options = [f"--status={each}" for each in given.status] + [f"--where={each}" for each in given.where]
    options += [f"--sweep={given.sweep}"] if given.sweep else []
    filtered = bool(options or given.after)
    options += ["--all"] * given.all + ["--trials"] * given.trials
    if given.limit != PAGE:
        options.append(f"--limit={given.limit}")
    return call.answer(page, lambda: tables.print_jobs(page, call.console, filtered=filtered, options=options))


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


def _control(call: Call) -> int:
    given = call.given
    with call.connect() as api:
        match given.command:
            case "priority":
                job = api.set_priority(given.id, given.priority)
            case "pause":
                job = api.pause(given.id)
            case "resume":
                job = api.resume(given.id, from_scratch=given.from_scratch)
            case _:
                job = api.cancel(given.id)
    return call.answer(job, lambda: call.say(_standing(job, priority=given.command == "priority")))


def _standing(job: Job, *, priority: bool = False) -> str:
    parts = [f"{job['id']} is {job['status']}"]
    if job["requested"] != "none":
        parts.append(f"{job['requested']} requested")
    if job["queue_position"] is not None:
        parts.append(f"number {job['queue_position']} in the queue (priority {job['priority']})")
    elif priority:
        parts.append(f"priority {job['priority']}")
    return ", ".join(parts)


def _repair(call: Call) -> int:
    with call.connect() as api:
        done = api.repair(call.given.id)

    def people() -> None:
        call.say(done["message"])
        call.say(_standing(done["job"]))

    return call.answer(done, people)


def _delete(call: Call) -> int:
    with call.connect() as api:
        if not call.given.yes:
            job = api.get(call.given.id)
            if is_open(job["status"]):  # nobody is asked about what is refused
                raise BadInput(f"job {job['id']} is {job['status']}: {CANCEL_FIRST}")
            confirm(call, f"delete {job['name']} ({job['id']}, {job['status']}) with its model, checkpoints and log?")
        gone = api.delete(call.given.id)
    return call.answer(gone, lambda: call.say(f"{gone['id']} is deleted"))
