"""The worker `generate`: takes requests that somebody waits for (jobs/redis/requests.py), and answers them.

Each kind of request has a handler and a thread of its own, which does one request at a time. Nothing that trains
depends on any of it: what goes wrong is the answer to one request.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from pydantic import JsonValue

from jobs.errors import LonghaulError, StageError, StoreUnavailable
from jobs.process.secrets import redact
from jobs.redis.connection import connect
from jobs.redis.requests import Request, Requests
from jobs.redis.store import Store
from worker.heartbeat import Fitness, first_heartbeat, forget, report
from worker.settings import WorkerSettings

log = logging.getLogger("longhaul.worker")
ROLE = "generate"
HEARTBEAT_S = 5.0
RETRY_S = 1.0
INTERNAL = "an internal error; the log of the worker `generate` has the details"
STOPPING = "the worker `generate` was stopped while it worked on this"


class Abandoned(Exception):
    """Nobody waits for the answer any more: leave the work."""


class TurnPassed(Exception):
    """Other clients wait: the request continues at its next turn."""


class RequestFailed(LonghaulError):
    """The answer to a request is this error."""

    def __init__(self, message: str, *, code: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.code = code  # type: ignore[misc]  # of this one
        self.hint = hint


class AnswerWriter:
    """The answer to one request, part by part."""

    def __init__(self, requests: Requests, request: Request, stop: threading.Event) -> None:
        self._requests, self._id, self._stop = requests, request.id, stop
        self._parts: int = request.progress.get("parts", 0)
        self._heard = time.monotonic()

    def add(self, type: str, data: dict[str, JsonValue]) -> None:
        """Another part; `done` is the last. Raises Abandoned, StoreUnavailable."""
        self._parts += 1
        if not self._requests.answer(self._id, self._parts, type, data):
            raise Abandoned
        self._heard = time.monotonic()

    def hold(self) -> None:
        """Say that the work continues, every second or so.

        Raises Abandoned, RequestFailed (the worker stops), StoreUnavailable.
        """
        if self._stop.is_set():
            raise RequestFailed(STOPPING, code="worker_stopped", hint="ask again once it runs")
        if time.monotonic() - self._heard >= RETRY_S:
            self._heard = time.monotonic()
            if not self._requests.hold(self._id):
                raise Abandoned

    def pass_turn(self, progress: Mapping[str, JsonValue]) -> None:
        """Where other clients wait, raise TurnPassed: `progress` is that of the request at its next turn.

        Raises StoreUnavailable, too.
        """
        if self._requests.pass_turn(self._id, {**progress, "parts": self._parts}):
            raise TurnPassed

    def fail(self, error: Exception) -> None:
        """An error as the last part."""
        hint: str | None
        match error:
            case StageError():
                code, message, hint = error.detail_code, str(error), error.hint
            case LonghaulError():
                code, message, hint = error.code, str(error), error.hint
            case _:
                code, message, hint = "internal_error", INTERNAL, None
        self.add("error", {"code": code, "message": redact(message), "hint": hint})


class RequestHandler(Protocol):
    """Answers requests of one kind, one at a time, in a thread that lasts as long as the worker."""

    @property
    def kind(self) -> str:
        """Of request."""

    def answer(self, request: Request, answer: AnswerWriter) -> None:
        """Add parts to the answer, `done` last, and `hold` it in between. What it raises is the answer."""

    def idle(self) -> None:
        """Called every second or so while there is nothing to do."""

    def close(self) -> None:
        """Called at the end."""


def serve_requests(settings: WorkerSettings, handlers: Sequence[RequestHandler], role: str = ROLE) -> int:
    """Answer requests until SIGTERM. Returns the exit code: 1 where a handler's thread has ended before."""
    stop = threading.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: stop.set())
    threads = [threading.Thread(target=serve, args=(settings, each, stop), name=each.kind) for each in handlers]
    for thread in threads:
        thread.start()
    store, heartbeat = Store(connect(settings.redis_url)), first_heartbeat(role, settings)
    fitness = Fitness(role, settings)
    while not stop.is_set() and all(thread.is_alive() for thread in threads):
        fitness.check()
        report(store, heartbeat.with_health(fitness.why))
        stop.wait(HEARTBEAT_S)
    stopped = stop.is_set()
    stop.set()
    for thread in threads:
        thread.join()
    forget(store, heartbeat.name)
    return 0 if stopped else 1


def serve(settings: WorkerSettings, handler: RequestHandler, stop: threading.Event) -> None:
    """Requests of one kind, until told to stop. With Redis away it waits; whatever else goes wrong, it continues."""
    requests = Requests(connect(settings.redis_url))
    try:
        while not stop.is_set():
            try:
                request = requests.take(handler.kind)
                if request is None:
                    handler.idle()
                    requests.wait(handler.kind, 1.0)
                else:
                    serve_one(handler, request, AnswerWriter(requests, request, stop))
            except StoreUnavailable as error:
                log.warning("no request can be taken: %s", error)
                stop.wait(RETRY_S)
            except Exception:
                log.exception("the worker `%s` continues after an internal error", handler.kind)
                stop.wait(RETRY_S)
    finally:
        handler.close()


def serve_one(handler: RequestHandler, request: Request, answer: AnswerWriter) -> None:
    """One request; whatever is raised is its answer, if somebody still waits."""
    began = time.monotonic()
    try:
        try:
            handler.answer(request, answer)
        except (Abandoned, TurnPassed, StoreUnavailable):
            raise
        except Exception as error:
            expected = isinstance(error, LonghaulError)
            log.log(logging.INFO if expected else logging.ERROR, "%s %s of job %s failed: %s",
                    request.kind, request.id, request.job, error, exc_info=not expected)  # fmt: skip
            answer.fail(error)
            return
    except Abandoned:
        log.info("%s %s of job %s was given up: nobody waits for it", request.kind, request.id, request.job)
    except TurnPassed:
        log.info("%s %s of job %s continues at its next turn", request.kind, request.id, request.job)
    else:
        log.info("%s %s of job %s: %.1f s", request.kind, request.id, request.job, time.monotonic() - began)
