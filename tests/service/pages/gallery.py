"""What the pages look like: docs/pictures/pages, one file for each page, theme or size.

python -m tests.service.pages.gallery [NAME …]     # draw them anew, after a change of what the pages show
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import sync_playwright

from tests.service.pages.showcase import furnish
from tests.service.running import running
from tests.support.browser import CHROMIUM, QUIET
from tests.support.redis_server import RedisServer
from tests.support.stack import ROOT

FOLDER = ROOT / "docs" / "pictures" / "pages"


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


PICTURES = [
    Shot("jobs", "/"),
    Shot("jobs-dark", "/", dark=True),
    Shot("jobs-phone", "/", 390, 800),
    Shot("jobs-none", "/?text=nothing-is-called-so", height=500),
    Shot("job", "/jobs/{recipes-xl}", height=1000),
    Shot("job-dark", "/jobs/{recipes-xl}", height=1000, dark=True, whole=True),
    Shot("job-phone", "/jobs/{recipes-xl}", 390, 800),
    Shot("job-wide", "/jobs/{recipes-xl}", 2560, 1300),
    Shot("job-failed", "/jobs/{recipes-large}", height=600),
    Shot("job-validating", "/jobs/{smoke-test}", height=600),
    Shot("job-finished", "/jobs/{tickets}", height=1000),
    Shot("job-paused", "/jobs/{recipes-base}", height=600),
    Shot("job-damaged", "/jobs/{torn}", height=600),
    Shot("job-offline", "/jobs/{recipes-xl}", height=600, offline=True),
    Shot("samples", "/jobs/{recipes-xl}?tab=samples"),
    Shot("data", "/jobs/{recipes-xl}?tab=data", whole=True),
    Shot("chat", "/jobs/{support-chat}?tab=data", height=600),
    Shot("plan", "/jobs/{recipes-xl}?tab=plan"),
    Shot("events", "/jobs/{recipes-xl}?tab=events"),
    Shot("log", "/jobs/{recipes-xl}?tab=log"),
    Shot("compare", "/compare?jobs={support-chat},{support-chat-long}", height=1000),
    Shot("compare-three", "/compare?jobs={recipes-xl},{recipes-large},{tickets}", dark=True, whole=True),
    Shot("sweep", "/sweeps/{sweep}", height=1700),
    Shot("sweep-dark", "/sweeps/{sweep-running}", height=1700, dark=True),
    Shot("sweep-phone", "/sweeps/{sweep}", 390, 1500),
    Shot("sweeps", "/sweeps", height=400),
    Shot("new", "/new?check={draft}", height=1000),
    Shot("new-dark", "/new?check={draft}", height=1000, dark=True),
    Shot("new-phone", "/new?check={draft}", 390, 800, whole=True),
    Shot("new-empty", "/new"),
    Shot("workers", "/workers", height=600),
    Shot("datasets", "/datasets", height=400),
    Shot("files", "/jobs/{recipes-xl}?tab=files", height=600),
    Shot("reproduce", "/jobs/{recipes-xl}?tab=reproduce", height=900),
    Shot("report", "/jobs/{tickets}/report", whole=True),
    Shot("sign-in", "/sign-in", height=500),
]


def draw(names: list[str], folder: Path = FOLDER) -> None:
    """Draw these pictures; none named: all."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as home, RedisServer(Path(home) / "redis") as redis:
        redis.mark_rebuilt()
        with (
            running(redis.url, Path(home)) as service,
            running(redis.url, Path(home), api_key="of-the-gallery") as guarded,
            sync_playwright() as playwright,
        ):
            jobs = furnish(service)
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET, chromium_sandbox=False)
            for each in PICTURES:
                if names and each.name not in names:
                    continue
                page = browser.new_page(
                    viewport={"width": each.width, "height": each.height},
                    color_scheme="dark" if each.dark else "light", locale="en-GB", timezone_id="UTC",
                )  # fmt: skip
                path = each.path.format_map(jobs)
                page.goto((guarded if path == "/sign-in" else service).url + path)
                if "tab=" not in path and each.name.startswith(("job-", "job")) and page.locator("#charts").count():
                    page.locator("#charts[data-drawn]").wait_for()
                if each.offline:
                    page.context.set_offline(True)
                    page.locator("#connection", has_text="reconnecting").wait_for()
                page.wait_for_timeout(600)
                page.screenshot(path=folder / f"{each.name}.png", full_page=each.whole)
                page.close()
            browser.close()


if __name__ == "__main__":
    draw(sys.argv[1:])
