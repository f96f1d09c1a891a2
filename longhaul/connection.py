"""Requests to one service: every one has a timeout, every refusal is an ApiError, whatever else goes wrong Unreachable.

What is repeated, and when:

- After a lost connection only what may be done twice: GET, a priority, and a POST under an Idempotency-Key.
- After 429, and while the service is `recovering`, everything, for it was not done: as late as the service says, while
  that is soon. But no upload: it has been read, and can be large.

Three times in all.
"""

from __future__ import annotations

import ipaddress
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import requests

from jobs.text.units import format_duration

DEFAULT_PORT = 8000
DEFAULT_URL = f"http://127.0.0.1:{DEFAULT_PORT}"
CONNECT_S = 5.0
ANSWER_S = 30.0
TRIES = 3
PAUSE_S = 0.5
LATEST_S = 30.0
"""Who says to come back later than this is not waited for."""
PLAIN_HTTP = "the URL of a service without TLS begins with http://: set LONGHAUL_URL"
_A_PAGE = re.compile(r"/((jobs|sweeps)(/.*)?|new|compare|datasets|workers|docs|v1)/?$")
"""What the address of a page has behind that of the service."""

Answer = TypeVar("Answer")


class ApiError(Exception):
    """The service refused. `param` is the dotted key in the job file, `hint` what to do."""

    def __init__(
        self, message: str, *, status: int, code: str, param: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.hint = hint


class Unreachable(Exception):
    """Nothing answers at the address, or another program does, or the connection was lost. `hint` says what to do."""

    def __init__(self, message: str, *, hint: str = "start it with `longhaul local`, or set LONGHAUL_URL") -> None:
        super().__init__(message)
        self.hint = hint


class Connection:
    """A session with one service. For one thread."""

    def __init__(self, url: str, api_key: str | None, on_wait: Callable[[str], object]) -> None:
        """`on_wait` is called with what the service says while it recovers. Raises ValueError for what is no URL."""
        self.url = _complete(url)
        self.key = api_key
        self.on_wait = on_wait
        self.session = requests.Session()
        # Otherwise a ~/.netrc entry for the host would replace our Authorization header.
        self.session.trust_env = False
        if api_key:
            self.session.headers["Authorization"] = f"Bearer {api_key}"

    def json(self, kind: type[Answer], method: str, path: str, **more: Any) -> Answer:
        """The parsed answer, of which type checkers know what `kind` says. `more` is that of `answer`."""
        try:
            parsed: Answer = self.answer(method, path, **more).json()
        except requests.JSONDecodeError:
            raise Unreachable(f"the server at {self.url} is not Longhaul") from None
        return parsed

    def answer(self, method: str, path: str, *, repeatable: bool | None = None, **more: Any) -> requests.Response:
        """A good answer, read to its end. `repeatable` (GET is): may be tried again after a lost connection."""
        may_repeat = method == "GET" if repeatable is None else repeatable
        more = {"timeout": (CONNECT_S, ANSWER_S)} | more
        for tried in range(1, TRIES + 1):
            try:
                answer = self._send(method, path, **more)
            except requests.RequestException as error:
                if may_repeat and tried < TRIES:
                    time.sleep(PAUSE_S)
                    continue
                if isinstance(error, requests.exceptions.SSLError):
                    raise Unreachable(f"no TLS connection to {self.url}: {_root(error)}", hint=PLAIN_HTTP) from error
                raise Unreachable(
                    f"no answer from {self.url} ({type(error).__name__})", hint=_how_to_reach(self.url)
                ) from error
            later = None if "data" in more else _retry_after(answer)
            recovering = _recovering(answer)
            if not (answer.status_code == 429 or recovering) or tried == TRIES or later is None:
                break
            if recovering:
                self.on_wait(f"{recovering} Trying again in {format_duration(later)}.")
            time.sleep(later)
        raise_for(answer)
        return answer

    @contextmanager
    def stream(self, path: str, *, silence_s: float, method: str = "GET", **more: Any) -> Iterator[requests.Response]:
        """A good answer whose body is still to come, as it is: not compressed on the way.

        `silence_s` without a byte is a lost connection. Raises requests.RequestException for that: who reads continues.
        """
        more["headers"] = {"Accept-Encoding": "identity", **more.get("headers", {})}
        with self._send(method, path, timeout=(CONNECT_S, silence_s), stream=True, **more) as answer:
            raise_for(answer)
            yield answer

    def _send(self, method: str, path: str, **more: Any) -> requests.Response:
        """Raises requests.RequestException where nothing answers, and ApiError for what is not JSON, such as NaN."""
        try:
            return self.session.request(method, self.url + path, **more)
        except requests.exceptions.InvalidJSONError as error:
            raise ApiError(
                f"what was to be sent is not JSON: {error}", status=422, code="invalid_json",
                hint="give a finite number or null",
            ) from error  # fmt: skip


class RetryPolicy:
    """Pauses of someone who comes again for ever: longer and longer, short again after success. Says trouble once."""

    def __init__(self, on_trouble: Callable[[str], None]) -> None:
        self._on_trouble = on_trouble
        self.well()

    def well(self) -> None:
        """Something came."""
        self._wait_s, self._reported = PAUSE_S, False

    def trouble(self, error: Exception) -> None:
        """Say it, unless it was said since something last came. Refusals that time does not heal are raised."""
        if isinstance(error, ApiError) and error.status < 500 and error.status != 429:
            raise error
        if not self._reported:
            problem = f"says: {error}" if isinstance(error, ApiError) else f"does not answer ({type(error).__name__})"
            self._on_trouble(f"the service {problem}; trying again")
            self._reported = True

    def pause(self) -> None:
        """Before the next try."""
        time.sleep(self._wait_s)
        self._wait_s = min(5.0, self._wait_s * 2)


def _complete(url: str) -> str:
    """The URL, with http:// where it has no scheme. Raises ValueError where requests could send nothing there."""
    whole = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(whole)
        fits = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port that is no number, or half an IPv6 address
        fits = False
    if not fits:
        raise ValueError(
            f"{url!r} is not the URL of a service: it names a host, and perhaps a port, like {DEFAULT_URL}"
        )
    return f"{parts.scheme}://{parts.netloc}{_A_PAGE.sub('', parts.path)}".rstrip("/")


def is_loopback(url: str) -> bool:
    """Whether the service is on this machine."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _how_to_reach(url: str) -> str:
    """What to do where nothing answers."""
    if not is_loopback(url):
        return "start it there, or set LONGHAUL_URL to the URL of a service that runs"
    port = urlsplit(url).port or 80
    return f"start it with `longhaul local{'' if port == DEFAULT_PORT else f' --port {port}'}`, or set LONGHAUL_URL"


def _root(error: BaseException) -> BaseException:
    """The exception that began it."""
    while cause := error.__cause__ or error.__context__:
        error = cause
    return error


def part(text: str) -> str:
    """One part of a path."""
    return quote(text, safe="")


def raise_for(answer: requests.Response) -> None:
    """ApiError for a refusal, Unreachable for something that is not Longhaul."""
    if answer.ok:
        return
    try:
        error = answer.json()["error"]
        message, code = str(error["message"]), str(error["code"])
    except (ValueError, KeyError, TypeError):
        raise Unreachable(f"the server at {answer.url} is not Longhaul (status {answer.status_code})") from None
    raise ApiError(message, status=answer.status_code, code=code, param=error.get("param"), hint=error.get("hint"))


def _recovering(answer: requests.Response) -> str | None:
    """What a service says that does not know all jobs yet."""
    try:
        raise_for(answer)
    except ApiError as error:
        return str(error) if error.code == "recovering" else None
    except Unreachable:
        return None
    return None


def _retry_after(answer: requests.Response) -> float | None:
    """Seconds to wait, if that is bearable."""
    given = answer.headers.get("Retry-After", "1")
    seconds = float(given) if given.isdecimal() else LATEST_S + 1
    return seconds if seconds <= LATEST_S else None
