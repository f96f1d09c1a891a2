"""Uploaded files of rows: datasets, and its add, show, rm."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from client import result_tables
from client.bars import bar
from client.commands.command import Call, Commands
from client.jobfile import BadInput


def add(commands: Commands) -> None:
    """datasets."""
    made = commands.add("datasets", _list, "uploaded rows; add FILE, show NAME, rm NAME", shown="[add|show|rm]")
    kinds = made.add_subparsers(metavar="add|show|rm")

    def kind(name: str, run: object, argument: str, tells: str) -> argparse.ArgumentParser:
        parser = kinds.add_parser(name, help=tells, description=tells[0].upper() + tells[1:] + ".")
        parser.set_defaults(run=run)
        parser.add_argument(argument.lower(), metavar=argument)
        # Not False where it is not given: that would take back what stands before the word.
        parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="JSON instead of text")
        return parser

    adding = kind("add", _add, "FILE", "upload a file of rows")
    adding.add_argument("--name", help="instead of the file's own")
    kind("show", _show, "NAME", "one data set, and what the newest job found in it")
    kind("rm", _remove, "NAME", "remove a data set that no open job names")


def _list(call: Call) -> int:
    with call.connect() as api:
        found = list(api.datasets())
    return call.answer(found, lambda: result_tables.print_datasets(found, call.console))


def _add(call: Call) -> int:
    file = Path(call.given.file)
    try:
        with call.connect() as api, bar(call.errors) as told:
            made = api.upload(file, call.given.name, on_progress=partial(told, file.name))
    except OSError as error:
        raise BadInput(f"{file}: {error.strerror}") from None
    return call.answer(made, lambda: call.say(f"a job names it dataset:{made['name']}"))


def _show(call: Call) -> int:
    with call.connect() as api:
        found = api.dataset(call.given.name)
    return call.answer(found, lambda: result_tables.print_dataset(found, call.console))


def _remove(call: Call) -> int:
    with call.connect() as api:
        gone = api.delete_dataset(call.given.name)
    return call.answer(gone, lambda: call.say(f"{gone['name']} is gone"))
