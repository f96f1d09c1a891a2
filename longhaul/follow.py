"""What comes live, across outages: events to a job's last, and the log to its end."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator

import requests

from jobs.answers import Job, ShownEvent
from jobs.state import Status, is_open
from longhaul.connection import ApiError, Connection, RetryPolicy, Unreachable, part

SILENCE_S = 60.0
"""The service sends a comment every 15 s; a stream of events that is silent for longer than this is dead."""
LAST_EVENTS = frozenset(f"job.{status}" for status in Status if status.terminal)


def follow_events(
    connection: Connection, job: str, *, after: int, on_trouble: Callable[[str], None]
) -> Iterator[ShownEvent]:
    """Events above number `after`, to the job's last. Raises Unreachable when nobody answers to begin with."""
    address, patience = f"/jobs/{part(job)}", RetryPolicy(on_trouble)
    connection.answer("GET", address)
    while True:
        try:
            headers = {"Accept": "text/event-stream", "Last-Event-ID": str(after)}
            with connection.stream(f"{address}/events", silence_s=SILENCE_S, headers=headers) as answer:
                if answer.status_code == 204:
                    return
                for event in _frames(answer):
                    patience.well()
                    after = event["number"]
                    yield event
                    if event["type"] in LAST_EVENTS:
                        return
            # Closed before the job's last event: the service stops, or a proxy did not want to wait.
        except (requests.RequestException, Unreachable, ApiError) as error:
            patience.trouble(error)
        patience.pause()


def follow_log(connection: Connection, job: str, *, tail: int, on_trouble: Callable[[str], None]) -> Iterator[str]:
    """The last `tail` lines of the trainer's log, then what is added to it, to the end of the job.

    Pages say where in the file they end; a log that is followed does not, and secrets are left out of both. So after a
    break it is read again from the last place that is known, and what was shown is passed over. Raises Unreachable when
    nobody answers to begin with.
    """
    patience = RetryPolicy(on_trouble)
    text = codecs.getincrementaldecoder("utf-8")("replace")  # a character may be cut in two
    address, place, shown = f"/jobs/{part(job)}", {"tail": tail}, 0
    connection.answer("GET", address)
    while True:
        try:
            # Asked first: what was written until then is read below.
            ended = not is_open(connection.json(Job, "GET", address)["status"])
            before = None
            while place != before:
                page = connection.answer("GET", f"{address}/logs", params=place)
                before, place = place, {"offset": int(page.headers["X-Next-Offset"])}
                yield text.decode(page.content[shown:])
                shown = max(0, shown - len(page.content))
            if ended:
                return
            shown = 0
            follow = {**place, "follow": "true"}
            with connection.stream(f"{address}/logs", silence_s=SILENCE_S, params=follow) as answer:
                for content in _until_lost(answer):
                    patience.well()
                    shown += len(content)
                    yield text.decode(content)
        except (requests.RequestException, Unreachable, ApiError) as error:
            patience.trouble(error)
        patience.pause()


def _until_lost(answer: requests.Response) -> Iterator[bytes]:
    """What comes, until it ends in whatever way: a log may be silent for longer than anybody listens."""
    try:
        yield from answer.iter_content(chunk_size=None)
    except requests.RequestException:
        return


def _frames(answer: requests.Response) -> Iterator[ShownEvent]:
    """Parsed `data` of each event. Lines as bytes: text would be split at every Unicode line separator, too."""
    for line in answer.iter_lines(chunk_size=None):
        if line.startswith(b"data:"):
            yield json.loads(line[5:])
