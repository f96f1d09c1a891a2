"""Files on their way: a download that resumes where it was cut off, an upload that is streamed and has a checksum."""

from __future__ import annotations

import base64
import errno
import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from urllib.parse import quote, unquote

import requests

from jobs.answers import Dataset, RunFile
from longhaul.connection import TRIES, ApiError, Connection, RetryPolicy, Unreachable, part

BLOCK = 64 * 1024
"""Written at once; when a download breaks off, less than this is lost."""
SILENCE_S = 60.0
STORED_WITHIN_S = 600.0
"""For the answer to an upload: what was sent is put on the disk first."""
Progress = Callable[[int, int], None]
"""Told (bytes done, bytes in all)."""


def sha256_of(file: Path) -> bytes:
    """Digest of its content. Raises OSError when it cannot be read, or not twice: a pipe, a device."""
    mode = os.stat(file).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # a folder has an error of its own
        raise OSError(errno.EINVAL, "is not a regular file; write the rows to one", str(file))
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").digest()


def upload(connection: Connection, name: str, file: Path, digest: bytes, report: Progress) -> Dataset:
    """PUT a file as a data set. Sent once: it can be large. Doing it again does no harm.

    Raises OSError when it cannot be read.
    """
    headers = {
        "Content-Digest": f"sha-256=:{base64.b64encode(digest).decode()}:",
        "Content-Type": "application/octet-stream",
    }
    with open(file, "rb") as opened:
        body = _Upload(opened.fileno(), report)
        try:
            return connection.json(
                Dataset,
                "PUT",
                f"/datasets/{part(name)}",
                data=body,
                headers=headers,
                timeout=(SILENCE_S, STORED_WITHIN_S),  # the first is also for each piece that is sent
            )
        except Unreachable as error:
            raise Unreachable(
                f"the upload of {file} stopped after {body.done:,} of {len(body):,} bytes: {error}"
            ) from error


class _Upload:
    """A body of known length that says how far it was read."""

    def __init__(self, handle: int, report: Progress) -> None:
        self._handle, self._report = handle, report
        self._size = os.fstat(handle).st_size
        self.done = 0

    def __len__(self) -> int:
        return self._size

    def read(self, count: int = -1) -> bytes:
        """The next bytes; never more than were announced, should the file grow."""
        left = self._size - self.done
        content = os.read(self._handle, left if count < 0 else min(count, left))
        self.done += len(content)
        self._report(self.done, self._size)
        return content


def download(
    connection: Connection,
    job: str,
    path: str,
    files: Iterable[RunFile],
    folder: Path,
    report: Callable[[str, int, int], None],
) -> list[Path]:
    """The file `path`, or all below it, of those the job has: under the same names in `folder`; a model without
    `model/` before them where the folder is new, empty, or begun so. Raises ApiError where there is none, OSError.
    """
    wanted = path.rstrip("/")
    names = [file["path"] for file in files if file["path"] == wanted or file["path"].startswith(f"{wanted}/")]
    if not names:
        hint = f"list them with: longhaul files {job}"
        raise ApiError(f"job {job} has no file or folder {path!r}", status=404, code="not_found", hint=hint)
    bare = wanted == "model" and _takes_model(folder, [name.removeprefix("model/") for name in names])
    targets = {name: folder / (name.removeprefix("model/") if bare else name) for name in names}
    for name, target in targets.items():
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise Unreachable(f"the server at {connection.url} is not Longhaul: a job of it has a file {name!r}")
        address = f"/jobs/{part(job)}/files/{'/'.join(map(part, name.split('/')))}"
        _fetch(connection, address, target, partial(report, name))
    return list(targets.values())


def _takes_model(folder: Path, names: Sequence[str]) -> bool:
    """Whether the files of a model go right into this folder: it is not the current one, and holds nothing, or some of
    them already, whole or in part."""
    if folder.resolve() == Path.cwd():
        return False
    there = {each.name.partition(".part-")[0] for each in folder.iterdir()} if folder.is_dir() else set()
    return not there or not there.isdisjoint(name.partition("/")[0] for name in names)


def save_log(read: Callable[[int], tuple[str, int]], file: Path) -> None:
    """The whole lines of a trainer's log so far. `read`: the text from a byte on, and the byte behind it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}.part")
    with open(partial, "w", encoding="utf-8", newline="") as out:
        text, offset = read(0)
        before = 0
        while offset > before:
            out.write(text)
            before = offset
            text, offset = read(offset)
    os.replace(partial, file)


def _fetch(connection: Connection, path: str, target: Path, report: Progress) -> None:
    """A file of the service as `target`, which appears when it is whole.

    What came before a cut lies beside it as `<name>.part-<ETag>`, and the rest is asked for under that ETag: only if
    the file is still the same is it put together.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    patience = RetryPolicy(lambda _: None)
    failures = 0
    while True:
        before = _bytes_fetched(target)
        try:
            whole = _resume(connection, path, target, report)
        except (requests.RequestException, Unreachable, ApiError) as error:
            patience.trouble(error)
            failures = 1 if _bytes_fetched(target) > before else failures + 1
            if failures == TRIES:
                why = f"broke off ({type(error).__name__}); run it again to continue"
                raise Unreachable(f"the download of {path} {why}") from error
            patience.pause()
            continue
        os.replace(whole, target)
        return


def _resume(connection: Connection, path: str, target: Path, report: Progress) -> Path:
    """Fetch what is missing. Returns the file that now has everything."""
    parts = _parts(target)
    headers, here = {}, 0
    if parts:
        # One byte again, so that a file of which all is here can be asked for, too.
        here = parts[0].stat().st_size - 1
        headers = {"Range": f"bytes={here}-", "If-Range": unquote(parts[0].name.rpartition(".part-")[2])}
    with connection.stream(path, silence_s=SILENCE_S, headers=headers) as answer:
        if answer.status_code == 206:
            [kept] = parts
            start, size = _range(answer)
            if start != here:
                raise Unreachable(f"{answer.url} was asked for what follows byte {here} and sent what follows {start}")
        else:
            for each in parts:
                each.unlink()
            kept = target.with_name(f"{target.name}.part-{quote(answer.headers.get('ETag', ''), safe='')}")
            start, size = 0, int(answer.headers["Content-Length"])
        with open(kept, "r+b" if start else "wb") as file:
            file.seek(start)
            for content in answer.iter_content(BLOCK):
                file.write(content)
                report(file.tell(), size)
            if file.tell() != size:
                raise requests.ConnectionError(f"{file.tell():,} of {size:,} bytes came")
            file.truncate()
    return kept


def _parts(target: Path) -> list[Path]:
    """What an earlier download left, if it can be gone on with: at most one file, and it knows its ETag."""
    mark = f"{target.name}.part-"
    found = sorted(each for each in target.parent.iterdir() if each.name.startswith(mark))
    usable = [each for each in found if each.name != mark and each.stat().st_size][:1]
    for each in found:
        if each not in usable:
            each.unlink()
    return usable


def _bytes_fetched(target: Path) -> int:
    return sum(each.stat().st_size for each in _parts(target))


def _range(answer: requests.Response) -> tuple[int, int]:
    """(first byte, size of the whole file) of a partial answer."""
    given = answer.headers.get("Content-Range", "")
    parts = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", given)
    if parts is None:
        raise Unreachable(f"{answer.url} answered a part of a file as {given!r}, which is not a byte range")
    return int(parts[1]), int(parts[2])
