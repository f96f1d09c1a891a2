"""The box's side of a run directory that travels through a bucket (`bucket_copies.py`)."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from jobs.attempt import Finished
from jobs.disk.rundir import RunDir
from worker.engines.bucket import Bucket
from worker.engines.bucket_copies import EVERY_S, Receiver, Sender, read_listing, unavailable
from worker.engines.bucket_stores import send_stores
from worker.engines.copied_file import BucketListing, CopiedFile, Files, by_node, files_in, remove, sealed_folder
from worker.engines.engine import EngineRefused, EngineUnavailable
from worker.engines.handover import Handover, NodeReport

log = logging.getLogger("longhaul.engines")


class BoxStorage:
    """Of one run directory, for one attempt. The first `push` that finds its orders copies all that it begins with;
    later calls return soon, and copy what is large in the background.
    """

    def __init__(self, url: str, every_s: float = EVERY_S) -> None:
        """Raises ValueError: nothing that is installed reads this URL."""
        self._bucket, self._every_s = Bucket(url), every_s
        self._push_at = self._pull_at = 0.0
        self._sender: Sender | None = None
        """None: nothing is copied yet."""
        self._receiver: Receiver | None = None
        self._report = ""
        """Name of the node's report on this attempt."""
        self._start: str | None = None
        self._theirs: set[str] = set()
        """What this start of the task has had."""
        self._all_here = True

    def push(self, run: Path) -> None:
        """Send what is new of what the box writes."""
        if time.monotonic() >= self._push_at:
            self._send(run, wait=False)
            self._push_at = time.monotonic() + self._every_s

    def finish(self, run: Path) -> None:
        """Send it, and return when all of it is there."""
        self._send(run, wait=True)

    def _send(self, run: Path, *, wait: bool) -> None:
        with unavailable():
            if self._sender is None:
                self._begin(RunDir(run))
            else:
                self._sender.send(lambda name: not by_node(name), wait=wait)

    def pull(self, run: Path) -> bool:
        """Receive what is new of what the node writes. Returns whether all is here that it has listed and that can be
        had. Raises EngineRefused: it has ended well, and what it left is not in the bucket.
        """
        if self._sender is not None and self._receiver is not None and time.monotonic() >= self._pull_at:
            with unavailable():
                listing = read_listing(self._bucket, f"{run.name}/{self._sender.place}/.node.json")
                if listing is not None:
                    self._all_here = self._pull(run, self._receiver, listing)
            self._pull_at = time.monotonic() + self._every_s
        return self._all_here

    def _pull(self, run: Path, receiver: Receiver, listing: BucketListing) -> bool:
        listed = {name: file for name, file in listing.files.items() if by_node(name)}
        report = {name: listed.pop(name) for name in [self._report] if name in listed}
        # What the node says is read when all is here that it left, and tells of.
        here = receiver.receive(listed, wait=False)
        lost = receiver.given_up(listed)
        if here:
            here = receiver.receive(report, wait=False)
        elif lost is not None and self._has_ended(run, report):
            raise EngineRefused(f"what its node left is not in the bucket as it is listed: {lost}")
        if self._start in (None, listing.start):
            self._remove(run, receiver, self._theirs - listed.keys())
        self._start, self._theirs = listing.start, set(listed)
        return here or lost is not None

    def _has_ended(self, run: Path, report: Files) -> bool:
        """Whether the node says so."""
        said = [self._bucket.read(f"{run.name}/{file.place}/{name}") for name, file in report.items()]
        return any(each is not None and NodeReport.model_validate_json(each).code is not None for each in said)

    def _remove(self, run: Path, receiver: Receiver, gone: set[str]) -> None:
        """What this start of the task had, and has no more."""
        removed = [name for name in gone if sealed_folder(name) or name.startswith("evaluations/")]
        remove(run, removed)
        receiver.known = {name: file for name, file in receiver.known.items() if name not in removed}

    # -- the first copy ------------------------------------------------------------------------------------------

    def _begin(self, run: RunDir) -> None:
        """What the node of the attempt before has left comes here; then all that a trainer needs goes there. Before
        this attempt has orders, those of earlier ones alone do.
        """
        attempt = run.record().attempt
        orders = Handover(run.path, attempt).orders()
        before = read_listing(self._bucket, f"{run.id}/.box.json")
        if orders is None:
            if before is not None:
                self._sender_of(run, before).send(lambda name: name.endswith(".orders.json"), wait=True)
            return
        receiver = Receiver(self._bucket, run.path)
        old = {} if before is None else _objects(before.files)
        there = {} if before is None else before.files
        if before is not None and (left := read_listing(self._bucket, f"{run.id}/{before.place}/.node.json")):
            received = self._receive_left(run, receiver, before.attempt, attempt, left.files)
            old, there = old | _objects(received), there | received
        send_stores(self._bucket, run)
        here = files_in(run.path)
        kept = {name: there[name] for name, file in here.items() if self._is_there(run, name, file, there.get(name))}
        head = BucketListing(attempt=attempt, token=orders.token, files=kept)
        sender = self._sender_of(run, head)
        sender.send(lambda _: True, wait=True)
        self._remove_superseded(run, old.keys() - _objects(sender.sent).keys())
        receiver.known = files_in(run.path)
        self._report = f"attempts/{attempt}.node.json"
        self._theirs = set(filter(by_node, sender.sent))  # a node lists nothing before it has received all of it
        self._sender, self._receiver = sender, receiver

    def _sender_of(self, run: RunDir, head: BucketListing) -> Sender:
        return Sender(self._bucket, run.path, head.place, f"{run.id}/.box.json", head)

    def _receive_left(self, run: RunDir, receiver: Receiver, before: int, attempt: int, left: Files) -> Files:
        """What of it is here then: nothing, where the job has trained elsewhere since."""
        for number in range(before + 1, attempt):
            if any(not isinstance(line, Finished) for line in run.attempt_lines(number)):
                log.info("job %s: attempt %d has trained on without what attempt %d left", run.id, number, before)
                return {}
        left = {name: file for name, file in left.items() if by_node(name) and not name.startswith("attempts/")}
        receiver.receive(left, wait=True)
        return {name: file for name, file in left.items() if file.same(receiver.known.get(name))}

    def _is_there(self, run: RunDir, name: str, file: CopiedFile, found: CopiedFile | None) -> bool:
        """Whether the bucket has this file of a folder with a manifest; others change under their names."""
        if found is None or not found.same(file) or sealed_folder(name) is None:
            return False
        return self._bucket.size(f"{run.id}/{found.place}/{name}") == found.bytes

    def _remove_superseded(self, run: RunDir, names: set[str]) -> None:
        for name in names:
            try:
                self._bucket.remove(f"{run.id}/{name}")
            except EngineUnavailable as error:
                log.warning("job %s: an object of an earlier attempt stays in the bucket: %s", run.id, error)


def _objects(files: Files) -> dict[str, str]:
    """Their objects, below the folder of the job, and what they are."""
    return {f"{file.place}/{name}": name for name, file in files.items()}
