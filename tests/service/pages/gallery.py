"""What the pages look like: docs/pictures/pages, one file for each page, theme or size. Their figures were measured.

    python -m tests.service.pages.gallery [NAME …]     # draw them anew, after a change of what the pages show

It runs the jobs of examples/ in a `longhaul local` of its own, on a CPU; a few minutes. What the API said of them goes
into `tests/longhaul/recorded_job.json`, of which `tests.longhaul.pictures` draws the pictures of the terminal.
"""

from __future__ import annotations

import io
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

from tests.longhaul.pictures import RECORDED
from tests.support.browser import CHROMIUM, QUIET
from tests.support.local import Local, until
from tests.support.stack import ROOT

EXAMPLES = ROOT / "examples"
FOLDER = ROOT / "docs" / "pictures" / "pages"
COLOURS = 256
"""Of a picture: with as many it is half as large."""
SHARE = 0.6
"""Of its steps, that the running job has behind it."""


@dataclass(frozen=True)
class Shot:
    """A page, as somebody sees it. In a path `{name}` is the id of that job."""

    name: str
    path: str
    width: int = 1280
    height: int = 860
    dark: bool = False
    whole: bool = False
    offline: bool = False
    """Whether the service goes away while it is looked at."""


LIVE = [
    Shot("job", "/jobs/{running}", height=1000),
    Shot("job-dark", "/jobs/{running}", height=1000, dark=True),
    Shot("job-phone", "/jobs/{running}", 390, 800),
    Shot("jobs", "/"),
    Shot("jobs-dark", "/", dark=True),
    Shot("jobs-phone", "/", 390, 800),
    Shot("job-offline", "/jobs/{running}", height=600, offline=True),
    Shot("workers", "/workers", height=600),
]
"""While a job runs."""
PICTURES = [
    *LIVE,
    Shot("jobs-none", "/?text=nothing-is-called-so", height=500),
    Shot("job-finished", "/jobs/{tickets}", whole=True),
    Shot("job-failed", "/jobs/{failed}", height=600),
    Shot("job-paused", "/jobs/{paused}", height=600),
    Shot("samples", "/jobs/{running}?tab=samples"),
    Shot("samples-phone", "/jobs/{running}?tab=samples", 390, 1000),
    Shot("data", "/jobs/{running}?tab=data"),
    Shot("chat", "/jobs/{chat}?tab=data", height=600),
    Shot("plan", "/jobs/{running}?tab=plan"),
    Shot("events", "/jobs/{running}?tab=events"),
    Shot("log", "/jobs/{running}?tab=log"),
    Shot("files", "/jobs/{tickets}?tab=files"),
    Shot("reproduce", "/jobs/{tickets}?tab=reproduce", height=900),
    Shot("compare", "/compare?jobs={tickets},{tickets-32}", height=1000),
    Shot("compare-dark", "/compare?jobs={tickets},{tickets-32},{chat}", dark=True),
    Shot("sweep", "/sweeps/{sweep}", height=1500),
    Shot("sweep-dark", "/sweeps/{sweep}", height=1500, dark=True),
    Shot("sweep-phone", "/sweeps/{sweep}", 390, 1500),
    Shot("sweeps", "/sweeps", height=400),
    Shot("new", "/new?check={draft}", height=1000),
    Shot("new-dark", "/new?check={draft}", height=1000, dark=True),
    Shot("new-phone", "/new?check={draft}", 390, 1500),
    Shot("new-empty", "/new"),
    Shot("datasets", "/datasets", height=400),
    Shot("datasets-phone", "/datasets", 390, 500),
    Shot("report", "/jobs/{tickets}/report"),
]


def draw(names: list[str], folder: Path = FOLDER) -> None:
    """Draw these pictures; none named: all, and the record."""
    wanted = [each for each in PICTURES if not names or each.name in names]
    folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as home,
        tempfile.TemporaryDirectory() as traces,
        sync_playwright() as playwright,
    ):
        os.environ.setdefault("LONGHAUL_TRACES", traces)
        (Path(home) / "data").symlink_to(EXAMPLES)
        with Local(Path(home)) as local:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET, chromium_sandbox=False)
            jobs = train(local)
            if not names:
                record(local, jobs["running"])
            for each in wanted:
                shoot(each, browser, local, jobs, folder)
            browser.close()


