"""The pages in a real browser, and the service beside many of them.

    python -m benchmarks.page [--jobs 10000] [--rows 25000] [--pages 50] [--seconds 30] [--rounds 5]

A real service and Redis with so many jobs; one of them has `--rows` rows of metrics. Debian's chromium, headless, with
an empty cache for each look. JSON on the last line:
- `first_paint_s`: from asking for that job's page until its curves are drawn; `jobs_paint_s`: until the table of jobs
  is painted (medians of `--rounds`, as are the first contentful paints of both).
- `chart_ms`: of the main thread, to draw all curves anew when rows are added; `chart_points`: values in them.
- `js_kb`, `css_kb`, `page_kb`: what is sent for a first look at the job, compressed where the service compresses.
- `p99_get_ms`, `p99_list_ms`, `p99_post_ms`: 100 requests a second as in `benchmarks.api_load`, while `--pages` clients
  ask what open pages ask, half of them for the table, half for the job with its event stream; `alone`: without them.
Exit code 1 when a limit below is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import httpx
from playwright.sync_api import Browser, Page, sync_playwright

from benchmarks.api_load import await_ready, percentile, requests_for, seeded
from benchmarks.command_line import parse, skipped
from service.settings import ServiceSettings
from tests.service.pages.showcase import furnish
from tests.service.running import Service
from tests.support.browser import CHROMIUM, QUIET
from tests.support.redis_server import RedisServer, free_port

KEYS = (
    "first_paint_s", "jobs_paint_s", "job_contentful_s", "jobs_contentful_s", "chart_ms", "chart_points", "js_kb",
    "css_kb", "page_kb", "data_kb", "p99_get_ms", "p99_list_ms", "p99_post_ms", "alone_p99_get_ms",
    "alone_p99_list_ms", "alone_p99_post_ms", "chromium", "load",
)  # fmt: skip
LIMIT_PAINT_S, LIMIT_JOBS_S, LIMIT_CHART_MS, LIMIT_P99_MS, LIMIT_JS_KB = 1.0, 0.5, 16.0, 50.0, 120.0
HTML = {"Accept": "text/html"}


@dataclass(frozen=True)
class Visit:
    """A first look at a page."""

    drawn_s: float
    """Until what matters is there."""
    contentful_s: float
    sent: dict[str, int]
    """Bytes by kind: script, css, page, other."""


def main(argv: list[str]) -> int:
    """Store, look, load, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.page")
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--rows", type=int, default=25_000)
    parser.add_argument("--pages", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--be-pages", nargs=2, metavar=("URL", "JOB"), help="be the open pages, until killed")
    arguments = parse(parser, argv, jobs=5, rows=50, pages=2, seconds=1.0, rounds=1)
    if arguments.be_pages:
        url, job = arguments.be_pages
        asyncio.run(be_pages(url, job, arguments.pages))
        return 0
    if CHROMIUM is None:
        return skipped(arguments, "there is no chromium on PATH (Debian: apt install chromium)")
    with tempfile.TemporaryDirectory() as name, RedisServer(Path(name) / "redis", aof=True) as redis:
        redis.mark_rebuilt()
        result = measured(Path(name), redis.url, arguments)
    print(json.dumps(result))
    good = (
        float(result["first_paint_s"]) <= LIMIT_PAINT_S and float(result["jobs_paint_s"]) <= LIMIT_JOBS_S
        and float(result["chart_ms"]) <= LIMIT_CHART_MS and float(result["js_kb"]) <= LIMIT_JS_KB
        and max(float(result[f"p99_{kind}_ms"]) for kind in ("get", "list", "post")) < LIMIT_P99_MS
    )  # fmt: skip
    return 0 if good or arguments.smoke else 1


def measured(folder: Path, redis_url: str, arguments: argparse.Namespace) -> dict[str, float | str]:
    """The figures."""
    settings = ServiceSettings(
        redis_url=redis_url, runs=folder / "runs", data=folder / "data", uploads=folder / "uploads", port=free_port()
    )
    environment = {
        "PATH": os.environ["PATH"], "LONGHAUL_REDIS_URL": redis_url, "LONGHAUL_PORT": str(settings.port),
        "LONGHAUL_RUNS": str(settings.runs), "LONGHAUL_DATA": str(settings.data),
        "LONGHAUL_UPLOADS": str(settings.uploads), "LONGHAUL_RATE_LIMIT": "0",
    }  # fmt: skip
    with open(folder / "service.log", "ab") as log:
        process = subprocess.Popen([sys.executable, "-m", "service"], env=environment, stdout=log, stderr=log)
    try:
        client = Service(settings)
        await_ready(client.url, process)
        ids = [seeded(settings.runs, client.store, number) for number in range(arguments.jobs)]
        job = furnish(client, rows=arguments.rows)["recipes-xl"]
        print(f"{len(ids):,} jobs, and one with {arguments.rows:,} rows of metrics", flush=True)
        alone = loaded(client.url, ids, arguments.seconds)
        command = [sys.executable, "-m", "benchmarks.page", "--be-pages", client.url, job]
        pages = subprocess.Popen([*command, "--pages", str(arguments.pages)], stdout=subprocess.PIPE)
        try:
            assert pages.stdout is not None and pages.stdout.readline(), "the pages did not open"
            beside = loaded(client.url, ids, arguments.seconds)
            assert pages.poll() is None, "the open pages have failed"
        finally:
            pages.kill()
            pages.wait()
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET, chromium_sandbox=False)
            looks = [look(browser, f"{client.url}/jobs/{job}", "#charts[data-drawn]") for _ in range(arguments.rounds)]
            table = [look(browser, client.url, "table.jobs tbody tr") for _ in range(arguments.rounds)]
            chart_ms, points = charts(browser, client, job)
            version = browser.version
            browser.close()
    finally:
        process.terminate()
        process.wait(30)
    sent = looks[0].sent
    return {
        "first_paint_s": round(statistics.median(each.drawn_s for each in looks), 3),
        "jobs_paint_s": round(statistics.median(each.drawn_s for each in table), 3),
        "job_contentful_s": round(statistics.median(each.contentful_s for each in looks), 3),
        "jobs_contentful_s": round(statistics.median(each.contentful_s for each in table), 3),
        "chart_ms": chart_ms,
        "chart_points": points,
        "js_kb": round(sent["script"] / 1000, 1),
        "css_kb": round(sent["css"] / 1000, 1),
        "page_kb": round(sent["page"] / 1000, 1),
        "data_kb": round(sent["other"] / 1000, 1),
        **beside,
        **{f"alone_{name}": value for name, value in alone.items()},
        "chromium": version,
        "load": round(os.getloadavg()[0], 2),
    }


