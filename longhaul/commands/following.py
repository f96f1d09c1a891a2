"""What a job does: watch, events, logs, metrics, compare."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from jobs.comparison.answer import FEWEST, MOST, Comparison
from jobs.text.units import printable
from longhaul.api import ApiError, Longhaul, Unreachable
from longhaul.commands.command import LEFT, OK, Call, Commands, ending, nothing_yet, print_json, write_file
from longhaul.comparison import print_comparison
from longhaul.comparison_picture import POINTS, draw
from longhaul.figures import duration
from longhaul.tables import FIELDS, WIDTH, print_events, print_job, print_metrics
from longhaul.watch import watch


def add(commands: Commands) -> None:
    """watch, events, logs, metrics, compare."""
    commands.add("watch", _watch, "follow a job; Ctrl-C leaves it running", shown="ID").add_argument("id", metavar="ID")
    events = commands.add("events", _events, "show the events of a job; -f follows them", shown="ID")
    events.add_argument("id", metavar="ID")
    events.add_argument("--after", type=int, default=0, metavar="NUMBER", help="only events after this number")
    events.add_argument("-f", "--follow", action="store_true", help="follow the job to its end")
    logs = commands.add("logs", _logs, "show the log of a job's trainer; -f follows it", shown="ID", json_too=False)
    logs.add_argument("id", metavar="ID")
    logs.add_argument("-f", "--follow", action="store_true", help="follow the log to the end of the job")
    logs.add_argument("--tail", type=int, default=200, metavar="LINES", help="last lines to show (default: 200)")
    metrics = commands.add("metrics", _metrics, "draw loss, speed and memory of a job as small curves", shown="ID")
    metrics.add_argument("id", metavar="ID")
    metrics.add_argument("--points", type=int, default=WIDTH, help="points per curve at most")
    metrics.add_argument("--fields", default=",".join(FIELDS), metavar="NAME,NAME", help="e.g. loss,grad_norm")
    compare = commands.add(
        "compare", _compare, "show what differs between jobs, and what it costs", shown="ID ID [ID…]"
    )
    compare.add_argument("ids", nargs="+", metavar="ID", help=f"{FEWEST} to {MOST} jobs")
    compare.add_argument("--png", type=Path, metavar="FILE", help="write a picture: memory by category, and the losses")


def _watch(call: Call) -> int:
    with call.connect() as api:
        return watch_to_end(call, api, call.given.id)


def watch_to_end(call: Call, api: Longhaul, job: str) -> int:
    """Follow it to its end; the exit code is the job's. With --json: a line an event."""
    try:
        if call.given.json:
            for event in api.events(job, on_trouble=call.note):
                print_json(event)
            return ending(api.get(job))
        shown = watch(api, job, console=call.console)
    except KeyboardInterrupt:
        call.left(f"{_left(api, job)}; watch it again with: longhaul watch {job}")
        return LEFT
    print_job(shown, call.console)
    match shown["status"]:
        case "succeeded" if shown["kind"] == "evaluate":
            call.say(f"evaluated; everything on one page: longhaul report {job}", "dim")
        case "succeeded" if shown["fine_tuned_model"]:
            call.say(
                f"trained for {duration(shown['training_s'])}; fetch the model with: longhaul download {job}", "dim"
            )
        case "failed" if shown["attempt"]:
            call.say(f"trained for {duration(shown['training_s'])}; the log: longhaul logs {job}", "dim")
    return ending(shown)


def _left(api: Longhaul, job: str) -> str:
    """How a job stands that nobody watches any more."""
    try:
        shown = api.get(job)
    except (ApiError, Unreachable):
        return "the job runs on without you"
    if shown["requested"] != "none":
        return f"the job is {shown['status']}, and a {shown['requested']} is requested"
    match shown["status"]:
        case "running":
            return "the job continues"
        case "paused":
            return f"the job is paused until somebody resumes it (longhaul resume {job})"
        case "queued" | "validating" as status:
            return f"the job is {status} and continues without you"
        case "damaged":
            return "the run directory of the job is damaged"
        case status:
            return f"the job has ended: {status}"


def _events(call: Call) -> int:
    with call.connect() as api:
        job, after = call.given.id, call.given.after
        events = (
            api.events(job, after=after, on_trouble=call.note)
            if call.given.follow
            else api.past_events(job, after=after)
        )
        for event in events:
            call.answer(event, partial(print_events, [event], call.console))
    return OK


def _logs(call: Call) -> int:
    with call.connect() as api:
        job, tail = call.given.id, call.given.tail
        if not call.given.follow:
            sys.stdout.write(printable(api.logs(job, tail=tail)[0]))
            return OK
        for text in api.follow_logs(job, tail=tail, on_trouble=call.note):
            sys.stdout.write(printable(text))
            sys.stdout.flush()
    return OK


def _metrics(call: Call) -> int:
    fields = call.given.fields.split(",")
    with call.connect() as api:
        found = api.metrics(call.given.id, points=call.given.points, fields=fields)
        if not (found["data"] or call.given.json):
            call.say(nothing_yet(api.get(call.given.id), "metrics"))
            return OK
    return call.answer(found, lambda: print_metrics(found["data"], fields, call.console))


def _compare(call: Call) -> int:
    given = call.given
    with call.connect() as api:
        answer = api.compare(given.ids)
        found = Comparison.model_validate(answer)
        if given.png is not None:
            curves = {job.id: list(_curve(api, job.id)) for job in found.jobs}
            write_file(draw(found, curves), given.png)
    return call.answer(answer, lambda: print_comparison(found, call.console))


def _curve(api: Longhaul, job: str) -> Iterator[tuple[float, float]]:
    """Steps and training losses."""
    for row in api.metrics(job, points=POINTS, fields=["loss"])["data"]:
        step, value = row["step"], row["loss"]
        if step is not None and value is not None:
            yield step, value
