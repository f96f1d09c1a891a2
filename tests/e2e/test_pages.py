"""The pages on the whole of Longhaul: from a file to a model, by keyboard; and three formats of rows."""

from __future__ import annotations

import csv
import json
import tarfile
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from jobs.disk.rundir import RunDir
from jobs.spec import JobSpec
from tests.service.pages.watched import WatchedPage
from tests.support.processes import continue_once_asked, freeze, stepping, thaw
from tests.support.shared_stack import data_of, emptied, stop
from tests.support.stack import ROOT, Stack

EXAMPLES = ROOT / "examples"
HOSTILE = '<img src=x onerror="document.title=1">'
CHECKED_MS = 300_000.0
"""A check that waits for another, on a machine that others use."""


@pytest.fixture
def stack(stack: Stack) -> Stack:
    """Its pages list no job."""
    return emptied(stack)


def press(page: Page, target: Locator, key: str = "Enter") -> None:
    """Go there with Tab alone, and press a key."""
    for _ in range(120):
        if target.evaluate("(one) => one === document.activeElement"):
            page.keyboard.press(key)
            return
        page.keyboard.press("Tab")
    raise AssertionError(f"Tab does not lead to {target}")


def write(page: Page, label: str, text: str) -> None:
    """Into the field of this name, by keyboard."""
    press(page, page.locator(f"[name='{label}']"), "Control+a")
    page.keyboard.type(text)


def tickets_as_csv(folder: Path) -> Path:
    """The labelled examples as a table."""
    rows = [json.loads(line) for line in (EXAMPLES / "tickets.jsonl").read_text().splitlines()]
    file = folder / "tickets.csv"
    with file.open("w", newline="") as table:
        writer = csv.DictWriter(table, ["text", "label"])
        writer.writeheader()
        writer.writerows(rows)
    return file


def test_rows_of_three_formats_are_recognized_shown_and_planned(stack: Stack, tmp_path: Path, browser: Browser) -> None:
    formats = [
        (EXAMPLES / "chats.jsonl", "OpenAI chat", "Qwen/Qwen3-0.6B", "builtin:qwen-tiny"),
        (tickets_as_csv(tmp_path), "text and label", "answerdotai/ModernBERT-base", "builtin:roberta-tiny"),
        (EXAMPLES / "recipes.jsonl", "recipes", "google/flan-t5-base", "builtin:t5-tiny"),
    ]
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text(json.dumps({HOSTILE: 1, "b": 2}) + "\n")
    stop(stack, "prepare", "train")
    with WatchedPage(browser) as watched:
        watched.expected = ["409"]  # a dry run is deleted while its worker still lets go of it
        page = watched.page
        for file, read_as, suggested, model in formats:
            page.goto(f"{stack.url}/new")
            page.set_input_files("#file", file)
            page.get_by_text(f"Read as {read_as}").wait_for(timeout=CHECKED_MS)
            # Nothing is asked of a hub here: what is suggested cannot be planned, and the page says why.
            expect(page.locator("#field-model")).to_have_value(suggested, timeout=CHECKED_MS)
            expect(page.locator("#error-model")).to_contain_text("HF_HUB_OFFLINE", timeout=CHECKED_MS)
            page.locator(f"button[data-model='{model}']").click()
            expect(page.locator("#start")).to_be_enabled(timeout=CHECKED_MS)
            assert page.locator("#plan .memory").is_visible() and page.locator("#preview article").count() == 3
            page.locator("#start").click()
            page.wait_for_url("**/jobs/job-*")
            spec = RunDir(stack.runs / page.url.rpartition("/")[2]).spec()
            wanted = {"name": file.stem, "model": model, "data": {"train": f"dataset:{file.name}"}}
            assert spec == JobSpec.model_validate(wanted)
        page.goto(stack.url)
        expect(page.locator("tr[id]")).to_have_count(3)  # no dry run is among them

        page.goto(f"{stack.url}/new")
        page.set_input_files("#file", wrong)
        expect(page.locator("[id='error-data.input']")).to_contain_text(f"it has: {HOSTILE}, b", timeout=CHECKED_MS)
        assert page.locator("#main img").count() == 0 and page.title() == "New job · Longhaul"
        assert watched.faults == []


