"""Uploaded data sets: one folder each, complete or absent, and never changed.

uploads/recipes.jsonl/  recipes.jsonl  about.json
uploads/tmp-…/          one on its way, or one that is being deleted
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
from pydantic import BaseModel, ConfigDict
from starlette.concurrency import run_in_threadpool

from jobs.data_names import ABOUT, DATA_SUFFIXES, is_dataset_name
from jobs.disk.files import probe, sync_folder, write_synced
from jobs.errors import Conflict, NotFound, UserError
from service.errors import BodyTooLarge

BLOCK = 1 << 20
"""Bytes that go to the disk at once."""
RESERVE = 1 << 30
"""Bytes of the disk that uploads leave to others."""
LEFT_FOR_S = 24 * 3600.0
"""How old a leftover has to be before it is swept: a younger one may be another service's upload."""
_TEMPORARY = re.compile(r"tmp-[0-9a-f]{32}")
"""No data set can have such a name: it has no ending."""
log = logging.getLogger("longhaul.service")


class ChecksumMismatch(UserError):
    """What came is not what was sent."""

    code = "checksum_mismatch"


class DatasetExists(Conflict):
    """The name is taken by other content."""

    code = "dataset_exists"


class Uploaded(BaseModel):
    """about.json: one data set."""

    model_config = ConfigDict(frozen=True)

    name: str
    bytes: int
    sha256: str
    created_at: int


class Uploads:
    """All of them. `most`: bytes that one may have."""

    def __init__(self, root: Path, *, most: int) -> None:
        self._root = root
        self.most = most

    def probe(self) -> None:
        """Write what an upload needs to write, and remove it. Raises OSError."""
        self._root.mkdir(parents=True, exist_ok=True)
        probe(self._root)

    def get(self, name: str) -> Uploaded:
        """One data set. Raises NotFound."""
        if is_dataset_name(name):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                return Uploaded.model_validate_json((self._root / name / ABOUT).read_bytes())
        raise _none(name)

    def page(self, after: str, limit: int) -> tuple[list[Uploaded], bool]:
        """Data sets with names behind `after`, in order, and whether there are more."""
        names = [name for name in self._names() if name > after]
        found = []
        for name in names[:limit]:
            with contextlib.suppress(NotFound):  # deleted since
                found.append(self.get(name))
        return found, len(names) > limit

    async def receive(
        self, name: str, body: AsyncIterator[bytes], *, length: int | None, sha256: bytes | None
    ) -> tuple[Uploaded, bool]:
        """Take in a data set, and say whether it is new. `length` (of the body) and `sha256` are what is known before.

        On any error nothing of it stays. Raises UserError (a name that is none), ChecksumMismatch,
        DatasetExists, BodyTooLarge, OSError (ENOSPC), and what reading the body raises.
        """
        incoming = await run_in_threadpool(self._begin, name, length)
        try:
            block = bytearray()
            async for piece in body:
                block += piece
                if incoming.bytes + len(block) > self.most:
                    raise self._too_large()
                if len(block) >= BLOCK:
                    await run_in_threadpool(incoming.add, block)
                    block = bytearray()
            await run_in_threadpool(incoming.add, block)
            return await run_in_threadpool(self._keep, incoming, sha256)
        except asyncio.CancelledError:
            incoming.discard()  # here and now: the service stops, and does not wait for its threads
            raise
        finally:
            with anyio.CancelScope(shield=True):
                await run_in_threadpool(incoming.discard)

    def _names(self) -> list[str]:
        try:
            names = [name for name in os.listdir(self._root) if is_dataset_name(name)]
        except FileNotFoundError:  # there never was one
            return []
        return sorted(name for name in names if (self._root / name / ABOUT).exists())

    def _begin(self, name: str, length: int | None) -> _Incoming:
        """Refuse at once what can be refused before a byte of it came."""
        if not is_dataset_name(name):
            raise UserError(
                f"{name[:200]!r} cannot be the name of a data set: letters, digits, `.`, `_` and `-`, at most 128, "
                f"the first a letter or digit, and an ending that says the format: {', '.join(DATA_SUFFIXES)} "
                f"(but not {ABOUT})",
                param="name",
                hint="upload it under another name, such as recipes.jsonl",
            )
        if length is not None:
            if length > self.most:
                raise self._too_large()
            with contextlib.suppress(NotFound):
                if (there := self.get(name)).bytes != length:
                    raise _exists(there)
        self._root.mkdir(parents=True, exist_ok=True)
        _leave_room(self._root, length or 0)
        return _Incoming(self._root / f"tmp-{uuid.uuid4().hex}", name)

    def _keep(self, incoming: _Incoming, sha256: bytes | None) -> tuple[Uploaded, bool]:
        about = incoming.finish(sha256)
        for _ in range(3):
            try:
                os.rename(incoming.folder, self._root / about.name)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
            else:
                sync_folder(self._root)
                log.info("data set %s was uploaded: %d bytes, sha256 %s", about.name, about.bytes, about.sha256)
                return about, True
            with contextlib.suppress(NotFound):  # deleted since: once more
                there = self.get(about.name)
                if there.sha256 != about.sha256:
                    raise _exists(there)
                return there, False
        raise DatasetExists(
            f"{self._root / about.name} is there and is no data set: take another name, or move it away"
        )

    def remove(self, name: str) -> None:
        """Delete a data set. Raises NotFound."""
        self.get(name)
        doomed = self._root / f"tmp-{uuid.uuid4().hex}"
        try:
            os.rename(self._root / name, doomed)
        except FileNotFoundError:  # another request was faster
            raise _none(name) from None
        shutil.rmtree(doomed)

    def sweep(self) -> None:
        """Remove what uploads and deletions that were killed have left behind."""
        with contextlib.suppress(FileNotFoundError):
            for folder in self._root.iterdir():
                if _TEMPORARY.fullmatch(folder.name) and time.time() - _touched(folder) > LEFT_FOR_S:
                    log.warning(
                        "%s is left from an upload that was never finished, or from a deletion: removed", folder
                    )
                    shutil.rmtree(folder)

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(
            f"a data set may have {self.most:,} bytes (LONGHAUL_MAX_UPLOAD_GB): upload it compressed (.zst, .gz), "
            "or put it into the data directory"
        )


