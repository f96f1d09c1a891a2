"""What a job was found to need before it trained: plan.json, and a picture of its memory."""

from __future__ import annotations

from fastapi import APIRouter, Response

from jobs.disk.files import read_regular
from jobs.errors import NotFound
from jobs.memory_plan import PICTURE
from jobs.plan import Plan
from service.jobs.actions import Actions
from service.openapi.documented import JobId, documented


class NoPlan(NotFound):
    """The job has not been checked yet, or was refused."""

    code = "no_plan"


class Picture(Response):
    """A PNG file."""

    media_type = "image/png"


def routes(actions: Actions) -> APIRouter:
    """`/jobs/{id}/plan` and `/jobs/{id}/plan.png`."""
    router = APIRouter(prefix="/jobs", tags=["plans"])

    def stored(job: str, file: str) -> bytes:
        try:
            return read_regular(actions.run(job).path / file)
        except FileNotFoundError:
            raise NoPlan(f"job {job} has no {file} yet: check writes it, and prepare writes it again") from None

    @router.get("/{job}/plan", response_model=Plan, responses=documented(404))
    def get_plan(job: JobId) -> Response:
        """plan.json: model and data exactly, every `auto` resolved, steps, time, and memory with all that was tried."""
        return Response(stored(job, "plan.json"), media_type="application/json")

    @router.get("/{job}/plan.png", response_class=Picture, responses=documented(404))
    def get_plan_picture(job: JobId) -> Response:
        """What each way to train needs at its peak, beside what there is."""
        return Picture(stored(job, PICTURE))

    return router
