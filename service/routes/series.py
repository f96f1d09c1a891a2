"""What a run wrote down as it went: rows of metrics, and the trainer's log."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Query, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.concurrency import run_in_threadpool

from jobs import answers
from jobs.disk.rundir import RunDir
from jobs.errors import Damaged
from jobs.redis.feed import Feed
from service.jobs.actions import Actions
from service.openapi.documented import METRIC_FIELDS, NEXT_OFFSET, JobId, documented
from service.reading.metric_series import SeriesCache, chosen
from service.reading.stream import TAIL_BYTES, Stream, Streams, TrainerLog, follow_log


def series_routes(actions: Actions, kept: SeriesCache, feed: Feed, streams: Streams) -> APIRouter:
    """`/jobs/{id}/metrics` and `/jobs/{id}/logs`."""
    router = APIRouter(prefix="/jobs", tags=["series"])

    @router.get(
        "/{job}/metrics",
        response_model=answers.MetricList,
        responses=documented(404, 422),
        openapi_extra={"parameters": [METRIC_FIELDS]},
    )
    def list_metrics(
        job: JobId,
        after_step: Annotated[int, Query(ge=-1, le=2**53, description="Last step that is known.")] = -1,
        limit: Annotated[int, Query(ge=1, le=10_000, description="Rows at most.")] = 1000,
        points: Annotated[
            int | None, Query(ge=1, le=10_000, description="Means of stretches, at most so many, in place of rows.")
        ] = None,
        fields: Annotated[str | None, Query(max_length=2000, include_in_schema=False)] = None,
    ) -> JSONResponse:
        """Rows with a step above `after_step`, in order of step; or, for a chart, `points` that stand for all of them.

        Each point is the mean of a stretch of rows, from `first_step` to `step`; a loss comes with `loss_min` and
        `loss_max`.
        """
        file, names = actions.run(job).metrics_file, chosen(fields)
        if points is not None:
            found = kept.points(file, after_step=after_step, points=points, fields=names)
            return JSONResponse({"object": "list", "data": found, "has_more": False})
        rows, has_more = kept.rows(file, after_step=after_step, limit=limit, fields=names)
        return JSONResponse({"object": "list", "data": rows, "has_more": has_more})

    def page(job: str, tail: int, offset: int | None) -> Response:
        run = actions.run(job)
        log = _begin(run.trainer_log, tail, offset)
        ended = _is_over(run)
        # Twice: from inside a line, the first only goes to its end.
        text = log.read(TAIL_BYTES, ended=ended) or log.read(TAIL_BYTES, ended=ended)
        return PlainTextResponse(text, headers={"X-Next-Offset": str(log.offset)})

    def start(job: str, tail: int, offset: int | None) -> tuple[TrainerLog, int | None]:
        record = actions.find(job).record
        return _begin(actions.run(job).trainer_log, tail, offset), None if record.status.terminal else record.number

    @router.get(
        "/{job}/logs",
        response_class=PlainTextResponse,
        responses=documented(404, 422) | {200: {"headers": NEXT_OFFSET}},
    )
    async def read_log(
        job: JobId,
        tail: Annotated[int, Query(ge=0, le=10_000, description="Last lines, so many.")] = 200,
        offset: Annotated[
            int | None, Query(ge=0, le=2**53, description="Byte to read from, in place of `tail`.")
        ] = None,
        follow: Annotated[bool, Query(description="Go on with what is added, until the job has ended.")] = False,
    ) -> Response:
        """The last `tail` lines of the trainer's log, or what follows byte `offset`; X-Next-Offset: where to continue.

        Whole lines, with `***` in place of what looks like a secret. With `follow` the answer continues until the job
        has ended, and has no X-Next-Offset.
        """
        if not follow:
            return await run_in_threadpool(page, job, tail, offset)
        log, after = await run_in_threadpool(start, job, tail, offset)
        return Stream(streams, follow_log(log, feed, job, after=after), "text/plain")

    return router


def _is_over(run: RunDir) -> bool:
    """By its directory alone: a log can be read without Redis, and when the job's events cannot be read any more."""
    try:
        return run.record().status.terminal
    except Damaged:
        return True


def _begin(file: Path, tail: int, offset: int | None) -> TrainerLog:
    log = TrainerLog(file, offset or 0)
    if offset is None:
        log.begin_at_tail(tail)
    return log
