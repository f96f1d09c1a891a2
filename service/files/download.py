"""Streams a file to a client: whole, or a range of it, so that an interrupted download resumes.

A pool thread reads a block, then the block is sent; a slow client blocks no thread. Memory: one block per download.
"""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator
from email.utils import formatdate
from typing import Protocol

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from service.errors import error_response

BLOCK = 256 * 1024
log = logging.getLogger("longhaul.service")


class Gone(Exception):
    """What was announced cannot be read any more."""


class DownloadSource(Protocol):
    """What is downloaded. Everything but `read` is known before the first byte is sent."""

    name: str
    """Name that the client may save it under."""
    media_type: str
    size: int
    etag: str
    """Strong: the same only if every byte is the same."""
    modified: float

    def read(self, offset: int, most: int) -> bytes:
        """At least one byte from `offset` (below `size`) on. Raises Gone, OSError."""

    def close(self) -> None:
        """Let go of open files."""


def answer(request: Request, source: DownloadSource) -> Response:
    """200, 206 for a range, 416 for one beyond the end; for HEAD the headers of the whole. Closes the source."""
    headers = {
        "Accept-Ranges": "bytes",
        "Content-Disposition": f'attachment; filename="{source.name}"',
        "Content-Type": source.media_type,
        "ETag": source.etag,
        "Last-Modified": formatdate(source.modified, usegmt=True),
    }
    if request.method == "HEAD":
        source.close()
        return Response(headers=headers | {"Content-Length": str(source.size)})
    wanted = request.headers.get("Range", "")
    same = request.headers.get("If-Range", source.etag) == source.etag
    part = _part(wanted, source.size) if same else None
    start, stop = part or (0, source.size)
    if part and start >= stop:
        source.close()
        message = f"{wanted} is beyond the end: there are {source.size} bytes"
        beyond = {"Content-Range": f"bytes */{source.size}"}
        return error_response(416, "range_not_satisfiable", message, param="Range", headers=beyond)
    headers["Content-Length"] = str(stop - start)
    if part:
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{source.size}"
    return _Download(source, start, stop, 206 if part else 200, headers)


def _part(wanted: str, size: int) -> tuple[int, int] | None:
    """First byte and the one behind the last; none of them if `wanted` begins beyond the end. None: all is sent.

    That is what RFC 9110 has for a header that is malformed, in other units, or for several ranges at once.
    """
    given = re.fullmatch(r"bytes=(\d{0,18})-(\d{0,18})", wanted.strip(), re.ASCII | re.IGNORECASE)
    if given is None or not (given[1] or given[2]):
        return None
    if not given[1]:
        return max(0, size - int(given[2])), size
    first, behind = int(given[1]), int(given[2]) + 1 if given[2] else size
    if given[2] and behind <= first:
        return None
    return first, min(behind, size)


class _Download(StreamingResponse):
    def __init__(self, source: DownloadSource, start: int, stop: int, status: int, headers: dict[str, str]) -> None:
        super().__init__(_blocks(source, start, stop), status, headers)
        self._source = source

    async def stream_response(self, send: Send) -> None:
        try:
            await super().stream_response(send)
        except (Gone, OSError) as error:
            # Without its last bytes the connection is closed, and the client knows that it has not got everything.
            log.warning("the download of %s is broken off: %s", self._source.name, error)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._source.close()


async def _blocks(source: DownloadSource, start: int, stop: int) -> AsyncIterator[bytes]:
    while start < stop:
        block = await run_in_threadpool(source.read, start, min(BLOCK, stop - start))
        start += len(block)
        yield block
