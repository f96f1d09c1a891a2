"""Submitting, listing, showing and steering jobs."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query
from fastapi.responses import JSONResponse

from jobs.state import Status
from jobs.store import StoredJob
from service.actions import Actions
from service.body import read_json
from service.shapes import job_json, list_json


def routes(actions: Actions) -> APIRouter:
    """`/jobs` and what is done to one job."""
    router = APIRouter(prefix="/jobs", tags=["jobs"])

    def shown(job: StoredJob) -> dict[str, Any]:
        return job_json(job, runs_name=actions.runs.name)

    @router.post("", status_code=202)
    def submit(
        body: Annotated[Any, Depends(read_json)],
        idempotency_key: Annotated[str | None, Header()] = None,
        dry_run: bool = False,
    ) -> JSONResponse:
        """A new job (202), or the one that this Idempotency-Key and body made before."""
        job = actions.submit(body, key=idempotency_key, dry_run=dry_run)
        return JSONResponse(shown(job), status_code=202, headers={"Location": f"/jobs/{job.record.id}"})

    @router.get("")
    def list_jobs(
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        status: Status | None = None,
    ) -> JSONResponse:
        """Newest first; `after` is the last id of the page before."""
        page, has_more = actions.store.page(after=after, limit=limit, status=status)
        return JSONResponse(list_json([shown(job) for job in page], has_more=has_more, cursor="id"))

    @router.get("/{job}")
    def show(job: str) -> JSONResponse:
        """One job, with progress, place in the queue and, when it failed, the cause."""
        return JSONResponse(shown(actions.find(job)))

    @router.post("/{job}/cancel")
    def cancel(job: str) -> JSONResponse:
        """Stop for good; what the newest checkpoint has is kept."""
        return JSONResponse(shown(actions.cancel(job)))

    @router.post("/{job}/pause")
    def pause(job: str) -> JSONResponse:
        """Give the card back until resumed."""
        return JSONResponse(shown(actions.pause(job)))

    @router.post("/{job}/resume")
    def resume(job: str) -> JSONResponse:
        """Go on from the newest checkpoint when a card is free."""
        return JSONResponse(shown(actions.resume(job)))

    return router
