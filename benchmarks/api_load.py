"""The service under load: get, list and POST beside hundreds of followers of one job, with 10,000 jobs stored.

    python -m benchmarks.api_load [--jobs 10000] [--minutes 1] [--rate 100] [--followers 500]
                                   [--against REV [--rounds 4]]

One uvicorn process, a real Redis that writes every move to disk, no workers. Requests are sent when they are due (80 %
get, 15 % list in several ways, 5 % POST), whether or not earlier ones are answered, and timed from when they were due.
Meanwhile a process appends 10 events a second to one job, as its supervisor would, and reports as a train worker every
5 s; another holds the followers. For each further minute there is another such job.
`growth_ratio`: the median list and get, one after the other, with all jobs stored over the same with 100, the larger of
the two. `rss_mib`: of the service, before and after each minute; `rss_growth_mib`: from the middle of a run of ten
minutes or more, when its bounded caches are full, to the end. `service_cores`: what it took of a core under load;
`stolen`: the share of all processors that the hypervisor gave to others meanwhile. JSON on the last line; exit code 1
when a limit below is missed.

`--against REV`: that revision and HEAD in turn, each with its own code, `--rounds` times. `ratio`: the median over the
rounds of each figure of HEAD over the same of REV. `cpu_ms_per_request` (of the service, its followers included) says
most on a machine that has other work as well.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from benchmarks.command_line import parse
from jobs.disk import rundir
from jobs.events import (
    AnyFact,
    AttemptEnded,
    AttemptStarted,
    JobCancelled,
    JobFailed,
    JobQueued,
    JobSubmitted,
    JobSucceeded,
)
from jobs.gpus import REFERENCE
from jobs.heartbeat import Gpu, WorkerHeartbeat
from jobs.redis.connection import connect
from jobs.redis.store import Store, make_id
from jobs.spec import parse_spec
from jobs.text.units import MIB, format_bytes, format_duration
from jobs.trainer_facts import DiskLow, Fault
from tests.support.redis_server import RedisServer, free_port
from tests.support.samples import checked, prepared, time_summary

KEYS = (
    "jobs", "rate_reached", "p99_get_ms", "p99_list_ms", "p99_post_ms", "p50_get_ms", "p50_list_ms", "p50_post_ms",
    "requests", "wrong_answers", "wrong_examples", "followers", "sse_events", "sse_missing", "sse_wrong",
    "growth_ratio", "one_at_a_time_ms", "rss_mib", "rss_growth_mib", "service_cores", "stolen", "load",
)  # fmt: skip
FEW = 100
LIMIT_MS, LIMIT_RATE, LIMIT_GROWTH, LIMIT_RSS_MIB = 50.0, 0.98, 1.5, 2.0
TEAMS = ("pastry", "soup", "salad", "bread")
EVENTS_PER_S = 10
"""Of the job that is followed."""
LAST = re.compile(rb"^job\.(succeeded|failed|cancelled|validated)$")
SEED = 7
STOLEN = 7
"""Place among `processor_ticks`."""


@dataclass
class Minute:
    """What one minute of load measured; latencies in milliseconds from when a request was due."""

    milliseconds: dict[str, list[float]] = field(default_factory=lambda: {"get": [], "list": [], "post": []})
    wrong: list[str] = field(default_factory=list)
    """Answers of another status than wanted."""
    seconds: float = 0.0
    followers: dict[str, int] = field(default_factory=dict)


def main(argv: list[str]) -> int:
    """Seed, load, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.api_load")
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--minutes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60.0, help="of a minute")
    parser.add_argument("--looks", type=int, default=300, help="gets and lists, one after the other")
    parser.add_argument("--rate", type=float, default=100.0, help="requests a second")
    parser.add_argument("--followers", type=int, default=500)
    parser.add_argument("--checking", type=int, default=50, help="followers that check content")
    parser.add_argument("--supervise", metavar="RUN_DIR", type=Path, help="be the supervisor of this job for a minute")
    parser.add_argument("--redis", help="for --supervise")
    parser.add_argument("--follow", metavar="RUN_DIR", type=Path, help="be the followers of this job")
    parser.add_argument("--url", help="for --follow: of the service")
    parser.add_argument("--begin", type=Path, help="for --follow: a file to make once all are connected")
    parser.add_argument("--against", metavar="REV", help="measure this revision as well, turn by turn")
    parser.add_argument("--rounds", type=int, default=4, help="for --against")
    arguments = parse(parser, argv, jobs=110, seconds=1.0, looks=5, followers=4, checking=2)
    if arguments.against is not None:
        print(json.dumps(compared(arguments)))
        return 0
    if arguments.follow is not None:
        print(json.dumps(follow_one_job(arguments)))
        return 0
    if arguments.supervise is not None:
        supervise(rundir.RunDir(arguments.supervise), Store(connect(arguments.redis)), seconds=arguments.seconds)
        return 0
    with tempfile.TemporaryDirectory() as name, RedisServer(Path(name) / "redis", aof=True) as server:
        result = measured(Path(name), server, arguments)
    print(json.dumps(result))
    right = result["sse_missing"] == result["sse_wrong"] == result["wrong_answers"] == 0
    good = (
        result["rate_reached"] >= LIMIT_RATE
        and max(result["p99_get_ms"], result["p99_list_ms"], result["p99_post_ms"]) < LIMIT_MS
        and result["growth_ratio"] <= LIMIT_GROWTH
        and (result["rss_growth_mib"] or 0.0) <= LIMIT_RSS_MIB
    )
    return 0 if right and (good or arguments.smoke) else 1


