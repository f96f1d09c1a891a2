"""What a job does: watch, events, logs, metrics."""

from __future__ import annotations

import sys
from functools import partial

from client.api import Longhaul
from client.commands.command import LEFT, OK, Call, Commands, ending, print_json
from client.sparklines import FIELDS, WIDTH, print_metrics
from client.tables import print_events, print_job
from client.watch import watch


def add(commands: Commands) -> None:
    """watch, events, logs, metrics."""
    commands.add("watch", _watch, "follow a job; Ctrl-C leaves it running", shown="ID").add_argument("id", metavar="ID")
    events = commands.add("events", _events, "everything that happened to a job", shown="ID")
    events.add_argument("id", metavar="ID")
    events.add_argument("--after", type=int, default=0, metavar="NUMBER", help="only what came after this one")
    events.add_argument("-f", "--follow", action="store_true", help="and what happens from now on, to its end")
    logs = commands.add("logs", _logs, "the trainer's log; -f follows it", shown="ID", json_too=False)
    logs.add_argument("id", metavar="ID")
    logs.add_argument("-f", "--follow", action="store_true", help="and what is added to it, to the end of the job")
    logs.add_argument("--tail", type=int, default=200, metavar="LINES")
    metrics = commands.add("metrics", _metrics, "loss, speed and memory over its steps, as small curves", shown="ID")
    metrics.add_argument("id", metavar="ID")
    metrics.add_argument("--points", type=int, default=WIDTH, help="at most so many, each the mean of its stretch")
    metrics.add_argument("--fields", default=",".join(FIELDS), metavar="NAME,NAME", help="e.g. loss,grad_norm")


def _watch(call: Call) -> int:
    with call.connect() as api:
        return watched(call, api, call.given.id)


def watched(call: Call, api: Longhaul, job: str) -> int:
    """Follow it to its end; the exit code is the job's. With --json: a line an event."""
    if call.given.json:
        for event in api.events(job, on_trouble=call.note):
            print_json(event)
        return ending(api.get(job))
    try:
        shown = watch(api, job, console=call.console)
    except KeyboardInterrupt:
        call.say(f"\nthe job goes on; come back with: longhaul watch {job}")
        return LEFT
    print_job(shown, call.console)
    return ending(shown)


def _events(call: Call) -> int:
    job, after = call.given.id, call.given.after
    with call.connect() as api:
        events = (
            api.events(job, after=after, on_trouble=call.note)
            if call.given.follow
            else api.past_events(job, after=after)
        )
        for event in events:
            call.answer(event, partial(print_events, [event], call.console))
    return OK


def _logs(call: Call) -> int:
    job, tail = call.given.id, call.given.tail
    with call.connect() as api:
        if not call.given.follow:
            sys.stdout.write(api.logs(job, tail=tail)[0])
            return OK
        for text in api.follow_logs(job, tail=tail, on_trouble=call.note):
            sys.stdout.write(text)
            sys.stdout.flush()
    return OK


def _metrics(call: Call) -> int:
    fields = call.given.fields.split(",")
    with call.connect() as api:
        found = api.metrics(call.given.id, points=call.given.points, fields=fields)
    return call.answer(found, lambda: print_metrics(found["data"], fields, call.console))
