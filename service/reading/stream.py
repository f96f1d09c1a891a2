"""Long answers: server-sent events, and logs that are followed. None of them holds a pool thread while it waits.

Each keeps one connection and a bounded backlog, and there is a bound on how many of them are open.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path

from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from jobs.disk.files import regular
from jobs.events import Event
from jobs.redis.feed import Feed
from jobs.text.units import format_duration
from service.answers import EVENT
from service.answers.conversion import event_answer, unread_event
from service.errors import TooManyStreams

KEEP_ALIVE = b": keep-alive\n\n"


class Streams:
    """How many long answers this process has open, and how many it may have."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.open = 0

    def require(self) -> None:
        """Raises TooManyStreams where one more would be too many."""
        if self.open >= self.most:
            raise TooManyStreams(
                f"{self.open} streams are open, which is the limit",
                hint=f"close some, or try again in {format_duration(TooManyStreams.retry_after_s)}",
            )


class Stream(StreamingResponse):
    """An answer that lasts until `content` ends, or the reader leaves. Raises TooManyStreams when it is called."""

    def __init__(self, streams: Streams, content: AsyncIterator[bytes], media_type: str) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(content, media_type=media_type, headers=headers)
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        self._streams.require()
        self._streams.open += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._streams.open -= 1


def frame(event: Event) -> bytes:
    """A server-sent event: `id` is the event's number, `event` its type, `data` its JSON."""
    shown = event_answer(event)
    return _frame(event.number, event.type, EVENT.dump_json(EVENT.validate_python(shown)).decode())


def unread_frame(job: str, number: int, raw: bytes) -> bytes:
    """The same of an event that this version cannot read."""
    shown = unread_event(job, number, raw)
    return _frame(number, str(shown["type"]), json.dumps(shown, ensure_ascii=False))


def _frame(number: int, kind: str, data: str) -> bytes:
    return f"id: {number}\nevent: {kind}\ndata: {data}\n\n".encode(errors="replace")


async def kept_alive(frames: AsyncGenerator[bytes], keep_alive_s: float) -> AsyncIterator[bytes]:
    """The same, with a comment each time that all has been quiet for so long."""
    upcoming: asyncio.Task[bytes] | None = None
    try:
        while True:
            upcoming = upcoming or asyncio.create_task(_next(frames))
            if not (await asyncio.wait((upcoming,), timeout=keep_alive_s))[0]:
                yield KEEP_ALIVE
                continue
            arrived, upcoming = upcoming, None
            try:
                yield arrived.result()
            except StopAsyncIteration:
                return
    finally:
        if upcoming is not None:
            upcoming.cancel()
            await asyncio.wait((upcoming,))
        await frames.aclose()


async def _next(frames: AsyncIterator[bytes]) -> bytes:
    return await anext(frames)


async def event_stream(feed: Feed, job: str, *, after: int, keep_alive_s: float) -> AsyncIterator[bytes]:
    """Frames of the job's events, to its last; a comment when all is quiet."""
    yield b": following\n\n"  # headers and a first byte at once, so that clients know they are connected
    async for delivery in feed.follow(job, after=after, idle_s=keep_alive_s):
        yield b"".join(each.frame for each in delivery) or KEEP_ALIVE


# -- trainer log -------------------------------------------------------------------------------------------------------
# A trainer's log for clients: only whole lines, so that no chunk splits a secret (`redaction.py`).
#
# A line ends with a newline or, in a progress bar, with a carriage return. The last line is held back while it may
# still grow. A line that is too long to redact is left out, and a note takes its place.

PIECE_BYTES = 64 * 1024
"""What a followed log is read in, and the longest line."""
TAIL_BYTES = 1024 * 1024
LOOK_S = 0.5
_LINE_END = re.compile(rb"[\r\n]")


class TrainerLog:
    """Reads on from byte `offset`. From inside a line it begins at the next one, from beyond the end at the end."""

    def __init__(self, file: Path, offset: int) -> None:
        self._file = file
        self._seen: tuple[int, int] | None = None
        self.offset = min(offset, (self._stat() or (0, 0))[1])
        """Byte of the file to resume from."""

    def begin_at_tail(self, lines: int) -> None:
        """Go to the beginning of the last so many lines, as far as they are in the last MiB."""
        try:
            with open(self._file, "rb", opener=regular) as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - TAIL_BYTES))
                last = file.read(TAIL_BYTES).splitlines(keepends=True)
        except FileNotFoundError:
            return
        self.offset = size - sum(map(len, last[-lines:] if lines else []))

    @property
    def changed(self) -> bool:
        """Whether the file is not what it was at the last `read`: one stat."""
        return self._stat() != self._seen

    def read(self, most: int, *, ended: bool) -> str:
        """The next lines, at most `most` bytes of them. `ended`: nobody writes any more, so the last line counts.

        Empty with `offset` moved: a part of a line that is left out. A file that was replaced, or cut, is read from its
        beginning; one that is not there yet is empty.
        """
        try:
            with open(self._file, "rb", opener=regular) as file:
                state = os.fstat(file.fileno())
                if (self._seen and self._seen[0] != state.st_ino) or state.st_size < self.offset:
                    self.offset = 0
                self._seen = state.st_ino, state.st_size
                file.seek(max(0, self.offset - 1))
                before = file.read(min(1, self.offset))
                raw = file.read(most)
        except FileNotFoundError:
            self._seen = None
            return ""
        if before and not _LINE_END.match(before):  # inside a line
            end = _LINE_END.search(raw)
            self.offset += end.end() if end else len(raw)
            return ""
        whole = max(raw.rfind(b"\n"), raw.rfind(b"\r")) + 1
        if whole == 0 and len(raw) == most:
            self.offset += most
            return f"[a line of more than {most:,} bytes is left out]\n"
        if whole < len(raw) < most and ended:
            whole = len(raw)
        self.offset += whole
        return raw[:whole].decode(errors="replace")

    def _stat(self) -> tuple[int, int] | None:
        """(inode, bytes), if there is a file."""
        try:
            state = os.stat(self._file)
        except FileNotFoundError:
            return None
        return state.st_ino, state.st_size


async def follow_log(log: TrainerLog, feed: Feed, job: str, *, after: int | None) -> AsyncIterator[bytes]:
    """The log so far, then what is appended, until the job has ended and everything is sent.

    `after`: number of the event at which the job had not ended yet; None: it has. Looked for twice a second without a
    thread; only what is there to read is read in one.
    """
    yield b""  # headers at once, so that clients know they are connected
    end = asyncio.create_task(feed.ended(job, after=after)) if after is not None else None
    try:
        while True:
            over = end is None or end.done()  # asked first: what was written until then is read below
            start = -1 if over or log.changed else log.offset
            while log.offset != start:
                start = log.offset
                if text := await run_in_threadpool(log.read, PIECE_BYTES, ended=over):
                    yield text.encode()
            if end is None:
                return
            if over:
                end.result()  # raises what went wrong instead
                return
            await asyncio.wait({end}, timeout=LOOK_S)
    finally:
        if end is not None:
            end.cancel()