def look(browser: Browser, url: str, there: str) -> Visit:
    """With nothing in the cache."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.goto(url, wait_until="commit")
    drawn = page.wait_for_function(
        "there => document.querySelector(there) && new Promise(done => requestAnimationFrame(() => "
        "setTimeout(() => done(performance.now()))))",
        arg=there,
    ).json_value()
    page.wait_for_load_state("networkidle")
    contentful, sent = page.evaluate(
        """() => {
            const [page] = performance.getEntriesByType("navigation");
            const sent = { script: 0, css: 0, other: 0, page: page.transferSize };
            const kind = (name) => (name.endsWith(".js") ? "script" : name.endsWith(".css") ? "css" : "other");
            for (const each of performance.getEntriesByType("resource")) sent[kind(each.name)] += each.transferSize;
            return [performance.getEntriesByName("first-contentful-paint")[0].startTime, sent];
        }"""
    )
    context.close()
    return Visit(drawn / 1000, contentful / 1000, sent)


def charts(browser: Browser, client: Service, job: str) -> tuple[float, int]:
    """Median milliseconds of an update, and how many values are drawn in it."""
    page: Page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(f"{client.url}/jobs/{job}")
    page.locator("#charts[data-drawn]").wait_for()
    times = []
    for _ in range(30):
        page.evaluate("document.dispatchEvent(new CustomEvent('page:changed'))")
        times.append(float(page.locator("#charts").get_attribute("data-update-ms") or "nan"))
    points = int(page.locator("#charts").get_attribute("data-values") or 0)
    page.close()
    return round(statistics.median(times), 2), points


def loaded(url: str, ids: list[str], seconds: float) -> dict[str, float]:
    """Latencies of 100 requests a second."""
    minute = asyncio.run(requests_for(seconds, url, ids, 100.0, random.Random(7)))
    assert not minute.wrong, minute.wrong[:3]
    return {f"p99_{kind}_ms": round(percentile(each, 0.99), 2) for kind, each in minute.milliseconds.items()}


async def be_pages(url: str, job: str, pages: int) -> None:
    """Ask what so many open pages ask, for ever."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    one = httpx.AsyncClient(base_url=url, timeout=30, limits=limits, trust_env=False)
    async with one as client, asyncio.TaskGroup() as group:
        for number in range(pages):
            path = f"/jobs/{job}" if number % 2 else "/"
            (await client.get(path, headers=HTML)).raise_for_status()
            group.create_task(be_page(client, path, job if number % 2 else None))
            await asyncio.sleep(3.0 / pages)  # people do not open them all at once
        print("all are open", flush=True)


async def be_page(client: httpx.AsyncClient, path: str, job: str | None) -> None:
    """The table of jobs, or a running job."""
    async with asyncio.TaskGroup() as group:
        group.create_task(again(client, path, 3.0, HTML))
        if job:
            group.create_task(again(client, f"/jobs/{job}/metrics?after_step=1000000&fields=loss", 2.0, {}))
            group.create_task(follow(client, f"/jobs/{job}/events"))


async def again(client: httpx.AsyncClient, path: str, every_s: float, headers: dict[str, str]) -> None:
    """Ask every few seconds."""
    while True:
        (await client.get(path, headers=headers)).raise_for_status()
        await asyncio.sleep(every_s)


async def follow(client: httpx.AsyncClient, path: str) -> None:
    """Hold an event stream."""
    async with client.stream("GET", path, headers={"Accept": "text/event-stream"}, timeout=None) as answer:
        answer.raise_for_status()
        async for _ in answer.aiter_bytes():
            pass


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
