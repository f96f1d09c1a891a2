"""What happened to a job: as a list, or live."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Query, Response
from starlette.concurrency import run_in_threadpool

from jobs.redis.feed import Feed
from service import answers
from service.answers.conversion import event_answer, page
from service.jobs.actions import Actions
from service.openapi.documented import EVENT_STREAM, JobId, documented
from service.reading.stream import Stream, Streams, event_stream


def routes(actions: Actions, feed: Feed, streams: Streams, *, keep_alive_s: float) -> APIRouter:
    """`/jobs/{id}/events`."""
    router = APIRouter(prefix="/jobs", tags=["events"])

    def past(job: str, after: int, limit: int) -> answers.EventList:
        actions.find(job)
        events = actions.events(job, after=after, limit=limit + 1)
        return page(answers.EventList, [event_answer(event) for event in events[:limit]], has_more=len(events) > limit)

    @router.get("/{job}/events", response_model=answers.EventList, responses=documented(404, 409, 422) | EVENT_STREAM)
    async def list_events(
        job: JobId,
        after: Annotated[int, Query(ge=0, le=2**53, description="Number of the last event that is known.")] = 0,
        limit: Annotated[int, Query(ge=1, le=1000, description="Events at most, of a page.")] = 100,
        accept: Annotated[str, Header(include_in_schema=False)] = "",
        last_event_id: Annotated[
            str, Header(alias="Last-Event-ID", description="Of a stream: as `after`, and it beats that.")
        ] = "",
    ) -> answers.EventList | Response:
        """Events after number `after`, in order. With `Accept: text/event-stream`: from there on, live, to the last."""
        if "text/event-stream" not in accept:
            return await run_in_threadpool(past, job, after, limit)
        # The header is the browser's own bookmark: it beats the address that the page was opened with.
        start = int(last_event_id[:15]) if last_event_id.isascii() and last_event_id.isdecimal() else after
        record = (await run_in_threadpool(actions.find, job)).record
        if record.status.terminal and start >= record.number:
            return Response(status_code=204)  # tells an EventSource not to come back
        content = event_stream(feed, job, after=start, keep_alive_s=keep_alive_s)
        return Stream(streams, content, "text/event-stream")

    return router