def test_from_a_file_to_a_model_and_a_comparison_by_keyboard_across_a_restart(stack: Stack, browser: Browser) -> None:
    with WatchedPage(browser) as watched:
        watched.expected = ["net::ERR_", "409"]  # the service is killed
        page = watched.page
        page.goto(stack.url)
        press(page, page.get_by_role("link", name="New job").first)

        # upload → preview
        with page.expect_file_chooser() as chooser:
            press(page, page.locator("#file"))
        chooser.value.set_files(data_of(stack) / "rows.jsonl")
        page.get_by_text("Read as recipes").wait_for(timeout=CHECKED_MS)
        # answers, with one of what is behind "more" → plan; the service goes away meanwhile
        press(page, page.locator("button[data-model='builtin:t5-tiny']"))
        stack.kill("service")
        write(page, "training.epochs", "10")
        page.locator("#connection", has_text="reconnecting").wait_for(timeout=CHECKED_MS)
        stack.start("service")
        press(page, page.locator("#more > summary"))
        press(page, page.locator("#group-data > summary"))
        write(page, "data.validation", "held_out.jsonl")
        press(page, page.locator("#group-training > summary"))
        write(page, "training.batch_size", "8")
        press(page, page.locator("#group-log > summary"))
        write(page, "log.every_steps", "2")
        # → submit
        expect(page.locator("#check")).to_contain_text("80 steps", timeout=CHECKED_MS)
        expect(page.locator("#connection")).to_have_text("")
        press(page, page.locator("#start"))
        page.wait_for_url("**/jobs/job-*")
        run = RunDir(stack.runs / page.url.rpartition("/")[2])

        # live curve
        charts = page.locator("#charts")
        trainer = freeze(stack, run, stepping(10, 40))
        page.locator("#charts:not([data-drawn='0'])[data-drawn]").wait_for(timeout=CHECKED_MS)
        drawn = int(charts.get_attribute("data-drawn") or 0)
        thaw(trainer)
        freeze(stack, run, stepping(44, 76))
        stack.wait_for(lambda: int(charts.get_attribute("data-drawn") or 0) > drawn or None, "the curve to go on")
        # → pause → service killed and started → resume
        press(page, page.get_by_role("button", name="Pause"))
        continue_once_asked(stack, trainer)
        page.locator("h1 .state.paused").wait_for(timeout=CHECKED_MS)
        paused_at = run.record().progress_step
        assert 0 < paused_at < 80
        stack.kill("service")
        page.locator("#connection", has_text="reconnecting").wait_for(timeout=CHECKED_MS)
        stack.start("service")
        expect(page.locator("#connection")).to_have_text("", timeout=CHECKED_MS)
        press(page, page.get_by_role("button", name="Resume"))
        # → finished, with every point of the curve
        page.locator("h1 .state.succeeded").wait_for(timeout=CHECKED_MS)
        expect(charts).to_have_attribute("data-drawn", "40", timeout=CHECKED_MS)
        # → compare with a clone, before it trains: what differs, and nothing else
        job = page.url
        stack.kill("train")
        press(page, page.get_by_role("link", name="Clone"))
        press(page, page.locator("#more > summary"))
        press(page, page.locator("#group-training > summary"))
        write(page, "training.batch_size", "16")
        expect(page.locator("#check")).to_contain_text("40 steps", timeout=CHECKED_MS)
        press(page, page.locator("#start"))
        page.wait_for_url("**/jobs/job-*")
        page.locator("h1 .state.queued").wait_for(timeout=CHECKED_MS)
        press(page, page.get_by_role("link", name="Jobs"))
        boxes = page.locator("input[name='compare']")
        expect(boxes).to_have_count(2)
        for box in boxes.all():
            press(page, box, "Space")
        press(page, page.get_by_role("button", name="Compare"))
        page.wait_for_url("**/compare?jobs=*")
        expect(page.get_by_role("region", name="Training").locator("td code")).to_contain_text(["training.batch_size"])
        assert page.get_by_role("region", name="Data").count() == page.get_by_role("region", name="Model").count() == 0
        # → download
        page.goto(job)
        with page.expect_download() as download:
            press(page, page.get_by_role("link", name="Download the model"))
        with tarfile.open(download.value.path()) as model:
            assert any(name.endswith("model.safetensors") for name in model.getnames())
        assert watched.faults == []
    assert [row.step for row in run.metrics()] == list(range(2, 81, 2))
