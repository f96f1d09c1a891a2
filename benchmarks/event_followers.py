"""Many followers of one job's events, in a process of their own; what they missed, as JSON on the last line.

    python -m benchmarks.event_followers URL JOB --followers 500 --checking 50 --begin FILE

Each follower reads the stream from event 1 to the job's last. All hold the numbers against 1, 2, 3 …; the first
`--checking` of them parse each event, too, and hold type and content against the run directory's `events.jsonl`.
FILE is made once all are connected.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

LAST = re.compile(rb"^job\.(succeeded|failed|cancelled|validated)$")


@dataclass
class Follower:
    """One reader of the stream."""

    checks_content: bool
    number: int = 0
    missing: int = 0
    """Numbers passed over, or heard twice."""
    events: list[dict[str, Any]] = field(default_factory=list)
    ended: bool = False

    async def follow(self, host: str, port: int, path: str, connected: asyncio.Semaphore) -> None:
        """Read to the last event."""
        reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
        request = f"GET {path} HTTP/1.1\r\nHost: {host}\r\nAccept: text/event-stream\r\nLast-Event-ID: 0\r\n\r\n"
        writer.write(request.encode())
        status = await reader.readline()
        assert b" 200 " in status, status
        while await reader.readline() != b"\r\n":
            pass
        connected.release()
        try:
            await self._read(reader)
        finally:
            writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        kind = b""
        while line := await reader.readline():
            if line.startswith(b"id: "):
                number = int(line[4:])
                self.missing += abs(number - self.number - 1)
                self.number = number
            elif line.startswith(b"event: "):
                kind = line[7:].strip()
            elif line.startswith(b"data: "):
                if self.checks_content:
                    self.events.append(json.loads(line[6:]))
                if LAST.match(kind):
                    self.ended = True
                    return


async def follow_all(url: str, job: str, followers: list[Follower], begin: Path) -> None:
    """Connect all, make `begin`, read to the end."""
    address = urlsplit(url)
    assert address.hostname and address.port
    connected = asyncio.Semaphore(0)
    tasks = []
    for each in followers:
        path = f"/jobs/{job}/events"
        tasks.append(asyncio.create_task(each.follow(address.hostname, address.port, path, connected)))
        await connected.acquire()
    begin.touch()
    await asyncio.gather(*tasks)


def wrong_content(events: list[dict[str, Any]], written: list[dict[str, Any]]) -> int:
    """How many of the events that ought to have come did not come as they were written."""
    heard = {event["number"]: (event["type"], event["at"], event["data"]) for event in events}
    facts = {
        line["number"]: (
            line["fact"]["type"],
            line["at"],
            {key: value for key, value in line["fact"].items() if key != "type"},
        )
        for line in written
    }
    return sum(heard.get(number) != fact for number, fact in facts.items())


def main(argv: list[str]) -> int:
    """Follow, then print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.event_followers")
    parser.add_argument("url")
    parser.add_argument("run", type=Path, help="run directory of the job")
    parser.add_argument("--followers", type=int, default=500)
    parser.add_argument("--checking", type=int, default=50)
    parser.add_argument("--begin", type=Path, required=True)
    arguments = parser.parse_args(argv)
    followers = [Follower(number < arguments.checking) for number in range(arguments.followers)]
    asyncio.run(follow_all(arguments.url, arguments.run.name, followers, arguments.begin))
    written = [json.loads(line) for line in (arguments.run / "events.jsonl").read_text().splitlines()]
    result = {
        "followers": len(followers),
        "events": len(written),
        "missing": sum(each.missing + len(written) - each.number for each in followers),
        "wrong": sum(wrong_content(each.events, written) for each in followers if each.checks_content),
        "unended": sum(not each.ended for each in followers),
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
