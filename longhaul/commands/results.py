"""What a job leaves behind: checkpoints, files, download, report."""

from __future__ import annotations

import os
from pathlib import Path

from longhaul import result_tables
from longhaul.api import Longhaul
from longhaul.commands.command import OK, Call, Commands, nothing_yet, print_json, write_file
from longhaul.figures import bar, size
from longhaul.jobfile import BadInput


def add(commands: Commands) -> None:
    """checkpoints, files, download, report."""
    checkpoints = commands.add("checkpoints", _checkpoints, "list checkpoints with their validation losses", shown="ID")
    checkpoints.add_argument("id", metavar="ID")
    commands.add("files", _files, "list files of the run directory", shown="ID").add_argument("id", metavar="ID")
    download = commands.add(
        "download", _download, "download the model of a job, or other files; resumes if interrupted", shown="ID [PATH…]"
    )
    download.add_argument("id", metavar="ID")
    download.add_argument("paths", nargs="*", default=["model"], metavar="PATH", help="file or folder (default: model)")
    download.add_argument(
        "--to",
        type=Path,
        metavar="DIR",
        help="target folder (default: the id of the job); a model lies in it, if new or empty",
    )
    report = commands.add(
        "report", _report, "write a page about a job that can be kept, sent and opened anywhere", shown="ID"
    )
    report.add_argument("id", metavar="ID")
    report.add_argument("--out", type=Path, metavar="FILE", help="default: the id of the job, with .html")


def _checkpoints(call: Call) -> int:
    with call.connect() as api:
        found = list(api.checkpoints(call.given.id))
        if not (found or call.given.json):
            call.say(nothing_yet(api.get(call.given.id), "checkpoint"))
            return OK
    return call.answer(found, lambda: result_tables.print_checkpoints(found, call.console))


def _files(call: Call) -> int:
    with call.connect() as api:
        found = list(api.files(call.given.id))

    def people() -> None:
        result_tables.print_files(found, call.console)
        call.note(f"trainer.log is fetched by name: longhaul download {call.given.id} trainer.log")

    return call.answer(found, people)


def _report(call: Call) -> int:
    with call.connect() as api:
        content = api.report(call.given.id)
    file = call.given.out or Path(f"{call.given.id}.html")
    write_file(content, file, "--out")
    written = {"path": str(file), "bytes": len(content)}
    return call.answer(written, lambda: call.say(f"{file}, {size(len(content))}: open it in a browser"))


def _download(call: Call) -> int:
    with call.connect() as api:
        folder = call.given.to if call.given.to is not None else Path(call.given.id)
        alone = call.given.to is not None and len(call.given.paths) == 1
        under = {
            path: folder / "model" if path.rstrip("/") == "model" and not alone else folder for path in call.given.paths
        }
        written = [file for path, target in under.items() for file in fetched(call, api, path, target)]
    if call.given.json:
        print_json([{"path": str(file), "bytes": os.path.getsize(file)} for file in written])
    else:
        call.say(
            f"{len(written):,} file{'s' * (len(written) != 1)}, {size(sum(map(os.path.getsize, written)))}, in {folder}"
        )
    return OK


def fetched(call: Call, api: Longhaul, path: str, folder: Path, option: str = "--to") -> list[Path]:
    """The files of a job at this path, in a folder that this option names. Raises BadInput where it is not writable."""
    try:
        with bar(call.errors) as report:
            return list(api.download(call.given.id, path, folder, on_progress=report))
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""  # a full disk names no file
        raise BadInput(f"{option} {folder}: {error.strerror}{where}") from None
