"""Connections as uvicorn holds them: how many, how much of a head, and how long a client may keep us waiting.

uvicorn itself waits for ever for the head of a request, and for a client that does not read its answer: who opens
connections and says nothing, or asks for a model and goes to sleep, would fill the process.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_WITHIN_S = 15.0
TAKEN_WITHIN_S = 120.0
"""Seconds in which the client takes nothing although all buffers are full: then it is gone."""
MOST = 2000
"""Connections; streams have a bound of their own (`Settings.max_streams`)."""


class RequestTimeouts(H11Protocol):
    """HTTP/1.1; closes a connection whose head does not come in time, or whose answer is not taken."""

    _deadline: asyncio.TimerHandle | None = None
    """Of the head."""
    _taken_by: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """A request has to follow."""
        super().connection_made(transport)
        self._follow()

    def data_received(self, data: bytes) -> None:
        """Some of a request, or all."""
        super().data_received(data)
        self._follow()

    def pause_writing(self) -> None:
        """The client does not take what is sent, and the buffer is full."""
        super().pause_writing()
        self._taken_by = self.loop.call_later(TAKEN_WITHIN_S, self.transport.abort)  # to close would flush first

    def resume_writing(self) -> None:
        """It took most of it."""
        self._forget_answer()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers."""
        self._stop_waiting()
        self._forget_answer()
        super().connection_lost(exc)

    def _follow(self) -> None:
        # IDLE: the head has not come as a whole. A silent connection between two requests is uvicorn's own matter.
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._stop_waiting()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_WITHIN_S, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _forget_answer(self) -> None:
        if self._taken_by is not None:
            self._taken_by.cancel()
            self._taken_by = None


def raise_file_limit() -> None:
    """Let this process open as many files as connections and downloads need, as far as that is its own to decide."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * MOST if hard == resource.RLIM_INFINITY else min(2 * MOST, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


LIMITS: dict[str, Any] = {
    "http": RequestTimeouts,
    "ws": "none",
    "h11_max_incomplete_event_size": 64 * 1024,  # of a head; more is 400
    "limit_concurrency": MOST,  # connections, followers of streams included; more are answered 503
    "server_header": False,
    # A client must not name its own address. Behind a proxy all share one address; limits are by key there.
    "proxy_headers": False,
    # uvicorn's 5 s would close a connection just as a client that asks every 5 s sends its next question.
    "timeout_keep_alive": 75,
    # Followers of a stream never leave by themselves; they come back with Last-Event-ID.
    "timeout_graceful_shutdown": 2,
    "log_config": None,
    "access_log": False,
}
"""Of `uvicorn.run` and `uvicorn.Config`."""
