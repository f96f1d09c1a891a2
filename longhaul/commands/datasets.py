"""Uploaded files of rows: datasets, and its add, show, rm."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from jobs.data_names import UPLOADED, data_format
from longhaul import result_tables
from longhaul.commands.command import Call, Commands, confirm
from longhaul.figures import bar, size
from longhaul.jobfile import BadInput, dataset_name


def add(commands: Commands) -> None:
    """datasets."""
    made = commands.add("datasets", _list, "list, add, show and delete uploaded data sets", shown="[add|show|rm]")
    kinds = made.add_subparsers(metavar="add|show|rm")

    def kind(name: str, run: object, argument: str, tells: str) -> argparse.ArgumentParser:
        parser = kinds.add_parser(name, help=tells, description=tells[0].upper() + tells[1:] + ".")
        parser.set_defaults(run=run)
        parser.add_argument(argument.lower(), metavar=argument)
        # Not False where it is not given: that would take back what stands before the word.
        parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print JSON")
        return parser

    adding = kind("add", _add, "FILE", "upload a file of rows")
    adding.add_argument(
        "--name", help="name of the data set (default: that of the file, with - for what is no ASCII letter or digit)"
    )
    kind("show", _show, "NAME", "show a data set, and what the newest job found in it")
    removing = kind("rm", _remove, "NAME", "delete a data set that no open job needs; asks first")
    removing.add_argument("-y", "--yes", action="store_true", help="do not ask")


def _list(call: Call) -> int:
    with call.connect() as api:
        found = list(api.datasets())
    return call.answer(found, lambda: result_tables.print_datasets(found, call.console))


def _add(call: Call) -> int:
    file = Path(call.given.file)
    try:
        with call.connect() as api, bar(call.errors) as report:
            # One that does not say its format is refused: nobody has looked into it.
            name = call.given.name or (dataset_name(file.name) if data_format(file.name) else None)
            made = api.upload(file, name, on_progress=partial(report, file.name))
    except OSError as error:
        raise BadInput(f"{file}: {error.strerror}") from None
    return call.answer(made, lambda: call.say(f"a job names it dataset:{made['name']}"))


def _show(call: Call) -> int:
    with call.connect() as api:
        found = api.dataset(_name(call))
    return call.answer(found, lambda: result_tables.print_dataset(found, call.console))


def _remove(call: Call) -> int:
    with call.connect() as api:
        if not call.given.yes:
            found = api.dataset(_name(call))
            confirm(call, f"delete the data set {found['name']} ({size(found['bytes'])})?")
        gone = api.delete_dataset(_name(call))
    return call.answer(gone, lambda: call.say(f"{gone['name']} is deleted"))


def _name(call: Call) -> str:
    """As it was given, or as the list and a job name it."""
    name: str = call.given.name
    return name.removeprefix(UPLOADED)