def compared(arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures of both revisions by round, and the medians of their ratios."""
    from benchmarks.two_revisions import unpack  # which imports torch

    names = ("jobs", "minutes", "rate", "followers", "checking")
    options = [f"--{name}={getattr(arguments, name)}" for name in names]
    rounds: list[list[dict[str, Any]]] = []
    with tempfile.TemporaryDirectory() as name:
        trees = {revision: Path(name, revision) for revision in (arguments.against, "HEAD")}
        for revision, tree in trees.items():
            unpack(revision, tree)
        for number in range(arguments.rounds):
            rounds.append([alone(tree, options, arguments.rate) for tree in trees.values()])
            print(f"round {number + 1}: {rounds[-1]}", flush=True)
    ratios = {
        figure: [round(now[figure] / before[figure], 3) for before, now in rounds]
        for figure in rounds[0][0]
        if figure not in ("wrong_answers", "load")
    }
    medians = {figure: round(statistics.median(each), 3) for figure, each in ratios.items()}
    return {"against": arguments.against, "ratio": medians, "ratios": ratios, "rounds": rounds}


def alone(tree: Path, options: list[str], rate: float) -> dict[str, Any]:
    """What the benchmark of these files says in a process of its own; that a limit was missed is no matter here."""
    command = [sys.executable, "-m", "benchmarks.api_load", *options]
    said = subprocess.run(command, cwd=tree, stdout=subprocess.PIPE, text=True).stdout
    figures: dict[str, Any] = json.loads(said.splitlines()[-1])
    latencies = {name: figures[name] for name in figures if name.startswith(("p50_", "p99_"))}
    return {
        "rate_reached": figures["rate_reached"],
        **latencies,
        **{f"alone_{kind}_ms": each for kind, each in figures["one_at_a_time_ms"]["many"].items()},
        "cpu_ms_per_request": round(1000 * figures["service_cores"] / (figures["rate_reached"] * rate), 2),
        "wrong_answers": figures["wrong_answers"] + figures["sse_missing"] + figures["sse_wrong"],
        "load": figures["load"][0],
    }


def measured(folder: Path, server: RedisServer, arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures."""
    runs, data = folder / "runs", folder / "data"
    runs.mkdir()
    data.mkdir()
    store = Store(connect(server.url))
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    environment = {
        "PATH": os.environ["PATH"], "LONGHAUL_REDIS_URL": server.url, "LONGHAUL_PORT": str(port),
        "LONGHAUL_RUNS": str(runs), "LONGHAUL_DATA": str(data),
    }  # fmt: skip
    ids = [seeded(runs, store, number) for number in range(FEW)]
    with open(folder / "service.log", "ab") as log:
        service = subprocess.Popen([sys.executable, "-m", "service"], env=environment, stdout=log, stderr=log)
    try:
        await_ready(url, service)
        few = one_after_the_other(url, ids, arguments.looks)
        begun = time.monotonic()
        ids += [seeded(runs, store, number) for number in range(FEW, arguments.jobs)]
        print(f"{len(ids):,} jobs stored in {format_duration(time.monotonic() - begun)}", flush=True)
        many = one_after_the_other(url, ids, arguments.looks)
        minutes, rss, used, before = [], [rss_mib(service.pid)], cpu_seconds(service.pid), processor_ticks()
        for number in range(arguments.minutes):
            minutes.append(one_minute(url, runs, store, server.url, ids, arguments, seed=SEED + number))
            rss.append(rss_mib(service.pid))
            slowest = {kind: round(percentile(each, 0.99), 1) for kind, each in minutes[-1].milliseconds.items()}
            print(
                f"minute {number + 1}: p99 {slowest}, {format_bytes(MIB * rss[-1])}, {minutes[-1].followers}",
                flush=True,
            )
        used = cpu_seconds(service.pid) - used
        ticks = [after - earlier for earlier, after in zip(before, processor_ticks(), strict=True)]
    finally:
        service.terminate()
        service.wait(30)
    times = {
        kind: [each for minute in minutes for each in minute.milliseconds[kind]] for kind in ("get", "list", "post")
    }
    answered = sum(len(each) for each in times.values())
    wrong = [each for minute in minutes for each in minute.wrong]
    return {
        "jobs": len(ids),
        "rate_reached": round(answered / sum(minute.seconds for minute in minutes) / arguments.rate, 4),
        **{f"p99_{kind}_ms": round(percentile(each, 0.99), 2) for kind, each in times.items()},
        **{f"p50_{kind}_ms": round(percentile(each, 0.50), 2) for kind, each in times.items()},
        "requests": answered,
        "wrong_answers": len(wrong),
        "wrong_examples": wrong[:3],
        "followers": arguments.followers,
        "sse_events": sum(minute.followers["events"] for minute in minutes),
        "sse_missing": sum(minute.followers["missing"] + minute.followers["unended"] for minute in minutes),
        "sse_wrong": sum(minute.followers["wrong"] for minute in minutes),
        "growth_ratio": round(max(many[kind] / few[kind] for kind in few), 3),
        "one_at_a_time_ms": {"few": few, "many": many},
        "rss_mib": rss,
        "rss_growth_mib": round(rss[-1] - rss[len(rss) // 2], 1) if len(minutes) >= 10 else None,
        "service_cores": round(used / sum(minute.seconds for minute in minutes), 3),
        "stolen": round(ticks[STOLEN] / sum(ticks), 4),
        "load": [round(each, 2) for each in os.getloadavg()],
    }


# -- jobs in store -----------------------------------------------------------------------------------------------------


def seeded(runs: Path, store: Store, number: int) -> str:
    """One stored job, of every kind in turn: most have ended, some wait, some are being checked."""
    body = {
        "name": f"job {number}",
        "model": "builtin:t5-tiny",
        "data": {"train": "rows.jsonl"},
        "priority": number % 5,
        "metadata": {"team": TEAMS[number % len(TEAMS)], "number": str(number)},
    }
    spec = parse_spec(body)
    first = JobSubmitted(
        name=spec.name, model=spec.model, spec_sha256=spec.sha256(), priority=spec.priority, metadata=spec.metadata
    )
    run, _ = rundir.create(runs, make_id(), spec, first)
    start = checked(rows_looked_at=1000, steps=5000, time=time_summary(hours_expected=2.0, text="about 2 hours"))
    waits: list[AnyFact] = [start, prepared(5000, train_rows=128_000, validation_rows=1280), JobQueued()]
    more: list[AnyFact] = {
        0: [],
        1: waits,
        2: [*waits, JobCancelled()],
    }.get(number % 10, [JobFailed(error=Fault(code="bad_data", message="no usable rows"))])
    if more:
        run.append(more)
    store.project(run, run.record(), run.events())
    return run.id


# -- load --------------------------------------------------------------------------------------------------------------


def one_minute(
    url: str, runs: Path, store: Store, redis_url: str, ids: list[str], arguments: argparse.Namespace, *, seed: int
) -> Minute:
    """A minute of requests beside a job that is followed."""
    followed = running_job(runs, store)
    begin = followed.path / "followers-are-here"
    followers = subprocess.Popen(
        [
            *[sys.executable, "-m", "benchmarks.api_load", "--follow", str(followed.path), "--url", url],
            *["--begin", str(begin), "--followers", str(arguments.followers), "--checking", str(arguments.checking)],
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    while not begin.exists():
        assert followers.poll() is None, "the followers could not connect"
        time.sleep(0.05)
    command = [sys.executable, "-m", "benchmarks.api_load", "--supervise", str(followed.path)]
    supervisor = subprocess.Popen([*command, "--redis", redis_url, "--seconds", str(arguments.seconds)])
    minute = asyncio.run(requests_for(arguments.seconds, url, ids, arguments.rate, random.Random(seed)))
    assert supervisor.wait(120) == 0
    said, _ = followers.communicate(timeout=120)
    minute.followers = json.loads(said.splitlines()[-1])
    return minute


def running_job(runs: Path, store: Store) -> rundir.RunDir:
    """A job in its first attempt."""
    spec = parse_spec({"name": "followed", "model": "builtin:t5-tiny", "data": {"train": "rows.jsonl"}})
    first = JobSubmitted(name=spec.name, model=spec.model, spec_sha256=spec.sha256())
    run, _ = rundir.create(runs, make_id(), spec, first)
    run.append([checked(), prepared(100_000), JobQueued()])
    run.append([AttemptStarted(worker="benchmark", device="cpu")])
    store.project(run, run.record(), run.events())
    return run


TRAINER = WorkerHeartbeat(
    name="train-benchmark", stage="train", healthy=True, why=None, busy=True, device="cuda",
    gpu=Gpu(uuid="GPU-0", name=REFERENCE.name, memory_bytes=REFERENCE.memory_bytes, driver="580.95"),
)  # fmt: skip


def supervise(run: rundir.RunDir, store: Store, *, seconds: float) -> None:
    """Append facts of a trainer, then the end, as a supervisor does."""
    begun = time.monotonic()
    for number in range(int(seconds * EVENTS_PER_S)):
        time.sleep(max(0.0, begun + number / EVENTS_PER_S - time.monotonic()))
        if number % (5 * EVENTS_PER_S) == 0:
            store.workers.report(TRAINER.model_copy(update={"pid": number}))
        store.append(run, [DiskLow(step=number, free_bytes=number * 1000, needed_bytes=10**9)], attempt=1)
    done = JobSucceeded(model="model", step=1, loss=1.0)
    store.append(run, [AttemptEnded(reason="done", step=1), done], attempt=1)


async def requests_for(seconds: float, url: str, ids: list[str], rate: float, chance: random.Random) -> Minute:
    """Send each request when it is due; wait for all answers."""
    gc.collect()
    gc.freeze()  # a pause of this process would be counted as one of the service
    minute = Minute()
    limits = httpx.Limits(max_connections=100, max_keepalive_connections=100)
    async with httpx.AsyncClient(base_url=url, timeout=30, limits=limits, trust_env=False) as client:
        begun = time.perf_counter()
        tasks = []
        for number in range(int(seconds * rate)):
            due = begun + number / rate
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            kind = chance.choices(("get", "list", "post"), (80, 15, 5))[0]
            tasks.append(asyncio.create_task(one_request(client, kind, due, ids, chance, minute)))
        await asyncio.gather(*tasks)
        minute.seconds = max(seconds, time.perf_counter() - begun)
    return minute


async def one_request(
    client: httpx.AsyncClient, kind: str, due: float, ids: list[str], chance: random.Random, minute: Minute
) -> None:
    """Send it, note how long it took since it was due."""
    if kind == "get":
        answer = await client.get(f"/jobs/{chance.choice(ids)}")
    elif kind == "list":
        answer = await client.get("/jobs", params=chance.choice(lists(ids, chance)))
    else:
        body = {"name": "posted", "model": "builtin:t5-tiny", "data": {"train": "rows.jsonl"}}
        answer = await client.post("/jobs", json=body, headers={"Idempotency-Key": f"{chance.getrandbits(64):x}"})
    minute.milliseconds[kind].append((time.perf_counter() - due) * 1000)
    if answer.status_code != (202 if kind == "post" else 200):
        minute.wrong.append(f"{kind}: {answer.status_code} {answer.text[:200]}")


def lists(ids: list[str], chance: random.Random) -> list[dict[str, str]]:
    """The ways in which people ask for a list."""
    team = chance.choice(TEAMS)
    return [
        {},
        {"after": chance.choice(ids)},
        {"status": "queued"},
        {"status": "failed", "metadata[team]": team},
        {"metadata[team]": team, "after": chance.choice(ids)},
    ]


def one_after_the_other(url: str, ids: list[str], looks: int) -> dict[str, float]:
    """Median milliseconds of a get and of a list with nothing else running."""
    chance = random.Random(SEED)
    with httpx.Client(base_url=url, timeout=30, trust_env=False) as client:

        def timed(path: str, parameters: dict[str, str]) -> float:
            begun = time.perf_counter()
            client.get(path, params=parameters).raise_for_status()
            return (time.perf_counter() - begun) * 1000

        gets = [timed(f"/jobs/{chance.choice(ids)}", {}) for _ in range(looks)]
        listed = [timed("/jobs", chance.choice(lists(ids, chance))) for _ in range(looks)]
    return {"get": round(statistics.median(gets), 3), "list": round(statistics.median(listed), 3)}


# ----------------------------------------------------------------------------------------------------------------------


def await_ready(url: str, service: subprocess.Popen[bytes]) -> None:
    """Until the service answers."""
    while True:
        assert service.poll() is None, "the service did not start"
        try:
            if httpx.get(f"{url}/health/ready", timeout=2, trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.05)


def percentile(values: list[float], share: float) -> float:
    """The value that so many of the others do not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def cpu_seconds(pid: int) -> float:
    """What a process has used of the processors."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def processor_ticks() -> list[int]:
    """Of all processors since the start of the machine: user, nice, system, idle, iowait, irq, softirq, stolen, …"""
    return [int(ticks) for ticks in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]


def rss_mib(pid: int) -> float:
    """Resident set of a process."""
    (line,) = (each for each in Path(f"/proc/{pid}/status").read_text().splitlines() if each.startswith("VmRSS"))
    return round(int(line.split()[1]) / 1024, 1)


# -- followers ---------------------------------------------------------------------------------------------------------
# Each follower reads the stream from event 1 to the job's last. All hold the numbers against 1, 2, 3 …; the first
# `--checking` of them parse each event, too, and hold type and content against the run directory's `events.jsonl`.


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


def follow_one_job(arguments: argparse.Namespace) -> dict[str, int]:
    """What many followers of a job missed. Makes `arguments.begin` once all are connected."""
    followers = [Follower(number < arguments.checking) for number in range(arguments.followers)]
    asyncio.run(follow_all(arguments.url, arguments.follow.name, followers, arguments.begin))
    written = [json.loads(line) for line in (arguments.follow / "events.jsonl").read_text().splitlines()]
    return {
        "followers": len(followers),
        "events": len(written),
        "missing": sum(each.missing + len(written) - each.number for each in followers),
        "wrong": sum(wrong_content(each.events, written) for each in followers if each.checks_content),
        "unended": sum(not each.ended for each in followers),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
