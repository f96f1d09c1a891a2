"""RQ's jobs as workers take them: our tickets and nothing else, whatever was written to Redis.

Arguments are JSON, never pickle (a pickle is a program). What is read is bounded before it is unpacked: RQ compresses a
job's data, and a kilobyte can be made to hold a gigabyte. All is looked at when it is read, for RQ reads tickets on
more than one way: its maintenance would run the callback of one that no worker has ever taken.
"""

from __future__ import annotations

import zlib
from typing import Any

from rq.job import Job

from jobs.redis.queue import TICKET_FUNCTION

MOST_BYTES = 64 * 1024
"""Ours have some 400."""
_EXTRAS = (
    "_success_callback_name", "_failure_callback_name", "_stopped_callback_name", "webhooks", "_dependency_ids",
    "_instance", "_kwargs", "retries_left", "repeats_left", "group_id",
)  # fmt: skip
"""What RQ can be told to do besides. Ours ask for none of it."""


class NotOurs(ValueError):
    """Somebody else wrote it."""


class Ticket(Job):
    """An RQ job that can be nothing else than one of `jobs.redis.queue.Tickets`, but for its stage."""

    def restore(self, raw_data: dict[bytes, bytes]) -> Any:
        """Take over what Redis holds. Raises NotOurs; RQ's DeserializationError or other errors: it cannot be read."""
        if sum(map(len, raw_data.values())) > MOST_BYTES:
            raise NotOurs(f"a ticket of more than {MOST_BYTES:,} bytes")
        for packed in (raw_data.get(b"data", b""), raw_data.get(b"exc_info", b"")):
            unpacking = zlib.decompressobj()
            try:
                unpacking.decompress(packed, MOST_BYTES)
            except zlib.error:  # RQ takes it as it is, then
                continue
            if unpacking.unconsumed_tail:
                raise NotOurs(f"a ticket that unpacks to more than {MOST_BYTES:,} bytes")
        super().restore(raw_data)
        if self.func_name != TICKET_FUNCTION:
            raise NotOurs(f"a ticket that asks for {str(self.func_name)[:80]!r}")
        if self.timeout != -1:
            raise NotOurs(f"a ticket with a time limit (timeout={self.timeout}), which would end a long training")
        if extras := [name.strip("_") for name in _EXTRAS if getattr(self, name, None)]:
            raise NotOurs(f"a ticket with {', '.join(extras)}")
