"""What both sides of a run directory that travels through a bucket do: send files, list them, and receive them.

    URL/<job>/.box.json                    what the newest attempt begins with, then its orders. The box writes it
    URL/<job>/<attempt>-<token>/…          objects of the box for this attempt, by their names in the run directory
    URL/<job>/<attempt>-<token>/.node.json       what the node has. The first start of the task writes it, and no other
    URL/<job>/<attempt>-<token>-<start>/…  objects of this start of the task
    URL/.stores/…                          prepared models and data (`bucket_stores.py`)

A listing is written after the objects that it names. So no two writers ever write an object of the same name, and a
listing may name objects of others: a checkpoint that is in the bucket is not sent again. Only who wrote an object
removes it, and the box what it has received or put in the place of it.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError

from jobs.disk.files import replace_folder
from worker.engines.bucket import Bucket
from worker.engines.copied_file import (
    MANIFEST,
    BucketListing,
    CopiedFile,
    Files,
    append_rest,
    difference,
    files_in,
    in_folder,
    sealed_folder,
)
from worker.engines.engine import EngineUnavailable

log = logging.getLogger("longhaul.engines")
EVERY_S = 2.0
"""Between two copies in one direction: each is a few requests to the bucket, and costs."""
LARGE = 8 * 2**20
"""Bytes from which a file is copied in the background, so that orders and events pass it."""
BYTES_PER_S = 2**20
"""A file that grows is sent whole; so a larger one is sent less often."""
TRIES = 5
"""To receive what is listed and is not in the bucket, or not as its manifest says."""
RETRY_S = 2.0
"""After the first of them; twice as long after each further one."""
_TEMPORARY = "tmp-copy-"
_FOLLOWED = re.compile(r"attempts/|events\.jsonl$|metrics\.jsonl$")
"""What the other side follows line by line: it never waits for something large."""


@contextmanager
def unavailable() -> Iterator[None]:
    """Errors of this side's disk pass, too."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise EngineUnavailable(f"what is copied cannot be read or written: {error}") from error


def read_listing(bucket: Bucket, name: str) -> BucketListing | None:
    """None: there is none."""
    raw = bucket.read(name)
    try:
        return None if raw is None else BucketListing.model_validate_json(raw)
    except ValidationError as error:
        raise EngineUnavailable(f"{name} is no listing: {error.errors()[0]['msg']}") from error


class Sender:
    """Sends files of a run directory, and keeps the listing that tells of them."""

    def __init__(self, bucket: Bucket, run: Path, place: str, name: str, head: BucketListing) -> None:
        """`place`: of the objects; `name`: of the listing; `head`: what else it says."""
        self._bucket, self._run, self.place, self._name, self._head = bucket, run, place, name, head
        self.sent: Files = dict(head.files)
        """What the listing names, or will."""
        self._listed: Files | None = None
        self._due: dict[str, float] = {}
        """When a file may be sent again."""
        self._background = ThreadPoolExecutor(1, "bucket")
        self._sending: Future[Files] | None = None

    def send(self, owned: Callable[[str], bool], *, wait: bool) -> None:
        """What is new of these. `wait`: also what is large; else that goes in the background."""
        here = {name: file for name, file in files_in(self._run).items() if owned(name)}
        gone = {name: file for name, file in self.sent.items() if owned(name) and name not in here}
        self.sent = {name: file for name, file in self.sent.items() if name not in gone}
        if self._sending is not None and (wait or self._sending.done()):
            done, self._sending = self._sending, None
            self.sent |= {name: file for name, file in done.result().items() if name in here}
        small, batches = new_files(here, self.sent)
        for name, file in small.items():
            if wait or time.monotonic() >= self._due.get(name, 0.0):
                self._delay({name: file})
                self.sent |= self._put({name: file})
        self.list()
        for batch in batches:
            if wait:
                self.sent |= self._put(batch)
                self.list()
            elif self._sending is None and time.monotonic() >= self._due.get(next(iter(batch)), 0.0):
                if len(batch) == 1:
                    self._delay(batch)
                self._sending = self._background.submit(self._put, batch)
        for name, file in gone.items():
            if file.place == self.place:
                self._bucket.remove(f"{self._run.name}/{file.place}/{name}")

    def _delay(self, files: Files) -> None:
        for name, file in files.items():
            self._due[name] = time.monotonic() + file.bytes / BYTES_PER_S

    def list(self) -> None:
        """Write the listing, if it is not there as it would be."""
        if self.sent != self._listed:
            listing = self._head.model_copy(update={"files": self.sent})
            self._bucket.write(self._name, listing.model_dump_json().encode())
            self._listed = dict(self.sent)

    def _put(self, files: Files) -> Files:
        """These, where they are now; none of them, where one is gone: the next look finds what is there then."""
        try:
            for name in files:
                self._bucket.put(self._run / name, f"{self._run.name}/{self.place}/{name}")
        except FileNotFoundError:
            return {}
        return {name: file.model_copy(update={"place": self.place}) for name, file in files.items()}


