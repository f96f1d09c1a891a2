"""What a run leaves behind: its files, and the checkpoints among them."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Path, Query, Request, Response

from jobs import answers
from service.answers.conversion import page
from service.files.confined import answer, files_of, find
from service.jobs.actions import Actions
from service.jobs.checkpoints import checkpoints_of
from service.openapi.documented import JobId, documented, file_answer
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
