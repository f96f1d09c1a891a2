"""OpenAI's chat completions, for clients that know no other shape."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from jobs.disk.rundir import RunDir
from jobs.errors import NotFound, UserError
from jobs.frozen import Frozen
from jobs.generation import (
    MOST_TOOLS,
    GenerateBody,
    Generated,
    NewTokens,
    Output,
    Seed,
    StopTexts,
    Temperature,
    ToolCall,
    TopP,
    checkpoint_name,
)
from jobs.redis.queries import Filter
from jobs.redis.requests import Request
from jobs.wrong_spec import explain
from service.errors import longhaul_error_body
from service.generation.asking import Asking, body_of, keys_of
from service.jobs.actions import Actions

PREFIX = "ft:"
MOST_SEARCHED = 1000
"""Newest jobs that a name is looked for in, and that models are listed of."""

UNSUPPORTED = (
    "n", "frequency_penalty", "presence_penalty", "logprobs", "response_format", "tool_choice",
    "logit_bias", "top_logprobs", "modalities",
)  # fmt: skip
"""Keys of OpenAI that would change a reply."""
_OF_CALLS = ("tool_calls", "tool_call_id", "reasoning_content")


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_not_given(cls, given: object) -> object:
        """Clients send what they leave out as null, and replies back with keys such as `tool_calls` that are null."""
        return {key: value for key, value in given.items() if value is not None} if isinstance(given, dict) else given


class TextPart(_Body):
    """A part of a message."""

    type: Literal["text"]
    """Always `text`."""
    text: str
    """What it says."""


class ChatMessageBody(_Body):
    """A turn."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    """Who says it; `developer` is `system`."""
    content: str | list[TextPart] = ""
    """What is said; may be left out of a reply that only calls."""
    name: str | None = None
    """Used of a turn of a tool: its function."""
    tool_calls: Annotated[list[dict[str, Any]], Field(max_length=MOST_TOOLS)] | None = None
    """What a reply called."""
    tool_call_id: Annotated[str, Field(max_length=200)] | None = None
    """Of a turn of a tool: the call whose result it is."""
    reasoning_content: str | None = None
    """What a reply thought."""

    @field_validator("content", mode="wrap")
    @classmethod
    def _text_alone(cls, given: object, check: ValidatorFunctionWrapHandler) -> object:
        """In words, not one error for each form."""
        try:
            return check(given)
        except ValidationError:
            raise ValueError("must be a string, or an array of parts of type text") from None


class StreamOptions(_Body):
    """Of a stream."""

    include_usage: bool = False
    """Whether a last chunk has the tokens."""
    include_obfuscation: bool = False
    """Not used."""


class ChatBody(_Body):
    """What `POST /v1/chat/completions` takes. Keys of OpenAI that would change the reply otherwise are refused."""

    model: str
    """`ft:` and a job: its id or its name; with `/step-00000500`, `/500`, `/best` or `/last` behind it a
    checkpoint of it."""
    messages: Annotated[list[ChatMessageBody], Field(min_length=1)]
    """The chat. A model that is none of chats is given the last message, one of pairs of texts the last two."""
    stream: bool | None = None
    """Send the reply in chunks, as server-sent events."""
    stream_options: StreamOptions | None = None
    """What else comes in a stream."""
    max_tokens: NewTokens | None = None
    """Tokens to write at most."""
    max_completion_tokens: NewTokens | None = None
    """The same; this one counts."""
    temperature: Temperature | None = None
    """0, which is the default here: always the most probable token."""
    top_p: TopP | None = None
    """As in `POST /jobs/{job}/generate`."""
    seed: Seed | None = None
    """As in `POST /jobs/{job}/generate`."""
    n: Literal[1] | None = None
    """One reply."""
    frequency_penalty: Literal[0] | None = None
    """There is none."""
    presence_penalty: Literal[0] | None = None
    """There is none."""
    logprobs: Literal[False] | None = None
    """There are none."""
    response_format: dict[str, Literal["text"]] | None = None
    """`{"type": "text"}` alone."""
    user: str | None = None
    """Not used."""
    store: bool | None = None
    """Not used."""
    metadata: dict[str, str] | None = None
    """Not used."""
    service_tier: str | None = None
    """Not used."""
    safety_identifier: str | None = None
    """Not used."""
    prompt_cache_key: str | None = None
    """Not used."""
    parallel_tool_calls: bool | None = None
    """Not used."""
    tools: Annotated[list[dict[str, Any]], Field(max_length=MOST_TOOLS)] | None = None
    """Functions that the reply may call: the chat template of the model gets them. Calls come back as `tool_calls`, or,
    where the model does not write them as its template does, in the content."""
    tool_choice: Literal["none", "auto"] | None = None
    """`none`: the model is not told of the tools."""
    stop: StopTexts | None = None
    """As in `POST /jobs/{job}/generate`."""
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    """There is none."""
    top_logprobs: Literal[0] | None = None
    """There are none."""
    modalities: list[Literal["text"]] | None = None
    """`["text"]` alone."""

    @field_validator(*UNSUPPORTED, mode="wrap")
    @classmethod
    def _unsupported(cls, given: object, check: ValidatorFunctionWrapHandler) -> object:
        """Taken with the value that changes no reply, which the type says."""
        try:
            return check(given)
        except ValidationError:
            raise ValueError("is not supported: leave it out") from None


def chat_body(given: object) -> ChatBody:
    """Raises UserError."""
    try:
        return ChatBody.model_validate(given)
    except ValidationError as error:
        raise explain(error, ChatBody, keys=keys_of(ChatBody)) from None


def named_job(actions: Actions, model: str) -> tuple[str, str | None]:
    """Job and checkpoint that a model is called by. Raises NotFound, UserError where a name is that of several jobs,
    or there is no such name of a checkpoint."""
    name, _, given = model.removeprefix(PREFIX).partition("/")
    if name.startswith("job-"):
        job = actions.run(name).id
    else:
        found, _ = actions.store.page(Filter(dry_run=False), limit=MOST_SEARCHED)
        ids = [stored.record.id for stored in (each.parsed() for each in found) if stored.record.name == name]
        if not ids:
            raise NotFound(f"there is no model {model[:80]!r}: GET /v1/models lists those that there are")
        if len(ids) > 1:
            hint = f"name one by its id, such as {PREFIX}{ids[0]}"
            raise UserError(f"{len(ids)} jobs are called {name}", param="model", hint=hint)
        job = ids[0]
    try:
        return job, checkpoint_name(given) if given else None
    except ValueError as error:
        raise UserError(str(error), param="model") from None


class ChatMessage(Frozen):
    """A reply."""

    role: Literal["assistant"]
    """Always `assistant`."""
    content: str | None
    """What the model wrote; of a classifier its label. Null: it only calls."""
    refusal: None
    """Always null."""
    tool_calls: list[ToolCall] | None = None
    """Calls of `tools`; null: there are none."""


class ChatChoice(Frozen):
    """The one reply."""

    index: int
    """Always 0."""
    message: ChatMessage
    """The reply."""
    logprobs: None
    """Always null."""
    finish_reason: Literal["stop", "length", "tool_calls"]
    """`length`: it ended at the limit of tokens; `tool_calls`: with calls."""


class ChatUsage(Frozen):
    """Tokens."""

    prompt_tokens: int
    """That the model read."""
    completion_tokens: int
    """That it wrote."""
    total_tokens: int
    """Both."""


class ChatCompletion(Frozen):
    """OpenAI's shape of a reply."""

    id: str
    """Of this answer."""
    object: Literal["chat.completion"]
    """Always `chat.completion`."""
    created: int
    """Unix time, seconds."""
    model: str
    """As it was asked for."""
    choices: list[ChatChoice]
    """One."""
    usage: ChatUsage
    """How many tokens it took."""
    system_fingerprint: str
    """Where the model ran: `cpu` or `cuda`."""


