"""Rows of metrics as they are, and averaged for charts: in order of step, parsed once, within bounds."""

from __future__ import annotations

import io
import os
import re
import time
from pathlib import Path

import pytest
from rich.console import Console

from jobs.attempt import Activity
from jobs.disk.files import append_line
from jobs.disk.rundir import truncate_metrics
from jobs.metrics import MetricRow
from jobs.state import Stage
from longhaul.watch import status_line
from service.reading import metric_series
from service.reading.metric_series import FIELDS, Series, SeriesCache, chosen
from tests.service.running import Service
from tests.support.samples import RUNNING, metric_row


def write(file: Path, rows: list[MetricRow]) -> None:
    with open(file, "ab") as out:
        out.write(b"".join(each.model_dump_json().encode() + b"\n" for each in rows))


def test_rows_come_in_order_of_step_and_the_later_of_two_counts(service: Service) -> None:
    job = service.submit()
    run = service.run(job)
    assert service.get(f"/jobs/{job}/metrics").json()["data"] == []
    for step in (10, 20, 30):
        append_line(run.metrics_file, metric_row(step))
    append_line(run.metrics_file, metric_row(20, loss=1.5))
    append_line(run.metrics_file, metric_row(15, loss=1.25))
    service.store.set_latest(job, metric_row(30))
    page = service.get(f"/jobs/{job}/metrics", params={"after_step": 10, "limit": 2}).json()
    assert [(each["step"], each["loss"]) for each in page["data"]] == [(15, 1.25), (20, 1.5)]
    assert page["has_more"]
    rest = service.get(f"/jobs/{job}/metrics", params={"after_step": 20}).json()
    assert (rest["data"], rest["has_more"]) == ([metric_row(30).model_dump(mode="json")], False)
    progress = service.get(f"/jobs/{job}").json()["progress"]
    assert (progress["step"], progress["loss"], progress["rows_per_s"]) == (0, 2.0, 10.0), "no attempt, no checkpoint"


def test_points_are_means_that_lose_no_spike(service: Service) -> None:
    job = service.submit()
    rows = [metric_row(10 * n, loss=float(n), rows_per_s=n / 2, mfu=0.5 if n % 2 else None) for n in range(1, 11)]
    rows[4] = metric_row(50, loss=90.0, rows_per_s=2.5)
    write(service.run(job).metrics_file, rows)
    answer = service.get(f"/jobs/{job}/metrics", params={"points": 4, "fields": "loss,rows_per_s"}).json()
    assert not answer["has_more"]
    assert [each["step"] for each in answer["data"]] == [30, 60, 90, 100]
    assert answer["data"][0] == {
        "step": 30, "at": 1030.5, "attempt": 1, "first_step": 10, "loss": 2.0, "loss_min": 1.0, "loss_max": 3.0,
        "rows_per_s": 1.0,
    }  # fmt: skip
    assert (answer["data"][1]["loss_max"], answer["data"][1]["loss"]) == (90.0, 100 / 3)
    everything = service.get(f"/jobs/{job}/metrics", params={"points": 4}).json()["data"][0]
    assert set(everything) == set(MetricRow.model_fields) | {"first_step", "loss_min", "loss_max"}
    assert everything["mfu"] == 0.5, "the mean of those that are known"
    assert everything["gpu_power_w"] is None
    zoomed = service.get(f"/jobs/{job}/metrics", params={"points": 100, "after_step": 80, "fields": "loss"}).json()
    assert [(each["first_step"], each["step"]) for each in zoomed["data"]] == [(90, 90), (100, 100)]


