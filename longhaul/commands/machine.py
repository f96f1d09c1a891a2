"""The machine it runs on: workers, doctor, local, demo, key, completion."""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path

from jobs.errors import UserError
from jobs.process.lifeline import Stopped, run_child, stopped_once
from jobs.process.secrets import new_key
from longhaul.children import python
from longhaul.commands.command import OFFERED, OK, SHELLS, Call, Commands
from longhaul.jobfile import BadInput
from longhaul.result_tables import print_workers


def add(commands: Commands) -> None:
    """workers, doctor, local, demo, key, completion."""
    commands.add("workers", _workers, "list workers: GPU, current job, last heartbeat")
    doctor = commands.add(
        "doctor", _doctor, "examine this machine and its GPU: at most 10 minutes, no job, no download"
    )
    doctor.add_argument("--report", metavar="FILE", help="write a page to paste into an issue")
    doctor.add_argument("--model", metavar="SIZE", help="xl, large, base or tiny (default: the largest that fits)")
    doctor.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="GROUP",
        help="one group of checks, with those that it needs; repeat for more",
    )
    doctor.add_argument("--seconds", metavar="N", help="time for all checks (default: 600)")
    local = commands.add("local", _local, "run Redis, service, workers and publish in this terminal", json_too=False)
    local.add_argument("--data", type=Path, metavar="DIR", help="data files (default: LONGHAUL_DATA, or a new ./data)")
    local.add_argument(
        "--home",
        type=Path,
        default=Path(".longhaul"),
        metavar="DIR",
        help="Redis, logs, uploads, prepared data, models",
    )
    local.add_argument("--runs", type=Path, metavar="DIR", help="run directories (default: LONGHAUL_RUNS or ./runs)")
    local.add_argument("--port", type=int, help="port of the service (default: LONGHAUL_PORT or 8000)")
    demo = commands.add("demo", _demo, "train a tiny model on example rows", json_too=False)
    demo.add_argument(
        "--task", choices=("recipes", "chat", "classify"), default="recipes", help="which rows (default: recipes)"
    )
    demo.add_argument("--model", help="hub id or folder, instead of the built-in tiny model")
    demo.add_argument(
        "--home", type=Path, default=Path(".longhaul-demo"), metavar="DIR", help="folder for all files of the demo"
    )
    key = commands.add("key", _key, "create an API key, and its line for LONGHAUL_API_KEYS_FILE", shown="NAME")
    key.add_argument("name", metavar="NAME", help="name of its owner, as the access log shows it")
    completion = commands.add(
        "completion",
        partial(_completion, commands),
        "print the script that completes commands, files and jobs in a shell",
        shown="SHELL",
        json_too=False,
    )
    completion.add_argument(
        "shell",
        choices=(*SHELLS, *OFFERED),
        help='bash: eval "$(longhaul completion bash)"; jobs, sweeps: what the scripts ask',
    )


def _workers(call: Call) -> int:
    with call.connect() as api:
        found = api.workers()
    return call.answer(found, lambda: print_workers(found["data"], call.console, damaged=found.get("damaged", [])))


def _doctor(call: Call) -> int:
    given = call.given
    if missing := [name for name in ("worker", "torch") if importlib.util.find_spec(name) is None]:
        raise BadInput(
            f"only the client is installed here, without {missing[0]}: on the machine with the GPU run `docker compose "
            "run --rm --build worker doctor` in the clone, or `make setup` first"
        )
    options = {name: getattr(given, name) for name in ("report", "model", "seconds")}
    words = [word for name, value in options.items() if value is not None for word in (f"--{name}", value)]
    words += [word for group in given.only for word in ("--only", group)] + (["--json"] if given.json else [])
    try:
        with stopped_once():
            return run_child(python("worker", "doctor", *words), call.environment)
    except Stopped as stopped:
        return stopped.code


def _local(call: Call) -> int:
    from longhaul.local import run_local

    given = call.given
    return run_local(call.environment, call.console, data=given.data, home=given.home, runs=given.runs, port=given.port)


def _demo(call: Call) -> int:
    from longhaul.demo import run_demo

    return run_demo(call.environment, call.console, kind=call.given.task, model=call.given.model, home=call.given.home)


def _completion(commands: Commands, call: Call) -> int:
    if call.given.shell in SHELLS:
        print(commands.completion(call.given.shell))
        return OK
    with call.connect() as api:
        jobs = call.given.shell == "jobs"
        for each in api.list(limit=100, dry_run=False)["data"] if jobs else api.sweeps():
            call.say(each["id"])
            call.say(each["name"])
    return OK


def _key(call: Call) -> int:
    try:
        key, line = new_key(call.given.name)
    except UserError as error:
        raise BadInput(str(error)) from None

    def people() -> None:
        call.note(f"the key of {call.given.name}, shown only once; the owner sets it as LONGHAUL_API_KEY:")
        call.say(key)
        call.note("the line for LONGHAUL_API_KEYS_FILE of the service:")
        call.say(line)

    return call.answer({"name": call.given.name, "key": key, "line": line}, people)
