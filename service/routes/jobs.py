"""Submitting, listing, showing and steering jobs."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import JSONResponse

from jobs.errors import UserError
from jobs.queries import Filter
from jobs.state import Status
from jobs.store import StoredJob
from service import answers
from service.actions import Actions
from service.body import read_json
from service.documented import (
    CLONE_BODY,
    JOB_BODY,
    LOCATION,
    METADATA_FILTER,
    PRIORITY_BODY,
    IdempotencyKey,
    JobId,
    documented,
)
from service.shapes import job_json, list_json


def routes(actions: Actions) -> APIRouter:
    """`/jobs` and what is done to one job."""
    router = APIRouter(prefix="/jobs", tags=["jobs"])

    def shown(job: StoredJob) -> dict[str, Any]:
        return job_json(job, runs_name=actions.runs.name)

    @router.post(
        "",
        status_code=202,
        response_model=answers.Job,
        responses=documented(408, 409, 413, 422) | {202: {"headers": LOCATION}},
        openapi_extra=JOB_BODY,
    )
    def submit_job(
        body: Annotated[Any, Depends(read_json)],
        idempotency_key: IdempotencyKey = None,
        dry_run: Annotated[bool, Query(description="Only check the job; it ends as `validated`.")] = False,
    ) -> JSONResponse:
        """A new job (202), or the one that this Idempotency-Key and body made before."""
        job = actions.submit(body, key=idempotency_key, dry_run=dry_run)
        return JSONResponse(shown(job), status_code=202, headers={"Location": f"/jobs/{job.record.id}"})

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
        status: Annotated[tuple[Status, ...], Query(description="Only jobs that stand there; may be repeated.")] = (),
    ) -> JSONResponse:
        """Newest first; `after` is the last id of the page before, whatever has become of that job meanwhile."""
        page, has_more = actions.store.page(Filter(status, labels), after=after, limit=limit)
        return JSONResponse(list_json([shown(job) for job in page], has_more=has_more, cursor="id"))

    @router.get("/{job}", response_model=answers.Job, responses=documented(404))
    def get_job(job: JobId) -> JSONResponse:
        """One job, with progress, place in the queue and, when it failed, the cause."""
        return JSONResponse(shown(actions.find(job)))

    @router.post("/{job}/cancel", response_model=answers.Job, responses=documented(404, 409))
    def cancel_job(job: JobId) -> JSONResponse:
        """Stop for good; what the newest checkpoint has is kept."""
        return JSONResponse(shown(actions.cancel(job)))

    @router.post("/{job}/pause", response_model=answers.Job, responses=documented(404, 409))
    def pause_job(job: JobId) -> JSONResponse:
        """Give the card back until resumed."""
        return JSONResponse(shown(actions.pause(job)))

    @router.post("/{job}/resume", response_model=answers.Job, responses=documented(404, 409))
    def resume_job(job: JobId) -> JSONResponse:
        """Go on from the newest checkpoint when a card is free."""
        return JSONResponse(shown(actions.resume(job)))

    @router.patch(
        "/{job}", response_model=answers.Job, responses=documented(404, 408, 409, 413, 422), openapi_extra=PRIORITY_BODY
    )
    def change_job(job: JobId, body: Annotated[Any, Depends(read_json)]) -> JSONResponse:
        """Another priority: a waiting job moves in its order at once, a running one when it waits again."""
        return JSONResponse(shown(actions.change(job, body)))

    @router.post(
        "/{job}/clone",
        status_code=202,
        response_model=answers.Job,
        responses=documented(404, 408, 409, 413, 422) | {202: {"headers": LOCATION}},
        openapi_extra=CLONE_BODY,
    )
    def clone_job(
        job: JobId,
        patch: Annotated[Any, Depends(read_patch)],
        idempotency_key: IdempotencyKey = None,
        dry_run: Annotated[bool, Query(description="Only check the clone; it ends as `validated`.")] = False,
    ) -> JSONResponse:
        """A new job with the specification of this one, changed by a JSON merge patch; the key as for `POST /jobs`."""
        clone = actions.clone(job, patch, key=idempotency_key, dry_run=dry_run)
        return JSONResponse(shown(clone), status_code=202, headers={"Location": f"/jobs/{clone.record.id}"})

    @router.delete("/{job}", response_model=answers.DeletedJob, responses=documented(404, 409))
    def delete_job(job: JobId) -> JSONResponse:
        """Remove an ended job and its run directory, with the model and all checkpoints, for good."""
        actions.delete(job)
        return JSONResponse({"id": job, "object": "fine_tuning.job", "deleted": True})

    return router


async def read_patch(request: Request) -> Any:
    """The JSON merge patch in the body; without a body nothing is changed."""
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