def test_a_chart_does_not_waver_while_rows_come(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    series = Series()
    begins = []
    for step in range(0, 160, 10):
        write(file, [metric_row(step)])
        series.catch_up(file)
        points = series.points(after_step=-1, points=10, fields=["loss"])
        assert len(points) <= 10
        begins.append([point["first_step"] for point in points])
    assert begins[9] == list(range(0, 100, 10))
    assert begins[10] == list(range(0, 110, 20)), "every stretch has grown at once"
    assert [each[:6] for each in begins[10:]] == [begins[10]] * 6, "and until the next time only new ones come"


def test_only_the_fields_that_were_asked_for(service: Service) -> None:
    job = service.submit()
    write(service.run(job).metrics_file, [metric_row(10)])
    answer = service.get(f"/jobs/{job}/metrics", params={"fields": "loss, step,loss"})
    assert answer.json()["data"] == [{"step": 10, "at": 1010.5, "attempt": 1, "loss": 2.0}]


@pytest.mark.parametrize("fields", ["los", "loss,,rows_per_s", "", "loss;rows_per_s"])
def test_an_unknown_field_is_refused_naming_the_known(service: Service, fields: str) -> None:
    job = service.submit()
    answer = service.get(f"/jobs/{job}/metrics", params={"points": 9, "fields": fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (422, "fields")
    assert all(name in error["hint"] for name in FIELDS)


def test_what_was_parsed_is_not_parsed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "metrics.jsonl"
    parsed = []
    take = Series._take

    def counted(series: Series, line: bytes, of: Path) -> None:
        parsed.append(line)
        take(series, line, of)

    monkeypatch.setattr(Series, "_take", counted)
    cache = SeriesCache()
    write(file, [metric_row(step) for step in range(3000)])  # more than one block
    assert file.stat().st_size > metric_series.BLOCK_BYTES
    for _ in range(3):
        assert len(cache.points(file, after_step=-1, points=500, fields=None)) == 500
    assert len(parsed) == 3000
    write(file, [metric_row(3000)])
    rows, more = cache.rows(file, after_step=2998, limit=10, fields=["loss"])
    assert ([each["step"] for each in rows], more, len(parsed)) == ([2999, 3000], False, 3001)


def test_a_mean_pace_is_what_was_done_by_the_time_it_took(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    # 10 steps of 1 s, 10 of 4 s, and 5 of 2 s after a resume: 25 steps of 8 rows in 60 s.
    paces = [(10, 1.0, 8.0, 0.4), (20, 4.0, 2.0, 0.1), (25, 2.0, 4.0, None)]
    write(file, [metric_row(step, step_s=each, rows_per_s=rate, mfu=mfu) for step, each, rate, mfu in paces])
    pace = SeriesCache().pace(file)
    assert pace.rows_per_s == pytest.approx(25 * 8 / 60)
    assert pace.mfu == pytest.approx((10 * 0.4 + 40 * 0.1) / 50)


def test_a_torn_line_is_waited_for_and_junk_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "metrics.jsonl"
    series = Series()
    line = metric_row(10).model_dump_json().encode() + b"\n"
    file.write_bytes(b"no row\n" + line[:40])
    series.catch_up(file)
    assert len(series) == 0
    with open(file, "ab") as out:
        out.write(line[40:])
    series.catch_up(file)
    assert series.rows(after_step=-1, limit=9, fields=None)[0] == [metric_row(10).model_dump(mode="json")]
    assert caplog.text.count("no row of metrics") == 1


def test_another_file_of_that_name_is_read_from_its_beginning(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    cache = SeriesCache()

    def steps() -> list[float | None]:
        return [each["step"] for each in cache.rows(file, after_step=-1, limit=99, fields=None)[0]]

    write(file, [metric_row(10), metric_row(20)])
    assert steps() == [10, 20]
    write(file.with_name("other"), [metric_row(1), metric_row(2), metric_row(3)])
    os.replace(file.with_name("other"), file)
    assert steps() == [1, 2, 3]
    os.truncate(file, 0)
    write(file, [metric_row(7)])
    assert steps() == [7]
    file.unlink()
    assert steps() == []


def test_redone_steps_are_those_of_the_newest_attempt_however_often_it_began_again(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    cache = SeriesCache()

    def steps(after: int = -1) -> list[tuple[float | None, float | None]]:
        rows, _ = cache.rows(file, after_step=after, limit=99, fields=None)
        return [(each["step"], each["attempt"]) for each in rows]

    write(file, [metric_row(step) for step in range(10, 101, 10)])
    assert steps()[-1] == (100, 1)
    truncate_metrics(file, 50)
    write(file, [metric_row(step, attempt=2) for step in range(60, 121, 10)])
    assert steps() == [*((step, 1) for step in range(10, 51, 10)), *((step, 2) for step in range(60, 121, 10))]
    # Cut twice between two looks: the file may have the inode again that it had at the first, and be as long or longer.
    inode = os.stat(file).st_ino
    os.truncate(file, file.read_bytes().index(b'{"step":40'))
    write(file, [metric_row(step, attempt=4) for step in range(40, 101, 5)])
    assert os.stat(file).st_ino == inode
    assert steps() == [*((step, 1) for step in range(10, 31, 10)), *((step, 4) for step in range(40, 101, 5))]
    assert steps(after=100) == [], "who has read to step 100 is told nothing twice"
    write(file, [metric_row(step, attempt=4) for step in range(105, 121, 5)])
    assert [step for step, _ in steps(after=100)] == [105, 110, 115, 120]


def test_what_is_kept_has_bounds(tmp_path: Path) -> None:
    cache = SeriesCache(most_rows=250)

    def kept_rows() -> int:
        return sum(len(series) for series, _ in cache._kept.values())

    for number in range(5):
        write(tmp_path / f"{number}.jsonl", [metric_row(step) for step in range(100)])
        cache.rows(tmp_path / f"{number}.jsonl", after_step=-1, limit=1, fields=None)
        assert kept_rows() == min(200, 100 * (number + 1))
    write(tmp_path / "long.jsonl", [metric_row(step) for step in range(400)])
    cache.rows(tmp_path / "long.jsonl", after_step=-1, limit=1, fields=None)
    assert kept_rows() == 400, "the one in use is kept, however long it is"
    for number in range(metric_series.KEPT_FILES + 9):
        cache.rows(tmp_path / f"none-{number}", after_step=-1, limit=1, fields=None)
    assert len(cache._kept) == metric_series.KEPT_FILES


def test_every_figure_of_a_row_can_be_asked_for() -> None:
    assert chosen(",".join(FIELDS)) == list(FIELDS)
    assert chosen(None) is None
    kinds = {field.annotation for field in MetricRow.model_fields.values()}
    assert kinds == {int, float, int | None, float | None}, "columns hold figures, and nothing else"


def test_what_a_job_does_before_its_first_step_is_told_by_api_page_and_command(service: Service) -> None:
    job = service.submit()
    service.append(job, *RUNNING)
    assert service.get(f"/jobs/{job}").json()["activity"] is None
    since = time.time() - 40.5
    service.store.set_activity(job, Activity(stage=Stage.TRAIN, attempt=1, phase="compile", since=since, fraction=0.36))
    answer = service.get(f"/jobs/{job}").json()
    expected = {"phase": "compile", "words": "compiling", "since": since, "fraction": 0.36}
    assert answer["activity"] == expected
    page = service.get(f"/jobs/{job}", headers={"Accept": "text/html"}).text
    assert re.search(r"Compiling for \d+ s, 36 % done\.", page)
    console = Console(file=(screen := io.StringIO()), width=100)
    console.print(status_line(answer, console))
    assert re.search(r"running: compiling for \d+ s, 36 % done", screen.getvalue())
