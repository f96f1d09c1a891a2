"""Submitting, listing, showing and steering jobs; their plans and events."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from jobs import answers
from jobs.disk.files import read_regular
from jobs.errors import NotFound, UserError
from jobs.memory_plan import PICTURE
from jobs.plan import Plan
from jobs.preview import FILE as PREVIEW
from jobs.preview import DataPreview
from jobs.redis.feed import Feed
from jobs.redis.queries import Filter
from jobs.redis.store import StoredJob
from jobs.state import Status
from service.answers.conversion import event_answer, job_answer, job_json, job_list_json, page
from service.edge.body import read_json
from service.jobs.actions import Actions, Model
from service.openapi.documented import (
    CLONE_BODY,
    EVENT_STREAM,
    JOB_BODY,
    LOCATION,
    METADATA_FILTER,
    PRIORITY_BODY,
    RESUME_BODY,
    IdempotencyKey,
    JobId,
    documented,
)
from service.reading.stream import Stream, Streams, event_stream


def routes(actions: Actions) -> APIRouter:
    """`/jobs` and what is done to one job."""
    router = APIRouter(prefix="/jobs", tags=["jobs"])

    def answer(job: StoredJob) -> answers.Job:
        return job_answer(job, runs_name=actions.runs.name)

    @router.post(
        "",
        status_code=202,
        responses=documented(408, 409, 413, 422) | {202: {"headers": LOCATION}},
        openapi_extra=JOB_BODY,
    )
    def submit_job(
        response: Response,
        body: Annotated[Any, Depends(read_json)],
        idempotency_key: IdempotencyKey = None,
        dry_run: Annotated[bool, Query(description="Only check the job; it ends as `validated`.")] = False,
    ) -> answers.Job:
        """A new job (202), or the one that this Idempotency-Key and body made before."""
        job = actions.submit(body, key=idempotency_key, dry_run=dry_run)
        response.headers["Location"] = f"/jobs/{job.record.id}"
        return answer(job)

    @router.get(
        "",
        response_model=answers.JobList,
        responses=documented(404, 422),
        openapi_extra={"parameters": [METADATA_FILTER]},
    )
    def list_jobs(
        labels: Annotated[dict[str, list[str]], Depends(read_labels)],
        after: Annotated[str | None, Query(description="Last id of the page before.")] = None,
        limit: Annotated[int, Query(ge=1, le=100, description="Jobs at most.")] = 20,
        status: Annotated[
            tuple[answers.ShownStatus, ...], Query(description="Only jobs that stand there; may be repeated.")
        ] = (),
        dry_run: Annotated[bool | None, Query(description="Only dry runs, or only other jobs.")] = None,
        dry_runs: Annotated[
            bool, Query(description="Dry runs, too. With `status=validated` they are listed in any case.")
        ] = False,
        sweep: Annotated[str | None, Query(description="Only trials of this sweep.", max_length=80)] = None,
        trials: Annotated[bool, Query(description="Trials of sweeps, too.")] = False,
    ) -> Response:
        """Newest first; `after` is the last id of the page before, whatever has become of that job meanwhile."""
        if dry_run is None and not (dry_runs or Status.VALIDATED in status):
            dry_run = False
        found, has_more = actions.store.page(Filter(status, labels, dry_run, sweep, trials), after=after, limit=limit)
        content = job_list_json(found, runs_name=actions.runs.name, has_more=has_more)
        return Response(content, media_type="application/json")

    @router.get("/{job}", response_model=answers.Job, responses=documented(404))
    def get_job(job: JobId) -> Response:
        """One job, with progress, place in the queue and, when it failed, the cause."""
        return Response(job_json(actions.find(job), runs_name=actions.runs.name), media_type="application/json")

    @router.post("/{job}/cancel", responses=documented(404, 409))
    def cancel_job(job: JobId) -> answers.Job:
        """Stop for good; what the newest checkpoint has is kept."""
        return answer(actions.cancel(job))

    @router.post("/{job}/pause", responses=documented(404, 409))
    def pause_job(job: JobId) -> answers.Job:
        """Give the GPU back until resumed."""
        return answer(actions.pause(job))

    @router.post(
        "/{job}/resume",
        responses=documented(404, 408, 409, 413, 422),
        openapi_extra=RESUME_BODY,
    )
    def resume_job(job: JobId, body: Annotated[Any, Depends(read_if_any)]) -> answers.Job:
        """Resume from the newest checkpoint when a GPU is free; or, if the body says so, begin again at step 0."""
        return answer(actions.resume(job, body))

    @router.patch("/{job}", responses=documented(404, 408, 409, 413, 422), openapi_extra=PRIORITY_BODY)
    def change_job(job: JobId, body: Annotated[Any, Depends(read_json)]) -> answers.Job:
        """Another priority: a waiting job moves in its order at once, a running one when it waits again."""
        return answer(actions.change(job, body))

    @router.post(
        "/{job}/clone",
        status_code=202,
        responses=documented(404, 408, 409, 413, 422) | {202: {"headers": LOCATION}},
        openapi_extra=CLONE_BODY,
    )
    def clone_job(
        job: JobId,
        response: Response,
        patch: Annotated[Any, Depends(read_if_any)],
        idempotency_key: IdempotencyKey = None,
        dry_run: Annotated[bool, Query(description="Only check the clone; it ends as `validated`.")] = False,
    ) -> answers.Job:
        """A new job with the specification of this one, changed by a JSON merge patch; the key as for `POST /jobs`."""
        clone = actions.clone(job, patch, key=idempotency_key, dry_run=dry_run)
        response.headers["Location"] = f"/jobs/{clone.record.id}"
        return answer(clone)

    @router.post("/{job}/repair", responses=documented(404, 409))
    def repair_job(job: JobId) -> answers.Repaired:
        """Cut a damaged job back to its last whole event, after a backup. A whole one stays as it is."""
        found, done = actions.repair(job)
        return answers.Repaired(
            object="fine_tuning.job.repair", message=done.message, backups=done.backups, job=answer(found)
        )

    @router.delete("/{job}", responses=documented(404, 409))
    def delete_job(job: JobId) -> answers.DeletedJob:
        """Remove an ended or damaged job and its run directory, with the model and all checkpoints, for good."""
        actions.delete(job)
        return answers.DeletedJob(id=job, object="fine_tuning.job", deleted=True)

    return router


async def read_if_any(request: Request) -> Any:
    """The JSON in the body; without a body an empty object."""
    empty = request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers
    return {} if empty else await read_json(request)


async def read_labels(request: Request) -> dict[str, list[str]]:  # async: a thread would take longer to wake
    """Values by key of the query parameters `metadata[key]=value`."""
    labels: dict[str, list[str]] = {}
    for name, value in request.query_params.multi_items():
        key = name.removeprefix("metadata[").removesuffix("]")
        if name == f"metadata[{key}]" and 1 <= len(key) <= 64 and len(value) <= 512:
            labels.setdefault(key, []).append(value)
        elif name.startswith("metadata"):
            raise UserError(
                f"{name[:80]}: a filter by metadata is metadata[key]=value, the key 1 to 64 characters and the value "
                "of at most 512",
                param="metadata",
            )
    if sum(map(len, labels.values())) > 16:
        raise UserError("metadata: at most 16 filters in one request", param="metadata")
    return labels


# -- plans -------------------------------------------------------------------------------------------------------------
# What was found out about a job before it trained: its plan, a picture of its memory, and some of its rows.


class NoPlan(NotFound):
    """The job has not been checked yet, or was refused before its memory was planned."""

    code = "no_plan"


class Picture(Response):
    """A PNG file."""

    media_type = "image/png"


def plan_routes(actions: Actions) -> APIRouter:
    """`/jobs/{id}/plan`, `/jobs/{id}/plan.png` and `/jobs/{id}/preview`."""
    router = APIRouter(prefix="/jobs", tags=["plans"])

    def none_yet(job: str, file: str) -> NoPlan:
        return NoPlan(f"job {job} has no {file} yet: check writes it, and prepare writes it again")

    def document(job: str, file: str, kind: type[Model]) -> Model:
        if (found := actions.document(job, file, kind)) is None:
            raise none_yet(job, file)
        return found

    @router.get("/{job}/plan", responses=documented(404, 409))
    def get_plan(job: JobId) -> Plan:
        """plan.json: model and data exactly, every `auto` resolved, steps, time, and memory with all that was tried."""
        return document(job, "plan.json", Plan)

    @router.get("/{job}/plan.png", response_class=Picture, responses=documented(404))
    def get_plan_picture(job: JobId) -> Response:
        """What each way to train needs at its peak, beside what there is."""
        run = actions.run(job)
        try:
            return Picture(read_regular(run.path / PICTURE))
        except FileNotFoundError:
            if run.record().sweep is not None:
                raise NoPlan(
                    f"job {job} is a trial: no {PICTURE} is drawn of it; GET /jobs/{job}/plan has the plan"
                ) from None
            raise none_yet(job, PICTURE) from None

    @router.get("/{job}/preview", responses=documented(404, 409))
    def get_preview(job: JobId) -> DataPreview:
        """Three rows as the model gets them: texts, tokens, what is cut off, rewritten or unknown.

        Where no columns to learn from are recognized, it has the first rows as they are in the file (`unrecognized`).
        Until *prepare* has made the tokenizer of a built-in model, they have no tokens.
        """
        return document(job, PREVIEW, DataPreview)

    return router


# -- events ------------------------------------------------------------------------------------------------------------
# What happened to a job: as a list, or live.


def event_routes(actions: Actions, feed: Feed, streams: Streams, *, keep_alive_s: float) -> APIRouter:
    """`/jobs/{id}/events`."""
    router = APIRouter(prefix="/jobs", tags=["events"])

    def past(job: str, after: int, limit: int) -> answers.EventList:
        actions.find(job)
        events = actions.events(job, after=after, limit=limit + 1)
        shown = [event_answer(event) for event in events[:limit]]
        return page(answers.EventList, shown, has_more=len(events) > limit, by="number")

    @router.get("/{job}/events", response_model=answers.EventList, responses=documented(404, 409, 422) | EVENT_STREAM)
    async def list_events(
        job: JobId,
        after: Annotated[int, Query(ge=0, le=2**53, description="Number of the last event that is known.")] = 0,
        limit: Annotated[int, Query(ge=1, le=1000, description="Events at most, of a page.")] = 100,
        accept: Annotated[str, Header(include_in_schema=False)] = "",
        last_event_id: Annotated[
            str, Header(alias="Last-Event-ID", description="Of a stream: as `after`, and it beats that.")
        ] = "",
    ) -> answers.EventList | Response:
        """Events after number `after`, in order. With `Accept: text/event-stream`: from there on, live, to the last."""
        if "text/event-stream" not in accept:
            return await run_in_threadpool(past, job, after, limit)
        # The header is the browser's own bookmark: it beats the address that the page was opened with.
        start = int(last_event_id[:15]) if last_event_id.isascii() and last_event_id.isdecimal() else after
        record = (await run_in_threadpool(actions.find, job)).record
        if record.status.terminal and start >= record.number:
            return Response(status_code=204)  # tells an EventSource not to come back
        content = event_stream(feed, job, after=start, keep_alive_s=keep_alive_s)
        return Stream(streams, content, "text/event-stream")

    return router
