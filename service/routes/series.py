"""What a run wrote down as it went: rows of metrics, and the trainer's log."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response
from fastapi.responses import JSONResponse

from service.actions import Actions
from service.shapes import list_json

MAX_LOG_BYTES = 1024 * 1024


def routes(actions: Actions) -> APIRouter:
    """`/jobs/{id}/metrics` and `/jobs/{id}/logs`."""
    router = APIRouter(prefix="/jobs", tags=["series"])

    @router.get("/{job}/metrics")
    def metrics(
        job: str,
        after_step: Annotated[int, Query(ge=-1, le=2**53)] = -1,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
    ) -> JSONResponse:
        """Rows with a step above `after_step`, in order of step."""
        rows = [row for row in actions.run(job).metrics() if row.step > after_step]
        shown = [row.model_dump(mode="json") for row in rows[:limit]]
        return JSONResponse(list_json(shown, has_more=len(rows) > limit))

    @router.get("/{job}/logs")
    def logs(
        job: str,
        tail: Annotated[int, Query(ge=0, le=10_000)] = 200,
        offset: Annotated[int | None, Query(ge=0, le=2**53)] = None,
    ) -> Response:
        """The last `tail` lines of the trainer's log, or what follows byte `offset`; X-Next-Offset: where to go on."""
        try:
            with open(actions.run(job).trainer_log, "rb") as file:
                size = file.seek(0, 2)
                start = max(0, size - MAX_LOG_BYTES) if offset is None else min(offset, size)
                file.seek(start)
                content = file.read(MAX_LOG_BYTES)
        except FileNotFoundError:  # no trainer has started yet
            start, content = 0, b""
        end = start + len(content)
        if offset is None:
            content = b"".join(content.splitlines(keepends=True)[-tail:]) if tail else b""
        return Response(content, media_type="text/plain", headers={"X-Next-Offset": str(end)})

    return router
