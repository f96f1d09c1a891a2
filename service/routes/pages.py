"""Pages: the same addresses as the API's, where a browser asks for something to look at (`Accept: text/html`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.routing import Match
from starlette.types import Scope

from jobs import answers
from jobs.dataset_report import DatasetReport
from jobs.errors import Damaged, LonghaulError, NotFound
from jobs.evaluation_metrics import CONFUSION, ConfusionMatrix
from jobs.events import EVENT_TYPES, Event
from jobs.heartbeat import device_of
from jobs.plan import CheckSummary, Plan
from jobs.preview import FILE as PREVIEW
from jobs.preview import DataPreview
from jobs.redis.queries import Filter
from jobs.redis.store import RawJob
from service.answers.conversion import event_answer, job_answer
from service.errors import invalid_response, longhaul_error_response, wants_page
from service.files.confined import Found, files_of
from service.files.uploads import Uploads
from service.jobs.actions import Actions
from service.jobs.checkpoints import checkpoints_of, why_no_model
from service.jobs.exports import Exports
from service.pages.job_story import JobStory, side_by_side, story_of
from service.pages.render import Renderer, is_encrypted
from service.pages.report import PICTURES, if_whole
from service.reading.metric_series import SeriesCache
from service.routes.comparisons import comparison_of

LETTERS = "ABCDEFGHIJ"
"""Of the jobs that are compared, as the command has them."""
Tab = Literal["overview", "try", "samples", "data", "plan", "log", "events", "files", "reproduce"]
TABS: dict[Tab, str] = {
    "overview": "Overview", "try": "Try it", "samples": "Samples", "data": "Data", "plan": "Plan", "log": "Log",
    "events": "Events", "files": "Files", "reproduce": "Reproduce",
}  # fmt: skip
STATES = ("running", "queued", "validating", "paused", "succeeded", "failed", "cancelled", "validated", "damaged")
JOBS_ON_A_PAGE = 50
JOBS_OF_A_DATASET = 3
MOST_SEARCHED = 2000
"""Newest jobs that a text is looked for in."""
MOST_EVENTS = 5000
"""Newest events of a job that a page is made from."""


def page_routes(render: Renderer) -> APIRouter:
    """A router whose routes exist for browsers only, and answer errors with a page."""

    class PageRoute(APIRoute):
        """Steps aside for programs."""

        def matches(self, scope: Scope) -> tuple[Match, Scope]:
            """None of ours unless a page is wanted."""
            wanted = scope["type"] != "http" or wants_page(scope)
            return super().matches(scope) if wanted else (Match.NONE, {})

        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            """With errors as pages."""
            answer = super().get_route_handler()

            async def handler(request: Request) -> Response:
                try:
                    return await answer(request)
                except LonghaulError as error:
                    refusal = longhaul_error_response(request, error)
                except RequestValidationError as error:
                    refusal = invalid_response(error)
                said = json.loads(bytes(refusal.body))["error"]
                return render.page(request, "error.html", refusal.status_code, error=said)

            return handler

    return APIRouter(include_in_schema=False, route_class=PageRoute)


def routes(
    actions: Actions,
    uploads: Uploads,
    kept: SeriesCache,
    exports: Exports,
    render: Renderer,
    public_url: str | None,
) -> APIRouter:
    """`/`, `/jobs/{id}`, `/compare`, `/datasets` and `/workers`, to be looked at. `public_url`: of the service."""
    router = page_routes(render)

    @lru_cache(maxsize=1024)  # tables are asked for again and again; the key is all that an answer is made of
    def shown(job: RawJob) -> answers.Job:
        return job_answer(job.parsed(), runs_name=actions.runs.name)

    @router.get("/jobs")
    @router.get("/")
    def jobs_page(
        request: Request,
        status: Annotated[list[answers.ShownStatus] | None, Query()] = None,
        label: Annotated[str, Query(max_length=600)] = "",
        text: Annotated[str, Query(max_length=200)] = "",
        after: str | None = None,
        dry_run: bool = False,
    ) -> Response:
        """Those at work, those that wait in the order of their turn, then the others, newest first."""
        key, _, value = label.partition("=")
        wanted = Filter(tuple(status or ()), {key: [value]} if label else {}, None if dry_run else False, trials=False)
        found, has_more = _search(actions, wanted, text.lower(), after)
        last = found[-1].id if found else None
        if not (text or label or after):
            found = _with_queue(actions, found, status or ["running", "queued"])
        jobs = _in_order([shown(job) for job in found])
        at = {job.id: job.record.gpu for job in found}
        gpus = {
            job["id"]: next((gpu["name"] for gpu in job["gpus"] if gpu["uuid"] == at[job["id"]]), None) for job in jobs
        }
        query = {"status": list(status or ()), "label": label, "text": text, "dry_run": "true" if dry_run else ""}
        return render.page(
            request, "jobs.html", jobs=jobs, gpus=gpus, has_more=has_more, states=STATES, query=query,
            link=lambda **change: "/?" + urlencode({k: v for k, v in (query | change).items() if v}, doseq=True),
            filtered=bool(status or label or text or after), after=after, last=last,
        )  # fmt: skip

    @lru_cache(maxsize=64)
    def story(job: str, number: int) -> JobStory:  # of events that do not change
        return story_of(actions.events(job, after=max(0, number - MOST_EVENTS), limit=MOST_EVENTS))

    @router.get("/jobs/{job}")
    def job_page(
        request: Request,
        job: str,
        tab: Tab = "overview",
        step: int | None = None,
        before: int | None = None,
        kind: EventKind = "",
    ) -> Response:
        """One job, by subject."""
        stored = actions.find(job)
        one = job_answer(stored.parsed() if isinstance(stored, RawJob) else stored, runs_name=actions.runs.name)
        values: dict[str, object] = {}
        if tab in ("overview", "samples"):
            told = story(job, one["event_number"])
            evaluation = told.at(step)
            values |= {"story": told, "evaluation": evaluation}
            values |= {"samples": told.samples(evaluation) if evaluation else [], "step": step}
        if tab == "data":
            values["pictures"] = [name for name in PICTURES if (actions.run(job).path / name).is_file()]
            values["picture_url"] = lambda name: f"/jobs/{job}/files/{name}"
        if tab == "overview":
            values["pace"] = kept.pace(actions.run(job).metrics_file)
            values["confusion"] = if_whole(actions, job, CONFUSION, ConfusionMatrix)
        if tab in ("overview", "plan"):
            try:
                plan = actions.document(job, "plan.json", Plan)
            except Damaged:
                if tab == "plan":
                    raise
                plan = None
            values |= {"full_plan": plan, "on_gpu": not (plan and plan.memory and plan.memory.device == "cpu")}
            values["measured"] = story(job, one["event_number"]).peak_bytes
        if tab in ("overview", "events"):
            values |= _events(actions, one, before=before, limit=8 if tab == "overview" else 100, kind=kind)
            values |= {"kind": kind, "kinds": KINDS}
        if tab == "data":
            values["preview"] = actions.document(job, PREVIEW, DataPreview)
            values["report"] = actions.document(job, "dataset.json", DatasetReport)
        if tab == "try":
            run = actions.run(job)
            newest_first = sorted((folder.name for folder in run.checkpoints.glob("step-*")), reverse=True)
            delivered = run.has_model()
            values |= {"delivered": delivered, "checkpoints": newest_first, "askable": delivered or newest_first}
            summary = one["plan"] if isinstance(one["plan"], CheckSummary) else None
            values["classifies"] = summary is not None and summary.task in ("classification", "regression")
            values["pairs"] = summary.input if summary is not None and summary.of_pairs else None
            never = one["dry_run"] or one["kind"] == "evaluate"
            values["why_no_model"] = (
                why_no_model(run.record())[0] if never or (one["finished_at"] and not delivered) else ""
            )
        if tab == "files":
            run = actions.run(job)
            values["checkpoints"] = checkpoints_of(run, kept, runs_name=actions.runs.name)
            values["exports"] = exports.table(one["id"]) if one["status"] == "succeeded" else []
            values["folders"] = folders_of(files_of(run.path))
        if tab == "reproduce":
            scheme = "https" if is_encrypted(request) else "http"
            values["base_url"] = public_url or f"{scheme}://{request.url.netloc}"
            values["spec_json"] = one["spec"].model_dump_json(indent=2, exclude_defaults=True) if one["spec"] else None
        return render.page(
            request, "job.html", job=one, tab=tab, tabs=TABS, event_types=" ".join(EVENT_TYPES), **values
        )

    @router.get("/compare")
    def compare_page(request: Request, jobs: Annotated[str, Query(max_length=2000)] = "") -> Response:
        """Jobs side by side."""
        found = comparison_of(actions, kept, jobs)
        newest = {job.id: story(job.id, actions.store.number(job.id)).at(None) for job in found.jobs}
        return render.page(request, "compare.html", found=found, samples=side_by_side(newest), letters=LETTERS)

    @router.get("/datasets")
    def datasets_page(request: Request, after: str = "") -> Response:
        """Uploaded data sets."""
        found, has_more = uploads.page(after, 100)
        used = {each.name: actions.store.using(each.name) for each in found}
        names = dict[str, str]()
        for job in (job for jobs in used.values() for job, _ in jobs[:JOBS_OF_A_DATASET]):
            with suppress(NotFound):  # deleted since
                names[job] = actions.find(job).record.name
        return render.page(
            request, "datasets.html", datasets=found, used=used, names=names, most=JOBS_OF_A_DATASET, has_more=has_more
        )

    @router.get("/workers")
    def workers_page(request: Request) -> Response:
        """Workers and their GPUs, and jobs that nobody can work on."""
        workers = actions.store.workers.all()
        waiting = [shown(job) for job in actions.store.page(Filter(("queued",)), limit=100)[0]]
        running = [job.parsed() for job in actions.store.page(Filter(("running",)), limit=100)[0]]
        suits = {
            each.gpu.uuid: [
                job
                for job in _in_order(waiting)
                if job["queue_position"] and any(g["uuid"] == each.gpu.uuid and g["can_take"] for g in job["gpus"])
            ]
            for each in workers
            if each.gpu
        }
        stuck = [job for job in waiting if job["waiting_reason"]]
        version = next(((each.versions or {}).get("longhaul") for each in workers if each.stage == "publish"), None)
        return render.page(
            request, "workers.html", devices=by_device(workers), suits=suits, stuck=stuck,
            latest={job.record.id: job.latest for job in running}, damaged=actions.store.all_damaged(),
            version=version,
        )  # fmt: skip

    return router


def by_device(workers: Sequence[answers.Worker]) -> list[list[answers.Worker]]:
    """By stage and name; together those that are slots of one GPU, or of one CPU, by slot."""
    found: dict[object, list[answers.Worker]] = {}
    for each in sorted(workers, key=lambda each: (each.stage, each.slot or 0, each.name)):
        gpu = each.gpu.uuid if each.gpu else None
        alone = each.slot is None and gpu is None
        device = each.name if alone else device_of(each.name, each.parent_pid, gpu, each.box, each.engine)
        found.setdefault((each.stage, device), []).append(each)
    return list(found.values())


def nowhere(render: Renderer) -> APIRouter:
    """A page for addresses that lead nowhere."""
    router = page_routes(render)

    @router.get("/{path:path}")
    def no_page(path: str) -> Response:
        """There is none."""
        raise NotFound(f"there is no page at /{path[:200]}")

    return router


def _search(actions: Actions, wanted: Filter, text: str, after: str | None) -> tuple[list[RawJob], bool]:
    """A page of jobs; with a text, those of the newest whose name, model or id has it."""
    if not text:
        return actions.store.page(wanted, after=after, limit=JOBS_ON_A_PAGE)
    found: list[RawJob] = []
    for _ in range(MOST_SEARCHED // 100):
        jobs, has_more = actions.store.page(wanted, after=after, limit=100)
        for job in jobs:
            after = job.id
            record = job.record
            if any(text in each.lower() for each in (record.name, record.model, record.id)):
                found.append(job)
                if len(found) == JOBS_ON_A_PAGE:
                    return found, True
        if not has_more:
            return found, False
    return found, True


def _with_queue(actions: Actions, found: list[RawJob], states: Sequence[str]) -> list[RawJob]:
    """Beside these jobs all at work and the first that wait, however long ago they were submitted."""
    open_ = actions.store.page(Filter(("running",)), limit=JOBS_ON_A_PAGE)[0] if "running" in states else []
    here = {job.id for job in (*found, *open_)}
    if "queued" in states:
        for job, _ in actions.store.waiting_to_train()[:JOBS_ON_A_PAGE]:
            with suppress(NotFound):  # deleted since
                open_ += [] if job in here else [actions.store.get_raw(job)]
    return [job for job in open_ if job.id not in {each.id for each in found}] + found


def _in_order(jobs: Sequence[answers.Job]) -> list[answers.Job]:
    """Those at work, then those that wait for a GPU in the order of their turn, then the others as they were."""

    def place(job: answers.Job) -> tuple[int, int]:
        waits = job["status"] == "queued" and job["queue_position"] is not None
        return (0 if job["status"] == "running" else 1 if waits else 2, job["queue_position"] or 0 if waits else 0)

    return sorted(jobs, key=place)


def _events(
    actions: Actions, job: answers.Job, *, before: int | None, limit: int, kind: EventKind
) -> dict[str, object]:
    """The newest events of a kind before a number, newest first."""
    last = min(before - 1 if before else job["event_number"], job["event_number"])
    first = max(0, last - (MOST_EVENTS if kind else limit))
    found = actions.events(job["id"], after=first, limit=last - first) if last > first else []
    shown, more = newest_of(kind, found, limit)
    return {"events": [event_answer(event) for event in shown], "earlier": more or (first + 1 if first else None)}


EventKind = Literal["", "warnings", "job", "attempts", "evaluations", "checkpoints", "memory"]
KINDS: Mapping[EventKind, str] = {
    "": "all", "warnings": "warnings and errors", "job": "job", "attempts": "attempts", "evaluations": "evaluations",
    "checkpoints": "checkpoints", "memory": "memory and disk",
}  # fmt: skip
"""With their titles."""
_SUBJECTS: Mapping[str, EventKind] = {
    "job": "job", "steps": "job", "attempt": "attempts", "task": "attempts", "device": "attempts", "model": "attempts",
    "update": "attempts", "evaluation": "evaluations", "checkpoint": "checkpoints", "memory": "memory", "oom": "memory",
    "disk": "memory",
}  # fmt: skip
"""The kind of each first part of a type."""


@dataclass(frozen=True)
class ListedFile:
    """A file of the run directory."""

    path: str
    """Relative to the run directory."""
    bytes: int
    changed_at: float

    @property
    def name(self) -> str:
        """Without its folder."""
        return self.path.rpartition("/")[2]


@dataclass(frozen=True)
class FileFolder:
    """The files of one folder, without those of folders in it."""

    path: str
    """Relative to the run directory; empty: the run directory itself."""
    files: tuple[ListedFile, ...]

    @property
    def bytes(self) -> int:
        """Of all of them."""
        return sum(each.bytes for each in self.files)


def folders_of(files: Iterable[Found]) -> list[FileFolder]:
    """The files by folder, the run directory's own first, the others in order of path."""
    found: dict[str, list[ListedFile]] = {}
    for file in files:
        listed = ListedFile(file.path, file.status.st_size, file.status.st_mtime)
        found.setdefault(file.path.rpartition("/")[0], []).append(listed)
    return [FileFolder(path, tuple(found[path])) for path in sorted(found)]


def kind_of(event_type: str) -> EventKind:
    """Of a type of event, such as `checkpoint.saved`. KeyError: there is no such type."""
    return _SUBJECTS[event_type.partition(".")[0]]


def newest_of(kind: EventKind, events: Sequence[Event], limit: int) -> tuple[list[Event], int | None]:
    """The newest events of a kind, newest first; and the number before which there are more, if there are any."""
    found = [
        event
        for event in reversed(events)
        if not kind or (event.fact.level != "info" if kind == "warnings" else kind_of(event.type) == kind)
    ]
    return found[:limit], found[limit - 1].number if len(found) > limit else None
