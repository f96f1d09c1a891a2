"""Trying finished models: our own route, and those of OpenAI."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Request, Response
from starlette.concurrency import run_in_threadpool

from jobs import answers
from jobs.errors import NotFound
from service.edge.body import read_json
from service.edge.redaction import as_written
from service.generation import openai
from service.generation.asking import Asking, body_of, client_of, events, generation
from service.jobs.actions import Actions
from service.jobs.checkpoints import why_no_model
from service.openapi.documented import CHAT_BODY, CHAT_STREAM, GENERATE_BODY, GENERATE_STREAM, JobId, documented
from service.reading.stream import Stream, Streams, kept_alive

EVENTS = "text/event-stream"


def routes(actions: Actions, asking: Asking, streams: Streams, *, keep_alive_s: float) -> APIRouter:
    """`/jobs/{id}/generate`, `/v1/chat/completions` and `/v1/models`."""
    router = APIRouter(tags=["models"])

    @router.post(
        "/jobs/{job}/generate",
        response_model=answers.Generation,
        responses=documented(404, 408, 409, 413, 422) | GENERATE_STREAM,
        openapi_extra=GENERATE_BODY,
    )
    async def generate(
        request: Request, job: JobId, given: Annotated[Any, Depends(read_json)]
    ) -> answers.Generation | Response:
        """Let the model of a job answer: the one that it delivered, or a checkpoint of it.

        The input goes through the template and the chat format of the job. Without a temperature each token is the most
        probable one. Requests wait for their turn. The model runs on a GPU while nothing trains there and nothing waits
        to, and else on the CPU at the lowest priority: the answer says where, and how fast."""
        body = body_of(given)
        if body.stream:
            streams.require()  # before anything waits
        asked = await asking.submit(job, body, client_of(request.scope))
        if body.stream:
            as_written(request)
            return Stream(streams, kept_alive(events(asking, asked), keep_alive_s), EVENTS)
        outputs, how = await asking.whole(request, asked)
        as_written(request)
        return generation(asked, outputs, how)

    @router.post(
        "/v1/chat/completions",
        response_model=openai.ChatCompletion,
        responses=documented(404, 408, 409, 413, 422) | CHAT_STREAM,
        openapi_extra=CHAT_BODY,
    )
    async def create_chat_completion(
        request: Request, given: Annotated[Any, Depends(read_json)]
    ) -> openai.ChatCompletion | Response:
        """The same in the shape of OpenAI's chat completions, for clients that know it: `model` is `ft:` and a job."""
        chat = openai.chat_body(given)
        job, checkpoint = await run_in_threadpool(openai.named_job, actions, chat.model)
        body = openai.generate_body(chat, checkpoint)
        if body.stream:
            streams.require()
        asked = await asking.submit(job, body, client_of(request.scope))
        if body.stream:
            as_written(request)
            return Stream(streams, kept_alive(openai.chunks(asking, asked, chat), keep_alive_s), EVENTS)
        [output], how = await asking.whole(request, asked)
        as_written(request)
        return openai.completion(asked, chat, output, how)

    @router.get("/v1/models", responses=documented())
    def list_models() -> openai.ModelList:
        """Models that jobs delivered, newest first, as OpenAI lists them."""
        return openai.ModelList(object="list", data=openai.models(actions))

    @router.get("/v1/models/{model:path}", responses=documented(404, 422))
    def get_model(
        model: Annotated[str, Path(description="`ft:` and the id or the name of a job.", examples=["ft:chef"])],
    ) -> openai.Model:
        """One of them, by `ft:` and the id or the name of a job."""
        job, _ = openai.named_job(actions, model)
        run = actions.run(job)
        if not run.has_model():
            raise NotFound(why_no_model(run.record())[0])
        return openai.model_of(job, int(actions.find(job).record.submitted_at))

    return router