class _Incoming:
    """One on its way."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.bytes = 0
        self._name = name
        self._sha256 = hashlib.sha256()
        folder.mkdir()
        self._file = open(folder / name, "xb")  # noqa: SIM115 - `discard` closes it

    def add(self, block: bytearray) -> None:
        """Write and count it."""
        _leave_room(self.folder, len(block))
        self._file.write(block)
        self._sha256.update(block)
        self.bytes += len(block)

    def finish(self, expected: bytes | None) -> Uploaded:
        """Have all of it on disk. Raises ChecksumMismatch, UserError for an empty one."""
        if expected not in (None, self._sha256.digest()):
            raise ChecksumMismatch(
                f"{self.bytes:,} bytes came with sha256 {self._sha256.hexdigest()}, but Content-Digest names another",
                param="Content-Digest",
                hint="it changed in transit or while it was read: send it again",
            )
        if not self.bytes:
            raise UserError(f"{self._name} is empty", param="body", hint="send a file with at least one row")
        self._file.flush()
        os.fsync(self._file.fileno())
        about = Uploaded(
            name=self._name, bytes=self.bytes, sha256=self._sha256.hexdigest(), created_at=int(time.time())
        )
        write_synced(self.folder / ABOUT, about.model_dump_json(indent=1).encode() + b"\n")
        sync_folder(self.folder)
        return about

    def discard(self) -> None:
        """Remove what is still under its temporary name."""
        with contextlib.suppress(OSError):  # a full disk may refuse the last bytes, which nobody wants any more
            self._file.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _leave_room(folder: Path, wanted: int) -> None:
    """Raise OSError (ENOSPC) if the disk has not got so many bytes, and a reserve besides."""
    if shutil.disk_usage(folder).free < wanted + RESERVE:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


def _none(name: str) -> NotFound:
    return NotFound(f"there is no data set {name[:200]!r}: `longhaul datasets` (GET /datasets) lists them")


def _exists(there: Uploaded) -> DatasetExists:
    return DatasetExists(
        f"data set {there.name} exists with other content ({there.bytes:,} bytes, sha256 {there.sha256}), and a data "
        f"set never changes: take another name, or delete it first (DELETE /datasets/{there.name})"
    )


def _touched(folder: Path) -> float:
    """When something was last written there."""
    times = [folder.stat().st_mtime, *(file.stat().st_mtime for file in folder.iterdir())]
    return max(times)