class Receiver:
    """Receives files of a run directory."""

    def __init__(self, bucket: Bucket, run: Path) -> None:
        self._bucket, self._run = bucket, run
        for left in [*run.glob(f"{_TEMPORARY}*"), *run.glob(f"checkpoints/{_TEMPORARY}*")]:
            shutil.rmtree(left, ignore_errors=True)
        self.known: Files = files_in(run)
        """What is here as it is in the bucket."""
        self._tries: dict[str, tuple[Files, int, float]] = {}
        """Of what is not there as listed: how often it was tried, and when it is again."""
        self._background = ThreadPoolExecutor(1, "bucket")
        self._receiving: Future[tuple[Files, str | None]] | None = None

    def receive(self, listed: Files, *, wait: bool) -> bool:
        """Whether all of it is here. `wait`: all is tried before this returns; else what is large in the background."""
        if self._receiving is not None and (wait or self._receiving.done()):
            done, self._receiving = self._receiving, None
            self._note(*done.result())
        small, batches = new_files(listed, self.known)
        for batch in [{name: file} for name, file in small.items()]:
            if wait or self._may_try(batch):
                self._note(*self._get(batch))
        for batch in batches:
            if wait:
                self._note(*self._get(batch))
            elif self._receiving is None and self._may_try(batch):
                self._receiving = self._background.submit(self._get, batch)
        return not any(new_files(listed, self.known))

    def given_up(self, listed: Files) -> str | None:
        """What of these is missing here, if all of that is not in the bucket as it is listed, after many tries."""
        small, batches = new_files(listed, self.known)
        new = [*({name: file} for name, file in small.items()), *batches]
        keys = [_key(batch) for batch in new if (tried := self._tries.get(_key(batch))) and tried[:2] == (batch, TRIES)]
        return ", ".join(keys) if len(keys) == len(new) > 0 else None

    def _may_try(self, batch: Files) -> bool:
        tried = self._tries.get(_key(batch))
        return tried is None or tried[0] != batch or (tried[1] < TRIES and time.monotonic() >= tried[2])

    def _note(self, batch: Files, why: str | None) -> None:
        if why is None:
            self._tries.pop(_key(batch), None)
            self.known |= batch
            return
        tried = self._tries.get(_key(batch))
        tries = 1 if tried is None or tried[0] != batch else min(tried[1] + 1, TRIES)
        self._tries[_key(batch)] = (batch, tries, time.monotonic() + RETRY_S * 2 ** (tries - 1))
        log.warning("job %s: %s is not taken from the bucket: %s", self._run.name, _key(batch), why)

    def _get(self, batch: Files) -> tuple[Files, str | None]:
        """Of a folder with a manifest all, under a name of its own until it is whole. Returns it and what is wrong."""
        folder = sealed_folder(next(iter(batch)))
        target = self._run / (folder or ".")
        place = target if folder is None else target.with_name(f"{_TEMPORARY}{target.name}-{uuid.uuid4().hex[:8]}")
        try:
            for name, file in batch.items():
                source = f"{self._run.name}/{file.place}/{name}"
                get_file(self._bucket, source, file, place / name.removeprefix(f"{folder}/"))
            if folder is not None and (wrong := difference(place)) is not None:
                return batch, wrong
            if folder is not None:
                replace_folder(place, target)
        except FileNotFoundError as error:
            return batch, f"it is not there ({error})"
        finally:
            if folder is not None:
                shutil.rmtree(place, ignore_errors=True)
        return batch, None


def get_file(bucket: Bucket, name: str, file: CopiedFile, target: Path) -> None:
    """Under its name once it is here whole. Raises FileNotFoundError: there is no such object."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
    try:
        bucket.get(name, temporary)
        if not append_rest(temporary, target):
            os.replace(temporary, target)
        os.utime(target, ns=(file.modified_ns, file.modified_ns))
    finally:
        temporary.unlink(missing_ok=True)


def new_files(files: Files, there: Files) -> tuple[Files, list[Files]]:
    """What differs: small files, the smallest first, and what is copied in the background, batch after batch."""
    new = {name: file for name, file in files.items() if not file.same(there.get(name))}
    loose = sorted((name for name in new if sealed_folder(name) is None), key=lambda name: new[name].bytes)
    folders = sorted({folder for name in new if (folder := sealed_folder(name)) is not None})
    whole = [in_folder(folder, files) for folder in folders if f"{folder}/{MANIFEST}" in files]
    large = [name for name in loose if new[name].bytes > LARGE and not _FOLLOWED.match(name)]
    return {name: new[name] for name in loose if name not in large}, [*whole, *({name: new[name]} for name in large)]


def _key(batch: Files) -> str:
    name = next(iter(batch))
    return sealed_folder(name) or name
