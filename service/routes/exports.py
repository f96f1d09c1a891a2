"""Models for other programs, and for the hub."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Request

from jobs import answers
from jobs.export import ExportFormat
from service.answers.conversion import page
from service.edge.body import read_json
from service.jobs.exports import Exports
from service.openapi.documented import EXPORT_BODY, PUSH_BODY, JobId, documented

Format = Annotated[ExportFormat, Path(description="Format of the export.", examples=["gguf"])]


def export_routes(exports: Exports) -> APIRouter:
    """`/jobs/{id}/exports` and `/jobs/{id}/push`."""
    router = APIRouter(prefix="/jobs", tags=["exports"])

    @router.get("/{job}/exports", responses=documented(404, 409))
    def list_exports(job: JobId) -> answers.ExportList:
        """Formats that are there, complete and verified, and what was asked for in the last minutes."""
        return page(answers.ExportList, exports.all(job), has_more=False)

    @router.post(
        "/{job}/exports", status_code=202, responses=documented(404, 408, 409, 413, 422), openapi_extra=EXPORT_BODY
    )
    def make_export(request: Request, job: JobId, body: Annotated[Any, Depends(read_json)]) -> answers.Export:
        """Have the model of a job that has succeeded written in another format, and verified: the program that the
        format is for must give held-out tokens the log-probabilities that the trained model gives them. Follow it with
        `GET`; its folder is then downloaded as any other."""
        return exports.make(job, body, _client(request))

    @router.delete("/{job}/exports/{format}", responses=documented(404, 409, 422))
    def cancel_export(job: JobId, format: Format) -> answers.ExportList:
        """End an export that waits or is being made, which takes seconds. A complete one of that format stays."""
        exports.cancel(job, format)
        return page(answers.ExportList, exports.all(job), has_more=False)

    @router.get("/{job}/push", responses=documented(404, 409))
    def get_push(job: JobId) -> answers.Push:
        """The newest upload to the hub that was asked for in the last minutes."""
        return exports.pushed(job)

    @router.post("/{job}/push", status_code=202, responses=documented(404, 408, 409, 413, 422), openapi_extra=PUSH_BODY)
    def push_model(request: Request, job: JobId, body: Annotated[Any, Depends(read_json)]) -> answers.Push:
        """Have `model/`, or an export, uploaded to the hub, with a model card. The server's own token is used, which of
        what deals with finished models only the worker `push` and its process of the upload have. Repeated after an
        interruption, it uploads what is missing."""
        return exports.push(job, body, _client(request))

    return router


def _client(request: Request) -> str:
    """Whose turn it is."""
    return request.scope["state"].get("key_name") or "anybody"
