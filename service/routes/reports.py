"""A job as one file to keep and send."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

from service.jobs.actions import Actions
from service.openapi.documented import JobId, documented
from service.pages.render import Renderer
from service.pages.report import report_of
from service.reading.metric_series import SeriesCache


def report_routes(actions: Actions, kept: SeriesCache, render: Renderer) -> APIRouter:
    """`/jobs/{id}/report`."""
    router = APIRouter(prefix="/jobs", tags=["results"])

    @router.get("/{job}/report", response_class=HTMLResponse, responses=documented(404, 422))
    def read_report(job: JobId) -> HTMLResponse:
        """One page that needs no network and no script: what was asked, the rows as the model gets them, curves,
        evaluations, samples, memory, versions and the last events, as they are now."""
        text, policy = report_of(actions, kept, render, job)
        return HTMLResponse(text, headers={"Content-Security-Policy": policy})

    return router
