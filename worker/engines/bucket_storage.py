"""A run directory on a box and on a node that share a bucket alone, kept alike through it.

    URL/<job>/…              the files of the run directory, by their names there
    URL/<job>/.box.json      what the box has put there: all that the node begins with, then its orders
    URL/<job>/.node.json     what the node has put there, and has: what is not in it any more, it has removed
    URL/.stores/…            prepared models and data (`bucket_stores.py`)

A listing is written after the files that it names, with size and time of each. A file is not copied again while these
stay, on either side, in this attempt or a later one. Each side writes only what is its own. A checkpoint, and the final
model, is listed once it is there whole, and gets its name here once each file has the sha256 of its manifest.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from jobs.disk.files import replace_folder
from jobs.disk.rundir import RunDir
from worker.engines.bucket import Bucket
from worker.engines.bucket_stores import receive_stores, send_stores
from worker.engines.copied_file import (
    MANIFEST,
    BucketListing,
    CopiedFile,
    Files,
    append_rest,
    by_node,
    difference,
    files_in,
    in_folder,
    remove,
    sealed_folder,
)
from worker.engines.engine import EngineUnavailable
from worker.engines.handover import Handover

log = logging.getLogger("longhaul.engines")
Side = Literal["box", "node"]
EVERY_S = 2.0
"""Between two copies in one direction: each is a few requests to the bucket, and costs."""
LARGE = 8 * 2**20
"""Bytes from which a file is copied in the background, so that orders and events pass it."""
BYTES_PER_S = 2**20
"""A file that grows is sent whole; so a larger one is sent less often."""


class BucketStorage:
    """One side of one run directory, for one attempt. The first call copies all that an attempt begins with; later ones
    return soon, and copy what is large in the background.
    """

    def __init__(self, url: str, side: Side, every_s: float = EVERY_S) -> None:
        """Raises ValueError: nothing that is installed reads this URL."""
        self._bucket, self._side, self._every_s = Bucket(url), side, every_s
        self._push_at = self._pull_at = 0.0
        self._attempt: int | None = None
        """None: nothing is copied yet."""
        self._report_alone: str | None = None
        """The only file that is copied, where the task was started before."""
        self._sent: Files = {}
        """What is in the bucket, as far as this side's listing tells of it."""
        self._listed: Files | None = None
        self._known: Files = {}
        """What the other side has put there and is here."""
        self._due: dict[str, float] = {}
        """When a file that grows may be sent again."""
        self._background = ThreadPoolExecutor(1, thread_name_prefix="bucket")
        self._sending: Future[Files] | None = None
        self._receiving: Future[Files] | None = None

    def push(self, run: Path) -> None:
        """Send what is new of what this side writes."""
        if time.monotonic() >= self._push_at:
            self._push(RunDir(run), wait=False)
            self._push_at = time.monotonic() + self._every_s

    def finish(self, run: Path) -> None:
        """Send it, and return when all of it is there, also what is large."""
        self._push(RunDir(run), wait=True)

    def _push(self, run: RunDir, *, wait: bool) -> None:
        if self._attempt is None:
            if self._side == "box":
                self._begin(run)
            return
        self._send(run, self._is_mine if (alone := self._report_alone) is None else alone.__eq__, wait=wait)

    def pull(self, run: Path) -> None:
        """Receive what is new of what the other side writes."""
        if time.monotonic() >= self._pull_at:
            self._pull(RunDir(run))
            self._pull_at = time.monotonic() + self._every_s

    def _pull(self, run: RunDir) -> None:
        if self._attempt is None or self._report_alone is not None:
            if self._side == "node":
                self._join(run)
            return
        listing = self._listing(run, "node" if self._side == "box" else "box")
        if listing is not None and listing.attempt == self._attempt:
            self._receive(run, listing.files, lambda name: not self._is_mine(name), wait=False)

    # -- the first copy ------------------------------------------------------------------------------------------

    def _begin(self, run: RunDir) -> None:
        """All that a trainer needs goes there, unless it is there from the attempt before. Before this one has orders,
        those of earlier ones alone.
        """
        attempt = run.record().attempt
        before, left = self._listing(run, "box"), self._listing(run, "node")
        self._sent = {} if before is None else before.files
        if Handover(run.path, attempt).orders() is None:
            if before is not None:
                self._send_orders(run, before.attempt)
            return
        if before is not None and left is not None and left.attempt == before.attempt:
            if attempt - before.attempt <= 1:  # else the job has trained elsewhere since, and gone further
                self._known = files_in(run.path)
                self._receive(run, left.files, lambda name: by_node(name) and name[:9] != "attempts/", wait=True)
            self._sent = {name: file for name, file in self._sent.items() if not by_node(name)} | left.files
        send_stores(self._bucket, run)
        self._send(run, lambda _: True, attempt=attempt, wait=True)
        self._known = files_in(run.path)
        self._attempt = attempt

    def _send_orders(self, run: RunDir, attempt: int) -> None:
        """To a node that may still be at work on an attempt before."""
        here = {name: file for name, file in files_in(run.path).items() if name.endswith(".orders.json")}
        self._sent |= self._put(run, {name: file for name, file in here.items() if self._sent.get(name) != file})
        self._list(run, attempt)

    def _join(self, run: RunDir) -> None:
        """All that the box has put there comes here. Of an attempt of which a node has reported, that alone: it is not
        trained a second time.
        """
        listing, left = self._listing(run, "box"), self._listing(run, "node")
        if listing is None:
            raise EngineUnavailable(f"the box has put nothing of job {run.id} into the bucket")
        report = f"attempts/{listing.attempt}.node.json"
        self._known = files_in(run.path)
        if left is not None and left.attempt == listing.attempt and report in left.files:
            self._receive(
                run, listing.files | left.files, lambda name: name.endswith((".orders.json", report)), wait=True
            )
            self._sent, self._attempt, self._report_alone = left.files, left.attempt, report
            return
        self._receive(run, listing.files, lambda _: True, wait=True)
        receive_stores(self._bucket, run)
        self._sent = {name: file for name, file in listing.files.items() if by_node(name)}
        self._list(run, listing.attempt)
        self._attempt = listing.attempt

    # -- sending -------------------------------------------------------------------------------------------------

    def _send(
        self, run: RunDir, owned: Callable[[str], bool], *, wait: bool, attempt: int | None = None
    ) -> None:  # fmt: skip
        attempt = attempt or self._attempt
        assert attempt is not None, "what is sent belongs to an attempt"
        here = {name: file for name, file in files_in(run.path).items() if owned(name)}
        gone = [name for name in self._sent if owned(name) and name not in here]
        self._sent = {name: file for name, file in self._sent.items() if name not in gone}
        if self._sending is not None and (wait or self._sending.done()):
            done, self._sending = self._sending, None
            self._sent |= done.result()
        small, batches = _new(here, self._sent)
        for name, file in small.items():
            if wait or time.monotonic() >= self._due.get(name, 0.0):
                self._due[name] = time.monotonic() + file.bytes / BYTES_PER_S
                self._sent |= self._put(run, {name: file})
        self._list(run, attempt)
        for batch in batches:
            if wait:
                self._sent |= self._put(run, batch)
                self._list(run, attempt)
            elif self._sending is None:
                self._sending = self._background.submit(self._put, run, batch)
        for name in gone:
            self._bucket.remove(f"{run.id}/{name}")

    def _put(self, run: RunDir, files: Files) -> Files:
        """These; none of them, where one is gone: the next look finds what is there then."""
        try:
            for name in files:
                self._bucket.put(run.path / name, f"{run.id}/{name}")
        except FileNotFoundError:
            return {}
        return files

    def _list(self, run: RunDir, attempt: int) -> None:
        if self._sent != self._listed:
            listing = BucketListing(attempt=attempt, files=self._sent)
            self._bucket.write(f"{run.id}/.{self._side}.json", listing.model_dump_json().encode())
            self._listed = dict(self._sent)

    def _listing(self, run: RunDir, side: Side) -> BucketListing | None:
        raw = self._bucket.read(f"{run.id}/.{side}.json")
        try:
            return None if raw is None else BucketListing.model_validate_json(raw)
        except ValidationError as error:
            raise EngineUnavailable(f"{run.id}/.{side}.json is no listing: {error.errors()[0]['msg']}") from error

    # -- receiving -----------------------------------------------------------------------------------------------

    def _receive(self, run: RunDir, listed: Files, owned: Callable[[str], bool], *, wait: bool) -> None:
        listed = {name: file for name, file in listed.items() if owned(name)}
        if self._receiving is not None and self._receiving.done():
            done, self._receiving = self._receiving, None
            self._known |= done.result()
        small, batches = _new(listed, self._known)
        for name, file in small.items():
            # What the node says of its end is read when all is here that it left.
            if wait or not (name.endswith(".node.json") and batches):
                self._known |= self._get(run, {name: file})
        for batch in batches:
            if wait:
                self._known |= self._get(run, batch)
            elif self._receiving is None:
                self._receiving = self._background.submit(self._get, run, batch)
        if self._side == "box":
            removed = [name for name in files_in(run.path) if owned(name) and name not in listed]
            remove(run.path, [name for name in removed if sealed_folder(name) or name.startswith("evaluations/")])

    def _get(self, run: RunDir, files: Files) -> Files:
        """Of a folder with a manifest all, under a name of its own until it is whole. What is replaced in the bucket
        meanwhile is listed anew later, and received then.
        """
        folder = sealed_folder(next(iter(files)))
        target = run.path / (folder or ".")
        place = target if folder is None else target.with_name(f"tmp-{target.name}-{uuid.uuid4().hex[:8]}")
        try:
            for name, file in files.items():
                self._get_file(f"{run.id}/{name}", file, place / name.removeprefix(f"{folder}/"))
            if folder is not None and (wrong := difference(place)) is not None:
                log.warning("job %s: %s is not taken from the bucket: %s", run.id, folder, wrong)
            elif folder is not None:
                replace_folder(place, target)
        except FileNotFoundError as error:
            log.warning("job %s: what is listed is not in the bucket: %s", run.id, error)
        finally:
            if folder is not None:
                shutil.rmtree(place, ignore_errors=True)
        return files

    def _get_file(self, name: str, file: CopiedFile, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
        try:
            self._bucket.get(name, temporary)
            if not append_rest(temporary, target):
                os.replace(temporary, target)
            os.utime(target, ns=(file.modified_ns, file.modified_ns))
        finally:
            temporary.unlink(missing_ok=True)

    def _is_mine(self, name: str) -> bool:
        return by_node(name) == (self._side == "node")


def _new(files: Files, there: Files) -> tuple[Files, list[Files]]:
    """What differs: small files, the smallest first, and what is copied in the background, batch after batch."""
    new = {name: file for name, file in files.items() if there.get(name) != file}
    loose = sorted((name for name in new if sealed_folder(name) is None), key=lambda name: new[name].bytes)
    folders = sorted({folder for name in new if (folder := sealed_folder(name)) is not None})
    whole = [in_folder(folder, files) for folder in folders if f"{folder}/{MANIFEST}" in files]
    large = [{name: new[name]} for name in loose if new[name].bytes > LARGE]
    return {name: new[name] for name in loose if new[name].bytes <= LARGE}, [*whole, *large]