class Model(Frozen):
    """A model that a job delivered."""

    id: str
    """`ft:<job>`: what `model` of a chat completion takes."""
    object: Literal["model"]
    """Always `model`."""
    created: int
    """When the job was submitted, Unix seconds."""
    owned_by: str
    """Always `longhaul`."""


class ModelList(Frozen):
    """Models that can be asked, newest first."""

    object: Literal["list"]
    """Always `list`."""
    data: list[Model]


def models(actions: Actions) -> list[Model]:
    """Those that jobs delivered and that are still there, of the newest jobs."""
    found, _ = actions.store.page(Filter(("succeeded",), dry_run=False), limit=MOST_SEARCHED)
    records = [each.parsed().record for each in found]
    return [model_of(each.id, int(each.submitted_at)) for each in records if RunDir(actions.runs / each.id).has_model()]


def model_of(job: str, created: int) -> Model:
    """One."""
    return Model(id=f"{PREFIX}{job}", object="model", created=created, owned_by="longhaul")


def generate_body(chat: ChatBody, checkpoint: str | None) -> GenerateBody:
    """The same request in our shape. Raises UserError."""
    messages = [
        {
            "role": "system" if each.role == "developer" else each.role,
            "content": each.content if isinstance(each.content, str) else "".join(part.text for part in each.content),
        }
        | {key: value for key in _OF_CALLS if (value := getattr(each, key)) is not None}
        | ({"name": each.name[:200]} if each.role == "tool" and each.name else {})
        for each in chat.messages
    ]
    options = {
        "max_new_tokens": chat.max_tokens if chat.max_completion_tokens is None else chat.max_completion_tokens,
        "temperature": chat.temperature,
        "top_p": chat.top_p,
        "seed": chat.seed,
        "stop": chat.stop,
        "checkpoint": checkpoint,
        "tools": None if chat.tool_choice == "none" else chat.tools or None,
    }
    given: dict[str, Any] = {key: value for key, value in options.items() if value is not None}
    return body_of({"messages": messages, "stream": bool(chat.stream), **given})


