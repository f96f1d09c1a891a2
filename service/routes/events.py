"""What happened to a job: as a list, or live."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Query, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.concurrency import run_in_threadpool

from jobs.feed import Feed
from service.actions import Actions
from service.shapes import event_json, list_json
from service.stream import event_stream


def routes(actions: Actions, feed: Feed, *, keep_alive_s: float) -> APIRouter:
    """`/jobs/{id}/events`."""
    router = APIRouter(prefix="/jobs", tags=["events"])

    def page(job: str, after: int, limit: int) -> JSONResponse:
        actions.find(job)
        events = actions.store.events(job, after=after, limit=limit + 1)
        shown = [event_json(event) for event in events[:limit]]
        return JSONResponse(list_json(shown, has_more=len(events) > limit, cursor="number"))

    @router.get("/{job}/events")
    async def events(
        job: str,
        after: Annotated[int, Query(ge=0, le=2**53)] = 0,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        accept: Annotated[str, Header()] = "",
        last_event_id: Annotated[str, Header()] = "",
    ) -> Response:
        """Events after number `after`, in order. With `Accept: text/event-stream`: from there on, live, to the last."""
        if "text/event-stream" not in accept:
            return await run_in_threadpool(page, job, after, limit)
        # The header is the browser's own bookmark: it beats the address that the page was opened with.
        start = int(last_event_id[:15]) if last_event_id.isascii() and last_event_id.isdecimal() else after
        record = (await run_in_threadpool(actions.find, job)).record
        if record.status.terminal and start >= record.number:
            return Response(status_code=204)  # tells an EventSource not to come back
        return StreamingResponse(
            event_stream(feed, job, after=start, keep_alive_s=keep_alive_s),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )

    return router
