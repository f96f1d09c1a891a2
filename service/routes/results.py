"""What a run leaves behind: its files with the checkpoints, exports of its model, and the report."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from fastapi.responses import HTMLResponse

from jobs import answers
from jobs.export import ExportFormat
from service.answers.conversion import page
from service.edge.body import read_json
from service.files.confined import answer, files_of, find
from service.jobs.actions import Actions
from service.jobs.checkpoints import checkpoints_of
from service.jobs.exports import Exports
from service.openapi.documented import EXPORT_BODY, PUSH_BODY, JobId, documented, file_answer
from service.pages.render import Renderer
from service.pages.report import report_of
from service.reading.metric_series import SeriesCache

FilePath = Annotated[
    str,
    Path(description="A file or folder, relative to the run directory.", examples=["model", "metrics.jsonl"]),
]


def routes(actions: Actions, kept: SeriesCache) -> APIRouter:
    """`/jobs/{id}/files` and `/jobs/{id}/checkpoints`."""
    router = APIRouter(prefix="/jobs", tags=["results"])

    @router.get("/{job}/checkpoints", responses=documented(404, 422))
    def list_checkpoints(
        job: JobId,
        after: Annotated[str | None, Query(description="Id of the last checkpoint of the page before.")] = None,
        limit: Annotated[int, Query(ge=1, le=1000, description="Checkpoints at most.")] = 100,
    ) -> answers.CheckpointList:
        """Checkpoints, newest first: download one from `/jobs/{job}/files/{path}`, or start another job with its `id`
        as `resume_from`. The newest few are kept (`checkpoint.keep`), and the best one."""
        found = checkpoints_of(actions.run(job), kept, runs_name=actions.runs.name)
        later = [each for each in found if after is None or each["id"] < after]
        return page(answers.CheckpointList, later[:limit], has_more=len(later) > limit, by="id")

    @router.get("/{job}/files", responses=documented(404, 422))
    def list_files(
        job: JobId,
        after: Annotated[str, Query(description="Path of the last file of the page before.")] = "",
        limit: Annotated[int, Query(ge=1, le=10_000, description="Files at most.")] = 1000,
    ) -> answers.RunFileList:
        """Files of the run directory, in order of path: the model, checkpoints, metrics, log, reports."""
        found = [file for file in files_of(actions.run(job).path) if file.path > after]
        shown = [
            answers.RunFile(object="file", path=file.path, bytes=file.status.st_size, modified_at=file.status.st_mtime)
            for file in found[:limit]
        ]
        return page(answers.RunFileList, shown, has_more=len(found) > limit, by="path")

    @router.head("/{job}/files/{path:path}", include_in_schema=False)
    @router.get(
        "/{job}/files/{path:path}",
        response_class=Response,
        responses=documented(404, 416) | file_answer(),
    )
    def download_file(
        request: Request,
        job: JobId,
        path: FilePath,
        range: Annotated[str | None, Header(description="One range: `bytes=<first>-<last>`.")] = None,
        if_range: Annotated[str | None, Header(description="`Range` counts only if this is still the ETag.")] = None,
    ) -> Response:
        """A file as it is. A folder (`model`, `checkpoints/step-00000500`, `oom_reports`) comes as an uncompressed tar.

        Both with ranges, so that `curl -C - -O` resumes where a download broke off. A file that still grows is sent as
        long as it was when it was asked for. If something goes away while it is sent, the connection ends early."""
        return answer(request, find(actions.run(job).path, path))

    return router


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
