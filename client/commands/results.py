"""What a job leaves behind: checkpoints, files, download."""

from __future__ import annotations

import os
from pathlib import Path

from client import result_tables
from client.api import Longhaul
from client.bars import bar
from client.commands.command import OK, Call, Commands, print_json
from client.figures import size
from client.jobfile import BadInput


def add(commands: Commands) -> None:
    """checkpoints, files, download."""
    checkpoints = commands.add("checkpoints", _checkpoints, "its checkpoints with their validation losses", shown="ID")
    checkpoints.add_argument("id", metavar="ID")
    commands.add("files", _files, "what lies in its run directory", shown="ID").add_argument("id", metavar="ID")
    download = commands.add(
        "download", _download, "its model, or other files and folders; goes on after a break", shown="ID [PATH…]"
    )
    download.add_argument("id", metavar="ID")
    download.add_argument("paths", nargs="*", default=["model"], metavar="PATH", help="file or folder (default: model)")
    download.add_argument("--to", type=Path, metavar="DIR", help="where to (default: a folder named like the job's id)")


def _checkpoints(call: Call) -> int:
    with call.connect() as api:
        found = list(api.checkpoints(call.given.id))
    return call.answer(found, lambda: result_tables.print_checkpoints(found, call.console))


def _files(call: Call) -> int:
    with call.connect() as api:
        found = list(api.files(call.given.id))
    return call.answer(found, lambda: result_tables.print_files(found, call.console))


def _download(call: Call) -> int:
    folder = call.given.to if call.given.to is not None else Path(call.given.id)
    with call.connect() as api:
        written = [file for path in call.given.paths for file in _fetched(call, api, path, folder)]
    if call.given.json:
        print_json([{"path": str(file), "bytes": os.path.getsize(file)} for file in written])
    else:
        call.say(f"{len(written)} files, {size(sum(map(os.path.getsize, written)))}, in {folder}")
    return OK


def _fetched(call: Call, api: Longhaul, path: str, folder: Path) -> list[Path]:
    try:
        with bar(call.errors) as told:
            return list(api.download(call.given.id, path, folder, on_progress=told))
    except OSError as error:
        raise BadInput(f"--to {folder}: {error.strerror} ({error.filename})") from None
