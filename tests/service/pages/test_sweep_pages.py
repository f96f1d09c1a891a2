"""Pages of sweeps: the list, and of one the best trial, drawings, and a table that needs no script to be sorted."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from playwright.sync_api import Browser, expect

from jobs import answers
from jobs.answers import TrialStatus
from jobs.disk.rundir import create
from jobs.redis.store import submitted_of
from jobs.spec import parse_spec
from jobs.sweeps.directory import find
from jobs.sweeps.events import SweepEnded, TrialEnded, TrialPruned, TrialStarted
from jobs.sweeps.space import Value
from jobs.sweeps.spec import SweepSpec
from jobs.trainer_facts import Fault
from service.pages.trial_charts import (
    HEIGHT,
    LINES_HEIGHT,
    LINES_UNUSED,
    LINES_WIDTH,
    MOST_EQUAL,
    WIDTH,
    short_names,
    trial_charts,
)
from tests.service.pages.showcase import furnish_sweep
from tests.service.pages.watched import WatchedPage
from tests.service.running import TINY, Service
from tests.service.seeded import seed_sweep

HOSTILE = "<img src=x onerror=alert(1)>"
PAGE = {"Accept": "text/html"}


@pytest.mark.parametrize(("theme", "width"), [("light", 1280), ("dark", 390)])
def test_every_page_of_a_sweep_is_sound_and_usable(browser: Browser, service: Service, theme: str, width: int) -> None:
    view = {"color_scheme": theme, "viewport": {"width": width, "height": 900}}
    with WatchedPage(browser, **view) as watched:
        page = watched.page
        empty = service.post("/sweeps", json={"job": TINY, "space": {"training.seed": [1, 2]}})
        sweeps = [seed_sweep(service, ended=True), seed_sweep(service, ended=False), furnish_sweep(service, 120)]
        for path in ("/sweeps", *(f"/sweeps/{sweep}" for sweep in [empty.json()["id"], *sweeps])):
            answer = page.goto(service.url + path, wait_until="networkidle")
            assert answer is not None and answer.status == 200, path
            wider = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert wider == 0, f"{path} is {wider} px wider than the window"
            assert watched.violations() == [], path
        assert watched.faults == []


def test_the_list_leads_to_a_sweep_and_that_to_its_best_trial(service: Service, watched: WatchedPage) -> None:
    sweep, page = seed_sweep(service, ended=True), watched.page
    page.goto(service.url)
    page.get_by_role("link", name="Sweeps").click()
    row = page.locator("table.sweeps tbody tr")
    expect(row).to_contain_text("4 of 20")
    expect(row).to_contain_text("1 succeeded, 1 pruned, 1 failed, 1 cancelled")
    expect(row).to_contain_text("1.5000")
    row.get_by_role("link", name="sweep").click()
    best = page.locator("article", has=page.get_by_role("heading", name="Best trial"))
    expect(best.locator("dd")).to_have_text(["1.5000 of trial 0", "1e-4", "16"])
    expect(best.get_by_role("link")).to_have_attribute("href", f"/jobs/job-{sweep[6:]}-0")
    expect(page.locator("#trial-1")).to_contain_text("no room")
    expect(page.locator("#trial-2")).to_contain_text("worse than the median of 5 others at evaluation 1")
    with page.expect_download() as download:
        page.get_by_role("link", name="Trials as CSV").click()
    assert download.value.path().read_bytes() == service.get(f"/sweeps/{sweep}/trials.csv").content
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Yes").click()
    page.get_by_role("heading", name="No sweeps yet").wait_for()


def test_a_sweep_that_failed_says_why_and_each_seed_has_its_job(service: Service, watched: WatchedPage) -> None:
    asked = {"job": TINY, "space": {"training.batch_size": [8, 16]}, "seeds": 2, "pruning": "asha"}
    sweep, page = find(service.settings.runs, service.post("/sweeps", json=asked).json()["id"]), watched.page
    lost = Fault(code="gpu_lost", message="the GPU fell off the bus", hint="restart the machine")
    sweep.append([
        TrialStarted(trial=0, settings={"training.batch_size": 8}, jobs=["job-a", "job-b"]),
        TrialEnded(trial=0, outcome="succeeded", value=1.5, values=[1.0, 2.0]),
        TrialStarted(trial=1, settings={"training.batch_size": 16}, jobs=["job-c", "job-d"]),
        TrialEnded(trial=1, outcome="failed", error=lost),
        SweepEnded(reason="failures", best=0, error=lost),
    ])  # fmt: skip
    service.run("job-a").model.mkdir(parents=True)
    page.goto(f"{service.url}/sweeps/{sweep.id}")
    expect(page.locator("h1 .state")).to_have_text("failed")
    expect(page.get_by_role("alert")).to_contain_text("the GPU fell off the bus restart the machine gpu_lost")
    expect(page.locator("p.notice")).to_contain_text("it pays from 50 on")
    expect(page.locator("article p")).to_have_text("Job 1 1.0000, Job 2 job-b has no model any more 2.0000")
    expect(page.locator("#trial-0 a")).to_have_text(["0.1", "0.2"])
    assert watched.violations() == []


def test_the_best_trial_is_repeated_and_what_is_known_before_the_end_is_provisional(
    service: Service, watched: WatchedPage
) -> None:
    sweep, page = furnish_sweep(service, 24, ended=False), watched.page
    page.goto(f"{service.url}/sweeps/{sweep}")
    importance = page.locator("article", has=page.get_by_role("heading", name="Importance"))
    expect(importance).to_contain_text("training.learning_rate 71")
    expect(importance).to_contain_text("Provisional: how much of the differences between the trials so far")
    page.get_by_role("button", name="Repeat").click()
    page.get_by_role("button", name="Yes").click()
    page.get_by_role("heading", name="flan-t5 recipes again").wait_for()
    (again, _) = service.get("/sweeps").json()["data"]
    assert page.url == f"{service.url}/sweeps/{again['id']}" and again["max_trials"] == 5


def test_programs_get_json(service: Service) -> None:
    sweep = seed_sweep(service, ended=True)
    for path in ("/sweeps", f"/sweeps/{sweep}"):
        assert service.get(path).headers["Content-Type"] == "application/json"
        assert service.get(path, headers=PAGE).headers["Content-Type"].startswith("text/html")
    assert service.get("/sweeps/sweep-nowhere", headers=PAGE).status_code == 404


def test_a_page_follows_its_sweep_and_cancelling_asks_first(service: Service, watched: WatchedPage) -> None:
    sweep, page = seed_sweep(service, ended=False), watched.page
    page.goto(f"{service.url}/sweeps/{sweep}")
    expect(page.locator("#trial-3 .state")).to_have_text("running")
    page.evaluate("window.untouched = true")
    find(service.settings.runs, sweep).append([TrialEnded(trial=3, outcome="succeeded", value=1.25, values=[1.25])])
    expect(page.locator("#trial-3 .state")).to_have_text("succeeded", timeout=15_000)
    expect(page.locator("article").first).to_contain_text("1.2500 of trial 3")
    page.get_by_role("button", name="Cancel").click()
    page.keyboard.press("Escape")
    assert service.get(f"/sweeps/{sweep}").json()["cancel_requested"] is False
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Yes").click()
    expect(page.locator("h1 .state")).to_have_text("cancelling")
    expect(page.get_by_role("button", name="Cancel", exact=True)).to_have_count(0)
    assert page.evaluate("window.untouched"), "the page was changed, not loaded anew"


@pytest.mark.parametrize(("metric", "best_first"), [("loss", "ascending"), ("accuracy", "descending")])
def test_a_column_of_values_says_which_way_they_go(service: Service, metric: str, best_first: str) -> None:
    job = {"model": "builtin:roberta-tiny", "data": {"train": "rows.jsonl"}}
    answer = service.post("/sweeps", json={"job": job, "space": {"training.seed": [1, 2]}, "metric": metric})
    sweep = find(service.settings.runs, answer.json()["id"])
    for number, value in enumerate((0.25, 0.75)):
        sweep.append([
            TrialStarted(trial=number, settings={"training.seed": number + 1}, jobs=[f"job-{number}"]),
            TrialEnded(trial=number, outcome="succeeded", value=value, values=[value]),
        ])  # fmt: skip
    shown = {}
    for sort in ("value", "-value"):
        page = service.get(f"/sweeps/{sweep.id}?sort={sort}", headers=PAGE).text
        rows = re.findall(r'<tr id="trial-(\d)"', page)
        [(said, arrow)] = re.findall(r'aria-sort="(\w+)".*?<span aria-hidden="true">(.)</span>', page)
        assert (said, arrow) == (("ascending", "▴") if rows == ["0", "1"] else ("descending", "▾"))
        shown[sort] = said
    assert shown["value"] == best_first != shown["-value"]


def test_only_a_sweep_that_runs_may_yet_succeed(service: Service) -> None:
    sweep = service.post("/sweeps", json={"job": TINY, "space": {"training.seed": [1, 2]}}).json()["id"]
    assert "No trial has succeeded yet." in service.get(f"/sweeps/{sweep}", headers=PAGE).text
    find(service.settings.runs, sweep).append([SweepEnded(reason="done")])
    assert "No trial has succeeded." in service.get(f"/sweeps/{sweep}", headers=PAGE).text


def test_a_thousand_trials_are_sorted_and_paged_without_scripts(service: Service, browser: Browser) -> None:
    sweep = furnish_sweep(service, 1000)
    trials = service.get(f"/sweeps/{sweep}/trials").json()["data"]
    ranked = sorted((each for each in trials if each["status"] == "succeeded"), key=lambda each: each["value"])
    ranked += sorted((each for each in trials if each["status"] == "pruned"), key=lambda each: each["value"])
    best_first = [each["number"] for each in ranked]
    with WatchedPage(browser, java_script_enabled=False) as watched:
        page = watched.page
        page.goto(f"{service.url}/sweeps/{sweep}")

        def expect_numbers(numbers: Iterable[int]) -> None:
            expect(page.locator("table.trial-table tbody td:first-child")).to_have_text(list(map(str, numbers)))

        expect_numbers(best_first[:100])
        page.get_by_role("link", name="Next").click()
        expect_numbers(best_first[100:200])
        page.get_by_role("link", name="Trial", exact=True).focus()
        page.keyboard.press("Enter")
        expect_numbers(range(999, 899, -1))
        expect(page.locator("th[aria-sort=descending]")).to_have_text("Trial ▾")
        page.get_by_role("link", name="Trial", exact=True).click()
        expect_numbers(range(100))
        page.get_by_role("link", name="validation loss").click()
        expect_numbers(best_first[:100])
        page.get_by_role("link", name="validation loss").click()
        expect_numbers(best_first[:-101:-1])
        page.goto(f"{service.url}/sweeps/{sweep}?page=99")
        expect(page.locator("nav.pages span")).to_have_text("10 of 10")


def test_texts_of_a_sweep_are_texts(service: Service, watched: WatchedPage) -> None:
    templates = [HOSTILE + "{title}", "{title} " + 4000 * "x"]
    space = {"data.input": templates, "data.target": ["{a}", "{b}"]}
    answer = service.post("/sweeps", json={"job": TINY, "space": space})
    assert answer.status_code == 202, answer.text
    sweep = find(service.settings.runs, answer.json()["id"])
    started = [
        TrialStarted(trial=number, settings={"data.input": each, "data.target": "{a}"}, jobs=[])
        for number, each in enumerate([*templates, *templates[:1] * 2])
    ]
    wrong = Fault(code="no_data", message=HOSTILE + 4000 * "y")
    sweep.append([
        *started, TrialEnded(trial=0, outcome="failed", error=wrong),
        TrialEnded(trial=1, outcome="cancelled"), TrialEnded(trial=3, outcome="succeeded", value=1.0, values=[1.0]),
        TrialPruned(trial=2, step=1, value=2.0, message=HOSTILE), TrialEnded(trial=2, outcome="pruned"),
    ])  # fmt: skip
    page = watched.page
    page.on("dialog", lambda dialog: watched.faults.append(dialog.message))
    page.goto(f"{service.url}/sweeps/{sweep.id}")
    for where in ("article", ".charts", ".parallel", "#trial-0 .why", "#trial-2 .why", "#trial-2 .setting"):
        expect(page.locator(where).first).to_contain_text("<img" if where in (".charts", ".parallel") else HOSTILE)
    for width in (390, 1280):
        page.set_viewport_size({"width": width, "height": 800})
        wider = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wider == 0, f"the page is {wider} px wider than a window of {width}"
    assert page.locator("img").count() == 0


def test_the_page_of_a_trial_leads_to_its_sweep(service: Service, watched: WatchedPage) -> None:
    sweep, page = seed_sweep(service, ended=False), watched.page
    spec = parse_spec(TINY)
    run, _ = create(service.settings.runs, f"job-{sweep[6:]}-3", spec, submitted_of(spec, sweep=sweep))
    service.append(run.id)
    page.goto(f"{service.url}/sweeps/{sweep}")
    page.get_by_role("link", name="3", exact=True).click()
    page.get_by_role("link", name=sweep).click()
    expect(page.get_by_role("heading", level=1)).to_have_text("sweep running")


SPACE = {
    "training.learning_rate": {"range": [1e-5, 1e-2], "log": True},
    "method.type": ["full", "lora"],
    "method.rank": {"int": [1, 64], "when": {"method.type": "lora"}},
}


def trial(number: int, value: float | None, status: TrialStatus = "succeeded", **more: Value) -> answers.Trial:
    settings: dict[str, Value] = {"training.learning_rate": 1e-4, "method.type": "full"}
    return answers.Trial(
        object="sweep.trial", number=number, status=status, settings=settings | {_KEYS[key]: more[key] for key in more},
        jobs=[], gone=[], value=value, values=[], started_at=0, finished_at=None, seconds=0.0, message=None, error=None,
    )  # fmt: skip


_KEYS = {"rate": "training.learning_rate", "kind": "method.type", "rank": "method.rank"}


def sweep_of(metric: str = "loss") -> SweepSpec:
    return SweepSpec.model_validate({"job": TINY, "space": SPACE, "metric": metric})


def numbers_of(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"[ML]([-\d.e]+),([-\d.e]+)", path)]


VALUES = st.one_of(st.none(), st.floats(-1e9, 1e9), st.just(math.nan), st.just(math.inf))


@given(
    st.lists(st.tuples(VALUES, st.sampled_from(["succeeded", "pruned", "failed"]), st.floats(1e-5, 1e-2)), min_size=1)
)
@example([(5e-324, "succeeded", 1e-4)])
@example([(0.0, "succeeded", 1e-4), (5e-324, "succeeded", 1e-4)])
def test_everything_is_inside_of_its_drawing(given: list[tuple[float | None, TrialStatus, float]]) -> None:
    trials = [
        trial(number, value if status != "failed" else None, status, rate=rate, kind="lora", rank=number % 64 + 1)
        for number, (value, status, rate) in enumerate(given)
    ]
    charts = trial_charts(sweep_of(), trials)
    assert charts is not None
    for scatter in charts.scatters:
        marks = [place for path in scatter.marks.values() for place in numbers_of(path)]
        assert len(marks) == len(trials)
        assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in marks)
    corners = [place for path in charts.parallel.lines.values() for place in numbers_of(path)]
    finite = sum(each["value"] is not None and math.isfinite(each["value"]) for each in trials)
    assert len(corners) == 3 * len(trials) + finite
    assert all(0 <= x <= LINES_WIDTH and 0 <= y <= LINES_HEIGHT for x, y in corners)


def test_a_logarithm_is_even_and_a_choice_has_its_place() -> None:
    rates = [1e-5, 1e-4, 1e-3, 1e-2]
    charts = trial_charts(sweep_of(), [trial(number, 1.0, rate=rate) for number, rate in enumerate(rates)])
    assert charts is not None
    rate, kind, rank = charts.scatters
    places = [x for x, _ in numbers_of(rate.marks["succeeded"])]
    steps = {round(later - earlier) for earlier, later in pairwise(places)}
    assert len(steps) == 1 and min(steps) > 0
    assert [text for _, text in rate.x_ticks] == ["1e-5", "1e-4", "0.001", "0.01"]
    assert [text for _, text in kind.x_ticks] == ["full", "lora"]
    assert rank.marks == {} and charts.parallel.unused == {"method.rank"}
    assert [y for _, y in numbers_of(charts.parallel.best[-1][0])][2] == LINES_UNUSED


def test_the_best_are_told_from_the_others_and_one_that_diverged_flattens_nothing() -> None:
    trials = [trial(number, 1.0 + 0.01 * number) for number in range(20)] + [trial(20, 1e6), trial(21, 0.95, "pruned")]
    charts = trial_charts(sweep_of(), trials)
    assert charts is not None and charts.beyond == 1
    assert charts.equal == (0,) and {"best", "next", "succeeded", "pruned"} == charts.drawn
    assert [each["number"] for each in charts.scatters[0].best[0].trials] == [4] and charts.scatters[0].best[-1].is_best
    assert [(each["number"], is_best) for _, each, is_best in charts.parallel.best] == [
        (4, False), (3, False), (2, False), (1, False), (0, True),
    ]  # fmt: skip
    heights = [y for _, y in numbers_of(charts.scatters[0].marks["succeeded"])]
    assert heights[0] - heights[19] > 40, "twenty values that differ are seen to differ"
    best = trial_charts(sweep_of("accuracy"), trials[:20])
    assert best is not None and best.parallel.best[-1][1]["number"] == 19


def test_trials_that_are_equal_are_drawn_alike() -> None:
    values = [0.9, 0.9, 0.8, 0.7, 0.7, 0.7]
    charts = trial_charts(sweep_of("accuracy"), [trial(number, value) for number, value in enumerate(values)])
    assert charts is not None and charts.equal == (0, 1)
    shown = [([each["number"] for each in point.trials], point.is_best) for point in charts.scatters[0].best]
    assert shown == [([2], False), ([1, 0], True)], "not two of three that are equal"
    assert charts.drawn == {"best", "next", "succeeded"}
    many = trial_charts(sweep_of("accuracy"), [trial(number, 1.0) for number in range(1000)])
    assert many is not None and len(many.equal) == 1000 and len(many.parallel.best) == MOST_EQUAL


def test_a_sweep_without_any_result_has_no_drawing() -> None:
    assert trial_charts(sweep_of(), [trial(0, None, "running"), trial(1, None, "cancelled")]) is None


def test_keys_are_short_where_that_is_clear() -> None:
    assert short_names(["method.rank", "training.seed", "data.seed"]) == {
        "method.rank": "rank", "training.seed": "training.seed", "data.seed": "data.seed",
    }  # fmt: skip
