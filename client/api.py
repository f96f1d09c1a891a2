"""Longhaul over HTTP, for programs: every call has a timeout, every refusal is an ApiError.

with Longhaul("http://127.0.0.1:8000") as longhaul:
    job = longhaul.submit({"data": {"train": "recipes.jsonl"}})
    for event in longhaul.events(job["id"]):
        print(event["message"])
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any
from urllib.parse import quote

import requests

from jobs.state import Status

DEFAULT_URL = "http://127.0.0.1:8000"
CONNECT_S = 5.0
ANSWER_S = 30.0
STREAM_SILENCE_S = 60.0
"""The service sends a comment every 15 s; a stream that is silent for longer than this is dead."""
LAST_EVENTS = frozenset(f"job.{status}" for status in Status if status.terminal)


class ApiError(Exception):
    """The service refused. `param` is the dotted key in the job file, `hint` the way out."""

    def __init__(
        self, message: str, *, status: int, code: str, param: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.hint = hint


class Unreachable(Exception):
    """Nobody answers at the address."""


class Longhaul:
    """A connection to one service. For one thread; threads that share a service take one each."""

    def __init__(self, url: str = DEFAULT_URL, api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._key = api_key
        self._session = requests.Session()
        # Otherwise a ~/.netrc entry for the host would replace our Authorization header.
        self._session.trust_env = False
        if api_key:
            self._session.headers["Authorization"] = f"Bearer {api_key}"

    def __repr__(self) -> str:
        return f"Longhaul({self.url!r}, key {'set' if self._key else 'none'})"

    def __enter__(self) -> Longhaul:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session.close()

    def another(self) -> Longhaul:
        """The same service, for another thread."""
        return Longhaul(self.url, self._key)

    # -- jobs ----------------------------------------------------------------------------------------------------------

    def submit(
        self, job: dict[str, Any], *, idempotency_key: str | None = None, dry_run: bool = False
    ) -> dict[str, Any]:
        """A new job. Sent again when the answer is lost: a key of its own sees to it that it stays one job."""
        headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
        params = {"dry_run": "true"} if dry_run else {}
        for _ in range(2):
            try:
                return self._json("POST", "/jobs", json=job, headers=headers, params=params)
            except Unreachable:
                time.sleep(0.5)
        return self._json("POST", "/jobs", json=job, headers=headers, params=params)

    def get(self, job: str) -> dict[str, Any]:
        """One job."""
        return self._json("GET", f"/jobs/{_part(job)}")

    def list(self, *, after: str | None = None, limit: int = 20, status: str | None = None) -> dict[str, Any]:
        """A page of jobs, newest first: `data`, `has_more`, `last_id`."""
        given = {"after": after, "limit": limit, "status": status}
        return self._json("GET", "/jobs", params={key: value for key, value in given.items() if value is not None})

    def cancel(self, job: str) -> dict[str, Any]:
        """Stop for good."""
        return self._json("POST", f"/jobs/{_part(job)}/cancel")

    def pause(self, job: str) -> dict[str, Any]:
        """Give the card back until resumed."""
        return self._json("POST", f"/jobs/{_part(job)}/pause")

    def resume(self, job: str) -> dict[str, Any]:
        """Go on from the newest checkpoint."""
        return self._json("POST", f"/jobs/{_part(job)}/resume")

    # -- what happened -------------------------------------------------------------------------------------------------

    def event_page(self, job: str, *, after: int = 0, limit: int = 1000) -> dict[str, Any]:
        """A page of events above number `after`: `data`, `has_more`, `last_id`."""
        return self._json("GET", f"/jobs/{_part(job)}/events", params={"after": after, "limit": limit})

    def events(
        self, job: str, *, after: int = 0, on_trouble: Callable[[str], None] = lambda _: None
    ) -> Iterator[dict[str, Any]]:
        """Events above number `after`, live, to the job's last. Connects again, for ever, when the service goes away.

        `on_trouble` is told once per outage. Raises ApiError when the service refuses (no such job, wrong key).
        """
        wait_s, told = 0.5, False
        while True:
            try:
                with self._open_stream(job, after) as answer:
                    if answer.status_code == 204:
                        return
                    for event in _frames(answer):
                        wait_s, told = 0.5, False
                        after = event["number"]
                        yield event
                        if event["type"] in LAST_EVENTS:
                            return
                # Closed before the job's last event: the service stops, or a proxy did not want to wait.
            except (requests.RequestException, Unreachable) as error:
                if not told:
                    on_trouble(f"the service does not answer ({type(error).__name__}); trying again")
                    told = True
            time.sleep(wait_s)
            wait_s = min(5.0, wait_s * 2)

    def _open_stream(self, job: str, after: int) -> requests.Response:
        answer = self._session.get(
            f"{self.url}/jobs/{_part(job)}/events",
            headers={"Accept": "text/event-stream", "Last-Event-ID": str(after)},
            timeout=(CONNECT_S, STREAM_SILENCE_S),
            stream=True,
        )
        if answer.status_code >= 500:
            raise Unreachable(f"{self.url} answers {answer.status_code}")
        _raise_for(answer)
        return answer

    def metrics(self, job: str, *, after_step: int = -1, limit: int = 1000) -> dict[str, Any]:
        """A page of metric rows with a step above `after_step`."""
        return self._json("GET", f"/jobs/{_part(job)}/metrics", params={"after_step": after_step, "limit": limit})

    def logs(self, job: str, *, tail: int = 200, offset: int | None = None) -> tuple[str, int]:
        """The end of the trainer's log, or what follows byte `offset`; and the offset to go on from."""
        params = {"tail": tail} if offset is None else {"offset": offset}
        answer = self._answer("GET", f"/jobs/{_part(job)}/logs", params=params)
        return answer.content.decode(errors="replace"), int(answer.headers["X-Next-Offset"])

    def plan(self, job: str) -> dict[str, Any]:
        """plan.json: what check or prepare found out. ApiError `no_plan` before that."""
        return self._json("GET", f"/jobs/{_part(job)}/plan")

    def plan_picture(self, job: str) -> bytes:
        """A PNG of the memory plan. ApiError `no_plan` where there is none."""
        return self._answer("GET", f"/jobs/{_part(job)}/plan.png").content

    def workers(self) -> dict[str, Any]:
        """Workers heard of in the last minute."""
        return self._json("GET", "/workers")

    def ready(self) -> bool:
        """Whether the service and its Redis answer."""
        try:
            return bool(self._json("GET", "/health/ready"))
        except (ApiError, Unreachable):
            return False

    # ----------------------------------------------------------------------------------------------------------------

    def _json(self, method: str, path: str, **more: Any) -> dict[str, Any]:
        try:
            parsed: dict[str, Any] = self._answer(method, path, **more).json()
        except requests.JSONDecodeError:
            raise Unreachable(f"what answers at {self.url} is not Longhaul") from None
        return parsed

    def _answer(self, method: str, path: str, **more: Any) -> requests.Response:
        try:
            answer = self._session.request(method, self.url + path, timeout=(CONNECT_S, ANSWER_S), **more)
        except requests.RequestException as error:
            raise Unreachable(f"nobody answers at {self.url} ({type(error).__name__})") from error
        _raise_for(answer)
        return answer


def _raise_for(answer: requests.Response) -> None:
    if answer.ok:
        return
    try:
        error = answer.json()["error"]
        message, code = str(error["message"]), str(error["code"])
    except (ValueError, KeyError, TypeError):
        raise Unreachable(f"what answers at {answer.url} is not Longhaul (status {answer.status_code})") from None
    raise ApiError(message, status=answer.status_code, code=code, param=error.get("param"), hint=error.get("hint"))


def _frames(answer: requests.Response) -> Iterator[dict[str, Any]]:
    """Parsed `data` of each event. Lines as bytes: text would be split at every Unicode line separator, too."""
    for line in answer.iter_lines(chunk_size=None):
        if line.startswith(b"data:"):
            yield json.loads(line[5:])


def _part(job: str) -> str:
    return quote(job, safe="")
