"""Submitting, listing, showing and steering jobs."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response

from jobs.errors import UserError
from jobs.redis.queries import Filter
from jobs.redis.store import StoredJob
from jobs.state import Status
from service import answers
from service.answers.conversion import job_answer, job_json, job_list_json
from service.edge.body import read_json
from service.jobs.actions import Actions
from service.openapi.documented import (
    CLONE_BODY,
    JOB_BODY,
    LOCATION,
    METADATA_FILTER,
    PRIORITY_BODY,
    RESUME_BODY,
    IdempotencyKey,
    JobId,
    documented,
)


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
            bool, Query(description="Dry runs, too. Those that are `validated` need no saying.")
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
