"""The report on a job: one file that can be kept, sent and opened anywhere, made from what the job has now."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from markupsafe import Markup

from jobs.dataset_report import DatasetReport
from jobs.errors import Damaged
from jobs.evaluation_metrics import CONFUSION, ConfusionMatrix, metric_words
from jobs.events import AttemptStarted, Event
from jobs.plan import Plan
from jobs.preview import FILE as PREVIEW
from jobs.preview import DataPreview
from jobs.redis.store import RawJob
from jobs.trainer_facts import EvaluationFinished
from service.answers.conversion import event_answer, job_answer
from service.files.confined import NoFile, content
from service.jobs.actions import Actions, Model
from service.pages.job_story import JobStory, SampleInTime, story_of
from service.pages.line_chart import LineChart, Points, line_chart
from service.pages.render import Renderer
from service.reading.metric_series import Figures, SeriesCache

PICTURES = ("dataset.png",)
"""Of the run directory, as far as it has them."""
CHART_POINTS = 400
MOST_EVENTS = 5000
EVENTS_SHOWN = 100
EVALUATIONS_SHOWN = 12
TEXT_CHARACTERS = 4000
"""Of a sample's text, and of the job file's at five times as many."""


def report_of(actions: Actions, kept: SeriesCache, render: Renderer, job: str) -> tuple[str, str]:
    """A page without scripts that loads nothing, and the policy that says so.

    Raises NotFound, Damaged.
    """
    stored = actions.find(job)
    one = job_answer(stored.parsed() if isinstance(stored, RawJob) else stored, runs_name=actions.runs.name)
    run = actions.run(job)
    events = actions.events(job, after=max(0, one["event_number"] - MOST_EVENTS), limit=MOST_EVENTS)
    story = story_of(events)
    rows = kept.points(
        run.metrics_file, after_step=-1, points=CHART_POINTS, fields=["loss", "learning_rate", "rows_per_s"]
    )
    shown = story.at(story.model_step) or story.at(None)
    plan = if_whole(actions, job, "plan.json", Plan)
    pictures = {}
    for name in PICTURES:
        with suppress(NoFile):
            pictures[name] = "data:image/png;base64," + base64.b64encode(content(run.path, name)).decode()
    style = render.style("app.css")
    text = render.text(
        "report.html",
        job=one,
        style=Markup(style),
        spec_json=_clipped(one["spec"].model_dump_json(indent=2, exclude_defaults=True), 5) if one["spec"] else None,
        preview=if_whole(actions, job, PREVIEW, DataPreview),
        report=if_whole(actions, job, "dataset.json", DatasetReport),
        full_plan=plan,
        measured=story.peak_bytes,
        charts=list(_charts(story, rows)),
        evaluations=_some(story.evaluations, shown),
        evaluation=shown,
        samples=[_short(each) for each in story.samples(shown)] if shown else [],
        events=[event_answer(event) for event in reversed(events[-EVENTS_SHOWN:])],
        attempts=_attempts(events),
        confusion=if_whole(actions, job, CONFUSION, ConfusionMatrix),
        pictures=pictures,
        picture_url=pictures.get,
    )
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; frame-ancestors 'none'"
    return text, policy


def if_whole(actions: Actions, job: str, name: str, kind: type[Model]) -> Model | None:
    """A document of the run; None: there is none, or it cannot be read, which the page of the job says."""
    with suppress(Damaged):
        return actions.document(job, name, kind)
    return None


def _charts(story: JobStory, rows: Sequence[Figures]) -> Iterator[LineChart]:
    """Losses, then each metric of the evaluations, then how training went."""

    def column(name: str) -> Points:
        return [(row["step"] or 0, value) for row in rows if (value := row[name]) is not None]

    evaluations = story.evaluations
    wanted: list[tuple[str, dict[str, Points]]] = [
        ("loss", {"training": column("loss"), "validation": [(each.step, each.loss) for each in evaluations]})
    ]
    for name in dict.fromkeys(name for each in evaluations for name in each.metrics):
        words = metric_words(name)
        wanted.append(
            (words, {words: [(each.step, each.metrics[name]) for each in evaluations if name in each.metrics]})
        )
    wanted += [("learning rate", {"": column("learning_rate")}), ("rows/s", {"": column("rows_per_s")})]
    for title, series in wanted:
        if (chart := line_chart(title, {name: points for name, points in series.items() if points})) is not None:
            yield chart


def _some(evaluations: Sequence[EvaluationFinished], shown: EvaluationFinished | None) -> list[EvaluationFinished]:
    """The first, the last, the one that is shown, and some between."""
    last = len(evaluations) - 1
    places = {round(at * last / (EVALUATIONS_SHOWN - 1)) for at in range(EVALUATIONS_SHOWN)} if last >= 0 else set()
    return [each for place, each in enumerate(evaluations) if place in places or each is shown]


def _attempts(events: Sequence[Event]) -> list[tuple[int, AttemptStarted]]:
    return [(event.attempt, event.fact) for event in events if isinstance(event.fact, AttemptStarted)]


def _short(sample: SampleInTime) -> SampleInTime:
    return replace(
        sample,
        input=_clipped(sample.input),
        target=_clipped(sample.target),
        before=sample.before and _clipped(sample.before),
        generated=_clipped(sample.generated),
    )


def _clipped(text: str, times: int = 1) -> str:
    most = times * TEXT_CHARACTERS
    return text if len(text) <= most else f"{text[:most]} … ({len(text) - most:,} more characters)"
