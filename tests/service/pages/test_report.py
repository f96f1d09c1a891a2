"""The report: one file that tells all, runs nothing, loads nothing, and is small whatever the job has."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from playwright.sync_api import Browser, expect

from jobs.evaluation_metrics import CONFUSION, ConfusionMatrix
from jobs.events import AnyFact, AttemptEnded, JobCancelled, JobSucceeded
from jobs.trainer_facts import EvaluationFinished, Sample
from jobs.verdict import Verdict
from longhaul.main import main
from service.pages.line_chart import FLAT, HEIGHT, MOST_TICKS, WIDTH, line_chart, ticks
from tests.service.pages.watched import WatchedPage
from tests.service.running import Service
from tests.service.seeded import STARTED, TRAINED, train
from tests.support.samples import dataset_report, metric_row, preview

HOSTILE = "<img src=x onerror=alert(1)>"


def test_it_is_whole_from_the_service_and_from_a_file(
    watched: WatchedPage, seeded: tuple[Service, dict[str, str]], tmp_path: Path
) -> None:
    service, jobs = seeded
    page, file = watched.page, tmp_path / "report.html"
    for state in ("failed", "validating", "succeeded"):
        page.emulate_media(color_scheme="light")
        page.goto(f"{service.url}/jobs/{jobs[state]}/report")
        assert watched.violations() == [], state
        page.emulate_media(color_scheme="dark")
        assert watched.violations("color-contrast") == [], state
    served = page.locator("main").inner_text()
    # Its own policy lets its styles in.
    assert page.evaluate("getComputedStyle(document.querySelector('.lines polyline')).fill") == "none"
    file.write_bytes(service.get(f"/jobs/{jobs['succeeded']}/report").content)
    page.goto(file.as_uri())
    assert page.locator("main").inner_text() == served
    for part in ("What was asked", "Rows as the model gets them", "Curves", "Samples", "Memory", "Events"):
        assert part in served, part


def test_what_comes_from_data_is_text_and_the_file_is_small(service: Service, browser: Browser) -> None:
    job = service.submit(
        name="chef",
        metadata={"why": HOSTILE},
        task={"type": "classification", "labels": [f"{number:05} {HOSTILE}" for number in range(10_000)]},
    )
    train(service, job)
    run = service.run(job)
    long = "‮مرحبا 👩‍🍳 " + "x" * 1_000_000
    samples = [Sample(input=HOSTILE, target=long, generated=long)] * 8
    evaluations = [
        EvaluationFinished(
            step=5 * number, loss=3.0, rows=8, seconds=1.0, best=False, samples=samples, metrics={"accuracy": 0.25}
        )
        for number in range(3)
    ]
    service.append(job, STARTED, *TRAINED, *evaluations, JobCancelled())
    rows = (metric_row(step, loss=3 / step).model_dump_json() for step in range(1, 25_001))
    run.metrics_file.write_text("".join(f"{row}\n" for row in rows))
    report = dataset_report()
    (run.path / "dataset.json").write_text(report.model_dump_json())
    (run.path / "dataset.png").write_bytes(b"\x89PNG" + 60_000 * b"x")
    matrix = ConfusionMatrix(labels=(HOSTILE, "other"), rows=((9, 1), (0, 0)))
    (run.path / CONFUSION).write_text(matrix.model_dump_json())
    content = service.get(f"/jobs/{job}/report").content
    assert len(content) < 1_000_000
    with WatchedPage(browser) as watched:
        watched.expected = ["Failed to load resource"]  # the pictures are none
        watched.page.goto(f"{service.url}/jobs/{job}/report")
        expect(watched.page.locator("main")).to_contain_text(HOSTILE)
        assert watched.page.locator("img:not(.picture), script").count() == 0
        cells = watched.page.locator(".confusion tbody tr").first.locator("td")
        expect(cells).to_have_text(["9", "1"])
        assert watched.page.locator(".confusion th[scope='row']").first.get_attribute("title") == HOSTILE
    assert watched.faults == []


def test_it_tells_of_the_model_that_was_kept(service: Service) -> None:
    job = service.submit()
    train(service, job)
    evaluations = [
        EvaluationFinished(
            step=step, loss=3.0, rows=2000, text_rows=64, seconds=1.0, best=step == 10, metrics={"chrf": 40.0 + step},
            intervals={"chrf": {"low": 39.0 + step, "high": 41.0 + step}},
            samples=[Sample(input="a", target="b", generated=f"written at {step}")],
        )
        for step in range(0, 41, 10)
    ]  # fmt: skip
    ends: list[AnyFact] = [
        AttemptEnded(reason="early_stopped", step=40),
        JobSucceeded(model="model", step=10, loss=3.0, reason="early_stopped", chosen_by="chrf"),
    ]
    service.append(job, STARTED, *TRAINED, *evaluations, *ends)
    page = service.get(f"/jobs/{job}/report").text
    assert "written at 10" in page and "written at 40" not in page
    assert (
        "50.0 (49.0 to 51.0)" in page
        and 'data-label="rows">2,000</td><td class="right" data-label="generated texts">64</td>' in page
    )
    assert "<small>, ended early by training.early_stopping</small>" in page


@pytest.mark.parametrize("path", ["", "/report"])
def test_a_better_step_whose_checkpoint_is_missing_is_told(service: Service, path: str) -> None:
    job = service.submit()
    train(service, job)
    kept = JobSucceeded(model="model", step=10, loss=3.0, chosen_by="loss", better_step=5)
    service.append(job, STARTED, *TRAINED, AttemptEnded(reason="done", step=10), kept)
    page = service.get(f"/jobs/{job}{path}", headers={"Accept": "text/html"}).text
    told = "the best by validation loss of what was saved, 3.0000; step 5 was better, and its checkpoint is missing"
    assert f'<p class="warn">The model is {told}.</p>' in page


def test_every_surface_warns_of_a_model_that_is_not_better(
    service: Service, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = service.submit()
    train(service, job)
    verdict = Verdict.of("loss", 2.0, None, {}, base="untrained", all_empty=64)
    kept = JobSucceeded(model="model", step=10, loss=2.0, verdict=verdict)
    service.append(job, STARTED, *TRAINED, AttemptEnded(reason="done", step=10), kept)
    for path in (f"/jobs/{job}", f"/jobs/{job}/report", "/"):
        page = service.get(path, headers={"Accept": "text/html"}).text
        assert 'class="state succeeded warns"' in page and "the model writes nothing, all 64 texts are empty" in page
        assert ('class="now-line warns"' in page) == (path != "/")
    assert service.get(f"/jobs/{job}").json()["verdict"]["outcome"] == "writes_nothing"
    assert service.get(f"/jobs/{job}/events").json()["data"][-1]["level"] == "warn"
    monkeypatch.setenv("LONGHAUL_URL", service.url)
    assert main(["show", job]) == 0
    assert "the model writes nothing, all 64 texts are empty" in " ".join(capsys.readouterr().out.split())


def test_what_is_odd_about_labels_is_on_the_page(service: Service) -> None:
    job = service.submit()
    odd = {"labels_alike": (("No", "no"),), "labels_noticed": (f"{HOSTILE} is read as 1",)}
    service.run(job).write_preview(preview().model_copy(update=odd))
    page = service.get(f"/jobs/{job}/report").text
    assert '<p class="warn">labels that look alike, and are learned apart: No, no</p>' in page
    assert '<p class="warn">&lt;img src=x onerror=alert(1)&gt; is read as 1</p>' in page


def test_it_is_redacted_like_every_answer(service: Service) -> None:
    job = service.submit()
    train(service, job)
    service.append(job, STARTED, EvaluationFinished(
        step=0, loss=1.0, rows=1, seconds=1.0, best=True,
        samples=[Sample(input="key hf_abcdefghijklmnopqrstuvwxyz0123456789", target="b", generated="c")],
    ))  # fmt: skip
    assert "hf_abcdef" not in service.get(f"/jobs/{job}/report").text


def test_metrics_of_few_rows_have_no_interval_on_any_page(service: Service) -> None:
    job = service.submit()
    train(service, job)
    service.append(job, STARTED, EvaluationFinished(
        step=0, loss=1.0, rows=1, seconds=1.0, best=True, metrics={"perplexity": 2.718, "chrf": 41.2},
    ))  # fmt: skip
    for path in (f"/jobs/{job}", f"/jobs/{job}/report", f"/jobs/{job}?tab=samples", "/"):
        answer = service.get(path, headers={"Accept": "text/html"})
        assert answer.status_code == 200, path
    assert "41.2" in service.get(f"/jobs/{job}", headers={"Accept": "text/html"}).text


def test_there_is_none_of_a_job_that_is_not_there(service: Service) -> None:
    answer = service.get("/jobs/job-nowhere/report")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


FINITE = st.floats(-1e12, 1e12)


@given(st.lists(st.tuples(st.integers(0, 10**9), FINITE), min_size=1, max_size=80))
def test_everything_of_a_chart_is_inside_of_it(points: list[tuple[int, float]]) -> None:
    chart = line_chart("loss", {"training": [*points, (5, math.nan)]})
    assert chart is not None
    places = [tuple(map(float, each.split(","))) for line in chart.lines for each in line.path.split()]
    assert len(places) == len(points)
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in places)
    assert all(0 <= x <= WIDTH for x, _ in chart.x_ticks) and all(0 <= y <= HEIGHT for y, _ in chart.y_ticks)


def test_a_chart_is_below_zero_only_where_a_value_is_and_begins_at_step_0_where_it_has_one() -> None:
    for value, labels in ((0.0, {"0", "1"}), (3.25, {"2", "4"}), (-1.0, {"-1.4", "-0.6"})):
        chart = line_chart("learning rate", {"": [(10, value)]})
        assert chart is not None and [text for _, text in chart.x_ticks] == ["0", "2", "4", "6", "8", "10"]
        shown = {text for _, text in chart.y_ticks}
        assert labels <= shown and any(text.startswith("-") for text in shown) is (value < 0)


def test_a_chart_of_nothing_is_none() -> None:
    assert line_chart("loss", {"training": [(1, math.inf)], "validation": []}) is None


@given(FINITE, st.floats(1e-6, 1e12))
def test_ticks_are_few_and_between(low: float, length: float) -> None:
    high = low + length
    if length > FLAT * max(abs(low), abs(high)):
        found = ticks(low, high)
        assert len(found) <= MOST_TICKS + 1
        assert all(low - length * 1e-6 <= each <= high + length * 1e-6 for each in found)


def test_ticks_are_round() -> None:
    assert ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert ticks(0.13, 0.42) == pytest.approx([0.2, 0.3, 0.4])
