"""What was found out about a job before it trained: its plan, a picture of its memory, and some of its rows."""

from __future__ import annotations

from fastapi import APIRouter, Response

from jobs.disk.files import read_regular
from jobs.errors import NotFound
from jobs.memory_plan import PICTURE
from jobs.plan import Plan
from jobs.preview import FILE as PREVIEW
from jobs.preview import DataPreview
from service.jobs.actions import Actions, Model
from service.openapi.documented import JobId, documented


class NoPlan(NotFound):
    """The job has not been checked yet, or was refused before its memory was planned."""

    code = "no_plan"


class Picture(Response):
    """A PNG file."""

    media_type = "image/png"


def routes(actions: Actions) -> APIRouter:
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
