"""The `longhaul` command.

Exit codes: 0 done · 1 the job failed or was cancelled · 2 bad input · 3 nobody answers · 130 left with Ctrl-C.
The service is found through LONGHAUL_URL (default http://127.0.0.1:8000) and LONGHAUL_API_KEY.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from client import tables
from client.api import DEFAULT_URL, ApiError, Longhaul, Unreachable
from client.jobfile import BadInput, read_job
from client.plan import dry_run, print_plan, write_picture
from client.watch import watch
from jobs.state import Status

OK, JOB_ENDED_BADLY, BAD_INPUT, UNREACHABLE, LEFT = 0, 1, 2, 3, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = _parser().parse_args(argv)
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    run: Callable[[argparse.Namespace, Mapping[str, str], Console], int] = arguments.run
    try:
        return run(arguments, os.environ, Console())
    except BadInput as error:
        errors.print(f"longhaul: {error}", markup=False)
        return BAD_INPUT
    except ApiError as error:
        where = f"{error.param}: " if error.param and error.param not in str(error) else ""
        errors.print(f"longhaul: {where}{error}", markup=False)
        if error.hint:
            errors.print(f"  way out: {error.hint}", markup=False)
        return UNREACHABLE if error.status >= 500 else BAD_INPUT
    except Unreachable as error:
        errors.print(f"longhaul: {error}", markup=False)
        errors.print("  way out: start it with `longhaul local`, or set LONGHAUL_URL", markup=False)
        return UNREACHABLE
    except KeyboardInterrupt:
        return LEFT
    except BrokenPipeError:  # `longhaul list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK


# -- commands ----------------------------------------------------------------------------------------------------------


def _submit(arguments: argparse.Namespace, environment: Mapping[str, str], console: Console) -> int:
    job = read_job(arguments.file, arguments.set, data=Path(environment.get("LONGHAUL_DATA") or "data"))
    with _connect(environment) as api:
        made = api.submit(job, idempotency_key=arguments.idempotency_key, dry_run=arguments.dry_run)
        if arguments.watch:
            return _watched(api, made["id"], console, as_json=arguments.json)
    if arguments.json:
        _print_json(made)
    else:
        console.print(f"{made['id']} is {made['status']}", highlight=False)
        console.print(f"follow it with: longhaul watch {made['id']}", style="dim", highlight=False)
    return OK


def _watch(arguments: argparse.Namespace, environment: Mapping[str, str], console: Console) -> int:
    with _connect(environment) as api:
        return _watched(api, arguments.id, console, as_json=arguments.json)


def _watched(api: Longhaul, job: str, console: Console, *, as_json: bool) -> int:
    if as_json:
        for event in api.events(job):
            _print_json(event)
        return _ending(api.get(job))
    try:
        shown = watch(api, job, console=console)
    except KeyboardInterrupt:
        console.print(f"\nthe job goes on; come back with: longhaul watch {job}", highlight=False)
        return LEFT
    tables.print_job(shown, console)
    return _ending(shown)


def _plan(arguments: argparse.Namespace, environment: Mapping[str, str], console: Console) -> int:
    job = read_job(arguments.file, arguments.set, data=Path(environment.get("LONGHAUL_DATA") or "data"))
    with _connect(environment) as api:
        ended, plan = dry_run(api, job, Console(stderr=True))
        if plan is not None and arguments.png is not None:
            write_picture(api, ended["id"], arguments.png)
    if arguments.json:
        shown = None if plan is None else plan.model_dump()
        _print_json({"job": ended["id"], "status": ended["status"], "error": ended["error"], "plan": shown})
    elif plan is None:
        tables.print_job(ended, console)
    else:
        print_plan(plan, console)
    return _ending(ended)


def _list(arguments: argparse.Namespace, environment: Mapping[str, str], console: Console) -> int:
    with _connect(environment) as api:
        page = api.list(after=arguments.after, limit=arguments.limit, status=arguments.status)
    if arguments.json:
        _print_json(page)
    else:
        tables.print_jobs(page, console)
    return OK


def _show(arguments: argparse.Namespace, environment: Mapping[str, str], console: Console) -> int:
    with _connect(environment) as api:
        job = api.get(arguments.id)
        events: list[dict[str, Any]] = []
        more = arguments.events
        while more:
            page = api.event_page(arguments.id, after=events[-1]["number"] if events else 0)
            events += page["data"]
            more = page["has_more"]
    if arguments.json:
        _print_json({**job, "events": events} if arguments.events else job)
    else:
        tables.print_job(job, console)
        tables.print_events(events, console)
    return OK


def _steer(arguments: argparse.Namespace, environment: Mapping[str, str], console: Console) -> int:
    with _connect(environment) as api:
        job = {"cancel": api.cancel, "pause": api.pause, "resume": api.resume}[arguments.command](arguments.id)
    if arguments.json:
        _print_json(job)
    else:
        wanted = "" if job["request"] == "none" else f", {job['request']} requested"
        console.print(f"{job['id']} is {job['status']}{wanted}", highlight=False)
    return OK


def _logs(arguments: argparse.Namespace, environment: Mapping[str, str], console: Console) -> int:
    with _connect(environment) as api:
        text, offset = api.logs(arguments.id, tail=arguments.tail)
        while True:
            sys.stdout.write(text)
            sys.stdout.flush()
            if not arguments.follow or (not text and Status(api.get(arguments.id)["status"]).terminal):
                return OK
            if not text:
                time.sleep(1.0)
            text, offset = api.logs(arguments.id, offset=offset)


def _local(arguments: argparse.Namespace, environment: Mapping[str, str], console: Console) -> int:
    from client.local import run_local

    return run_local(
        environment, console, data=arguments.data, home=arguments.home, runs=arguments.runs, port=arguments.port
    )


def _demo(arguments: argparse.Namespace, environment: Mapping[str, str], console: Console) -> int:
    from client.demo import run_demo

    return run_demo(environment, console, model=arguments.model, home=arguments.home)


# ----------------------------------------------------------------------------------------------------------------------


def _connect(environment: Mapping[str, str]) -> Longhaul:
    return Longhaul(environment.get("LONGHAUL_URL") or DEFAULT_URL, environment.get("LONGHAUL_API_KEY") or None)


def _ending(job: dict[str, Any]) -> int:
    return OK if job["status"] in ("succeeded", "validated") else JOB_ENDED_BADLY


def _print_json(content: object) -> None:
    print(json.dumps(content, ensure_ascii=False), flush=True)


def _parser() -> argparse.ArgumentParser:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="longhaul", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: object, help_text: str, *, json_too: bool = True) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=help_text, description=help_text)
        made.set_defaults(run=run)
        if json_too:
            made.add_argument("--json", action="store_true", help="JSON for programs instead of text")
        return made

    submit = command("submit", _submit, "submit a job file (.json), or a file of rows (.jsonl) with all defaults")
    submit.add_argument("file")
    submit.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="e.g. schedule.epochs=3")
    submit.add_argument("--watch", action="store_true", help="stay and follow it")
    submit.add_argument("--dry-run", action="store_true", help="check only, do not train")
    submit.add_argument("--idempotency-key", metavar="KEY", help="submitting twice with one key makes one job")
    plan = command("plan", _plan, "what a job would need of memory, time and disk, and what was tried; trains nothing")
    plan.add_argument("file")
    plan.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="e.g. memory.budget=24")
    plan.add_argument("--png", type=Path, metavar="FILE", help="write a picture of it")
    command("watch", _watch, "follow a job; Ctrl-C leaves it running").add_argument("id")
    listing = command("list", _list, "jobs, newest first")
    listing.add_argument("--status", choices=[status.value for status in Status])
    listing.add_argument("--after", metavar="ID", help="the page after this job")
    listing.add_argument("--limit", type=int, default=20)
    show = command("show", _show, "one job")
    show.add_argument("id")
    show.add_argument("--events", action="store_true", help="with everything that happened to it")
    command("cancel", _steer, "stop a job for good").add_argument("id")
    command("pause", _steer, "checkpoint, and give the card back until resumed").add_argument("id")
    command("resume", _steer, "go on with a paused job").add_argument("id")
    logs = command("logs", _logs, "the trainer's log", json_too=False)
    logs.add_argument("id")
    logs.add_argument("-f", "--follow", action="store_true", help="and what is added to it")
    logs.add_argument("--tail", type=int, default=200, metavar="LINES")
    local = command("local", _local, "Redis, service, workers and publish in this terminal", json_too=False)
    local.add_argument("--data", type=Path, help="folder of data files (default: LONGHAUL_DATA or ./data)")
    local.add_argument("--home", type=Path, default=Path(".longhaul"), help="Redis, logs, prepared data, models")
    local.add_argument("--runs", type=Path, help="folder of run directories (default: LONGHAUL_RUNS or ./runs)")
    local.add_argument("--port", type=int, help="port of the service (default: LONGHAUL_PORT or 8000)")
    demo = command("demo", _demo, "train a tiny model on the example recipes, here and now", json_too=False)
    demo.add_argument("--model", help="any hub id or folder instead of the built-in tiny model")
    demo.add_argument("--home", type=Path, default=Path(".longhaul-demo"), help="where everything is kept")
    return parser


if __name__ == "__main__":
    sys.exit(main())