def completion(request: Request, chat: ChatBody, output: Output, how: Generated) -> ChatCompletion:
    """The reply."""
    calls = output.tool_calls
    content = output.text if calls is None else output.content or None
    message = ChatMessage(role="assistant", content=content, refusal=None, tool_calls=calls)
    choice = ChatChoice(index=0, message=message, logprobs=None, finish_reason=finish_reason(output))
    return ChatCompletion(
        id=f"chatcmpl-{request.id}",
        object="chat.completion",
        created=int(time.time()),
        model=chat.model,
        choices=[choice],
        usage=usage_of(output),
        system_fingerprint=how.device,
    )


def finish_reason(output: Output) -> Literal["stop", "length", "tool_calls"]:
    """OpenAI's."""
    return "tool_calls" if output.tool_calls is not None and output.finish_reason == "stop" else output.finish_reason


def usage_of(output: Output) -> ChatUsage:
    """Its tokens."""
    return ChatUsage(
        prompt_tokens=output.input_tokens,
        completion_tokens=output.tokens,
        total_tokens=output.input_tokens + output.tokens,
    )


async def chunks(asking: Asking, request: Request, chat: ChatBody) -> AsyncGenerator[bytes]:
    """The reply as OpenAI's stream. Where it may call a tool, it comes as a whole: only then is it known what it is."""
    same = {
        "id": f"chatcmpl-{request.id}", "object": "chat.completion.chunk", "created": int(time.time()),
        "model": chat.model,
    }  # fmt: skip

    def chunk(delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return _data(same | {"choices": [choice]})

    yield chunk({"role": "assistant", "content": ""})
    sent, whole = False, bool(chat.tools) and chat.tool_choice != "none"
    try:
        async for part in asking.parts(request):
            if part.type == "text" and not whole:
                sent = True
                yield chunk({"content": part.data["text"]})
            elif part.type == "output":
                output = Output.model_validate(part.data)
                said = output.text if output.tool_calls is None else output.content
                if not sent and said:  # also of a classifier
                    yield chunk({"content": said})
                for number, call in enumerate(output.tool_calls or ()):
                    yield chunk({"tool_calls": [{"index": number, **call.model_dump()}]})
                yield chunk({}, finish_reason(output))
                if chat.stream_options is not None and chat.stream_options.include_usage:
                    yield _data(same | {"choices": [], "usage": usage_of(output).model_dump()})
    except Exception as error:
        yield _data(longhaul_error_body(error))
        return
    yield b"data: [DONE]\n\n"


def _data(content: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n".encode(errors="replace")
