"""What happened to a job: as a list, or live."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Query, Response
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool

from jobs.feed import Feed
from service import answers
from service.actions import Actions
from service.documented import EVENT_STREAM, JobId, documented
from service.shapes import event_json, list_json
from service.stream import Stream, Streams, event_stream


def routes(actions: Actions, feed: Feed, streams: Streams, *, keep_alive_s: float) -> APIRouter:
    """`/jobs/{id}/events`."""
    router = APIRouter(prefix="/jobs", tags=["events"])

    def page(job: str, after: int, limit: int) -> JSONResponse:
        actions.find(job)
        events = actions.store.events(job, after=after, limit=limit + 1)
        shown = [event_json(event) for event in events[:limit]]
        return JSONResponse(list_json(shown, has_more=len(events) > limit, cursor="number"))

    @router.get("/{job}/events", response_model=answers.EventList, responses=documented(404, 422) | EVENT_STREAM)
    async def list_events(
        job: JobId,
        after: Annotated[int, Query(ge=0, le=2**53, description="Number of the last event that is known.")] = 0,
        limit: Annotated[int, Query(ge=1, le=1000, description="Events at most, of a page.")] = 100,
        accept: Annotated[str, Header(include_in_schema=False)] = "",
        last_event_id: Annotated[
            str, Header(alias="Last-Event-ID", description="Of a stream: as `after`, and it beats that.")
        ] = "",
    ) -> Response:
        """Events after number `after`, in order. With `Accept: text/event-stream`: from there on, live, to the last."""
        if "text/event-stream" not in accept:
            return await run_in_threadpool(page, job, after, limit)
        # The header is the browser's own bookmark: it beats the address that the page was opened with.
        start = int(last_event_id[:15]) if last_event_id.isascii() and last_event_id.isdecimal() else after
        record = (await run_in_threadpool(actions.find, job)).record
        if record.status.terminal and start >= record.number:
            return Response(status_code=204)  # tells an EventSource not to come back
        content = event_stream(feed, job, after=start, keep_alive_s=keep_alive_s)
        return Stream(streams, content, "text/event-stream")

    return router