def train(local: Local) -> dict[str, str]:
    """Ids by name, once all have ended but `running`, which has most of its steps behind it."""
    api = local.api
    api.upload(EXAMPLES / "tickets.jsonl")
    tickets, chat = example("tickets"), example("chat")
    jobs = {
        "tickets": api.submit(tickets)["id"],
        "tickets-32": api.submit(changed(tickets, name="tickets-32", training={"batch_size": 32}))["id"],
        "chat": api.submit(chat)["id"],
        "draft": api.submit(example("job"), dry_run=True)["id"],
        "failed": api.submit(
            changed(tickets, name="tickets-wrong-column", data={"input": "{question}", "target": "{label}"})
        )["id"],
        "paused": api.submit(changed(tickets, name="tickets-slowly", training={"epochs": 40, "batch_size": 4}))["id"],
    }
    until(lambda: api.get(jobs["paused"])["progress"]["step"], local.output)
    api.pause(jobs["paused"])
    for name in set(jobs) - {"paused"}:
        ended(local, jobs[name])
    jobs["sweep"] = api.submit_sweep(json.loads((EXAMPLES / "sweep.json").read_text()))["id"]
    until(lambda: api.sweep(jobs["sweep"])["status"] != "running", local.output)
    long = {"training": {"epochs": 24}, "evaluation": {"every_steps": 50}}
    jobs["running"] = api.submit(changed(example("job"), name="recipes", **long))["id"]

    def far() -> bool:
        job = api.get(jobs["running"])
        return job["steps"] is not None and job["progress"]["step"] >= SHARE * job["steps"]

    until(far, local.output)
    return jobs


def example(name: str) -> dict[str, Any]:
    """A job of examples/."""
    found: dict[str, Any] = json.loads((EXAMPLES / f"{name}.json").read_text())
    return found


def changed(job: Mapping[str, Any], **parts: Any) -> dict[str, Any]:
    """The same job with these keys; parts of it keep their others."""
    return {
        **job,
        **{key: {**job.get(key, {}), **part} if isinstance(part, dict) else part for key, part in parts.items()},
    }


def ended(local: Local, job: str) -> None:
    """Wait for its last event."""
    for _ in local.api.events(job):
        pass
    assert local.api.get(job)["finished_at"], local.output()


def record(local: Local, running: str) -> None:
    """What the commands of the terminal would show now, without what this machine is called."""
    api = local.api
    jobs, job = api.list(limit=20), api.get(running)
    for each in (*jobs["data"], job):
        each["spec"] = None  # which they do not show
    answers = {
        "now": time.time(), "jobs": jobs, "job": job,
        "events": list(api.past_events(running)), "checkpoints": list(api.checkpoints(running)),
    }  # fmt: skip
    text = json.dumps(answers, indent=1, ensure_ascii=False).replace(str(local.folder), "/srv")
    RECORDED.write_text(text.replace(f"-{socket.gethostname()}-", "-box-") + "\n")


def shoot(each: Shot, browser: Browser, local: Local, jobs: Mapping[str, str], folder: Path) -> None:
    """One picture."""
    page = browser.new_page(
        viewport={"width": each.width, "height": each.height},
        color_scheme="dark" if each.dark else "light", locale="en-GB", timezone_id="UTC",
    )  # fmt: skip
    page.goto(local.url + each.path.format_map(jobs))
    if page.locator("#charts").count():
        page.locator("#charts[data-drawn]").wait_for()
    if each.offline:
        page.context.set_offline(True)
        page.locator("#connection", has_text="reconnecting").wait_for()
    page.wait_for_timeout(600)
    drawn = Image.open(io.BytesIO(page.screenshot(full_page=each.whole))).convert("RGB")
    drawn.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
        folder / f"{each.name}.png", optimize=True
    )
    page.close()


if __name__ == "__main__":
    draw(sys.argv[1:])
