"""A request to a finished model: submitted for whoever asks, followed to its end, given up when they leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator

from fastapi import Request as HttpRequest
from pydantic import BaseModel, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.types import Scope

from jobs import answers
from jobs.disk.rundir import RunDir
from jobs.generation import GenerateBody, Generated, Output
from jobs.redis.requests import AnswerPart, Answers, Request, Requests, role_of
from jobs.wrong_spec import explain
from service.answers import GENERATION
from service.edge.limits import address
from service.errors import AnswerFailed, longhaul_error_body
from service.jobs.actions import Actions
from service.jobs.checkpoints import checkpoints_of, require_model
from service.reading.metric_series import SeriesCache

KIND = "generate"
LEFT_EVERY_S = 1.0
STATUS = {"not_found": 404, "bad_input": 422, "input_too_long": 422, "internal_error": 500} | dict.fromkeys(
    ("gpu_needed", "model_process_ended", "worker_stopped", "request_lost", "device_busy", "out_of_memory"), 503
)
"""By the code of an answer that is an error; else 409: the state of the job does not allow it."""


class Asking:
    """Asks the worker `generate`."""

    def __init__(self, actions: Actions, requests: Requests, followed: Answers, series: SeriesCache) -> None:
        self._actions, self._requests, self._answers, self._series = actions, requests, followed, series

    async def submit(self, job: str, body: GenerateBody, client: str) -> Request:
        """Let it wait.

        Raises NotFound, AnswerFailed (`no_model`, `no_checkpoint`), WorkerMissing, QueueFull, StoreUnavailable.
        """
        return await run_in_threadpool(self._submit, job, body, client)

    def _submit(self, job: str, body: GenerateBody, client: str) -> Request:
        run = self._actions.run(job)
        if body.checkpoint is None:
            require_model(run, or_checkpoint=True)
        self._actions.store.workers.require(role_of(KIND))
        asked = body.model_copy(update={"checkpoint": self._checkpoint(run, body.checkpoint)})
        return self._requests.submit(KIND, job, asked.model_dump(exclude_defaults=True), client=client)

    def _checkpoint(self, run: RunDir, given: str | None) -> str | None:
        """The name of the `best` or the `last`; any other as it is, where it is there. Raises AnswerFailed."""
        hint = f"`longhaul checkpoints {run.id}` lists those that it has"
        if given not in ("best", "last"):
            if given is not None and not (run.checkpoints / given).is_dir():
                raise AnswerFailed(409, "no_checkpoint", f"job {run.id} has no checkpoint {given}", hint=hint)
            return given
        found = checkpoints_of(run, self._series, runs_name=self._actions.runs.name)
        chosen = next((each for each in found if given == "last" or each["best"]), None)
        if chosen is None:
            why = "was evaluated" if found else "is there yet"
            raise AnswerFailed(409, "no_checkpoint", f"no checkpoint of job {run.id} {why}", hint=hint)
        return chosen["id"].partition("/")[2]

    async def parts(self, request: Request) -> AsyncIterator[AnswerPart]:
        """Of the answer, to the last. Raises AnswerFailed, RequestLost, WorkerMissing, StoreUnavailable."""
        async for part in self._answers.follow(request):
            if part.type == "error":
                code = str(part.data["code"])
                raise AnswerFailed(STATUS.get(code, 409), code, str(part.data["message"]), hint=part.data["hint"])
            yield part

    async def whole(self, http: HttpRequest, request: Request) -> tuple[list[Output], Generated]:
        """The whole answer. Raises as `parts`, and ClientDisconnect when whoever asked leaves: it is given up."""
        collecting, watching = asyncio.create_task(self._collect(request)), asyncio.create_task(_left(http))
        try:
            await asyncio.wait((collecting, watching), return_when=asyncio.FIRST_COMPLETED)
        finally:
            collecting.cancel()
            watching.cancel()
            await asyncio.gather(collecting, watching, return_exceptions=True)
        if collecting.cancelled():
            raise ClientDisconnect
        return collecting.result()

    async def _collect(self, request: Request) -> tuple[list[Output], Generated]:
        outputs = []
        async for part in self.parts(request):
            if part.type == "output":
                outputs.append(Output.model_validate(part.data))
            elif part.type == "done":
                return outputs, Generated.model_validate(part.data)
        raise AssertionError("an answer ends with `done` or `error`")


async def _left(http: HttpRequest) -> None:
    """Return when whoever asked has gone."""
    while not await http.is_disconnected():
        await asyncio.sleep(LEFT_EVERY_S)


def client_of(scope: Scope) -> str:
    """Who takes a turn: the key's name, or where no key is needed the address."""
    name = scope.get("state", {}).get("key_name")
    return f"key {name}" if name else address(scope)


def body_of(given: object) -> GenerateBody:
    """Raises UserError."""
    try:
        return GenerateBody.model_validate(given)
    except ValidationError as error:
        raise explain(error, GenerateBody, keys=keys_of(GenerateBody)) from None


def keys_of(body: type[BaseModel]) -> str:
    """Where the keys of a body are."""
    return f"schema {body.__name__} in docs/openapi.json has the keys"


def generation(request: Request, outputs: list[Output], how: Generated) -> answers.Generation:
    """The answer in our shape."""
    checkpoint = request.payload.get("checkpoint")
    return answers.Generation(
        object="generation",
        job=request.job,
        checkpoint=checkpoint,
        outputs=outputs,
        device=how.device,
        why=how.why,
        seconds=how.seconds,
        loading_s=how.loading_s,
        tokens_per_s=how.tokens_per_s,
        seed=how.seed,
    )


async def events(asking: Asking, request: Request) -> AsyncGenerator[bytes]:
    """Server-sent events: the parts of the answer; `done` has the whole, and `error` is the last where it fails."""
    yield b": asked\n\n"  # headers and a first byte at once, so that clients know they are connected
    outputs: list[Output] = []
    try:
        async for part in asking.parts(request):
            if part.type == "output":
                outputs.append(Output.model_validate(part.data))
            if part.type == "done":
                whole = generation(request, outputs, Generated.model_validate(part.data))
                yield _event("done", GENERATION.dump_json(GENERATION.validate_python(whole)).decode())
            else:
                yield _event(part.type, json.dumps(part.data, ensure_ascii=False))
    except Exception as error:
        yield _event("error", json.dumps(longhaul_error_body(error), ensure_ascii=False))


def _event(type: str, data: str) -> bytes:
    return f"event: {type}\ndata: {data}\n\n".encode(errors="replace")
