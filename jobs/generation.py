"""What is asked of a finished model, and the parts of its answer."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, WithJsonSchema, model_validator

from jobs.frozen import Frozen, Part

MOST_CHARACTERS = 200_000
MOST_ROWS = 64
MOST_MESSAGES = 1_000
MOST_NEW_TOKENS = 4_096
MOST_TOOLS = 128
LEAST_TEMPERATURE = 0.001
CHECKPOINT = "^(best|last|(step-)?[0-9]{1,12})$"
ModelName = Literal["trained", "base"]
Text = Annotated[str, StringConstraints(min_length=1, max_length=MOST_CHARACTERS)]


def checkpoint_name(given: str) -> str:
    """`best`, `last`, or the name of a checkpoint: `500` and `step-500` are `step-00000500`. Raises ValueError."""
    found = re.fullmatch(CHECKPOINT, given)
    if found is None or given.endswith("\n"):
        raise ValueError(
            "a checkpoint is named by its step, such as step-00000500 or 500, or is best or last; "
            "`longhaul checkpoints ID` lists those of a job"
        )
    return given if given in ("best", "last") else f"step-{int(given.removeprefix('step-')):08d}"


CheckpointName = Annotated[
    str, AfterValidator(checkpoint_name), WithJsonSchema({"type": "string", "pattern": CHECKPOINT})
]


def _usable_temperature(given: float) -> float:
    """Divided by less, logits overflow."""
    return 0.0 if given < LEAST_TEMPERATURE else given


NewTokens = Annotated[int, Field(ge=1, le=MOST_NEW_TOKENS)]
Temperature = Annotated[float, Field(ge=0, le=2), AfterValidator(_usable_temperature)]
TopP = Annotated[float, Field(gt=0, le=1)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
StopText = Annotated[str, StringConstraints(min_length=1, max_length=200)]
_SeveralStops = Annotated[list[StopText], Field(max_length=4)]
StopTexts = Annotated[
    _SeveralStops,
    BeforeValidator(
        lambda given: [given] if isinstance(given, str) else given, json_schema_input_type=StopText | _SeveralStops
    ),
]


class ChatTurn(Part):
    """One turn of a chat."""

    role: Annotated[str, StringConstraints(min_length=1, max_length=50)]
    """`system`, `user`, `assistant` or `tool`."""
    content: Annotated[str, StringConstraints(max_length=MOST_CHARACTERS)] = ""
    """What was said; empty of a reply that only calls."""
    reasoning_content: Annotated[str, StringConstraints(max_length=MOST_CHARACTERS)] | None = None
    """What a reply thought."""
    tool_calls: Annotated[list[dict[str, Any]], Field(max_length=MOST_TOOLS)] | None = None
    """What a reply called, as OpenAI writes it."""
    tool_call_id: Annotated[str, StringConstraints(max_length=200)] | None = None
    """Of a turn of a tool: the call whose result it is."""
    name: Annotated[str, StringConstraints(max_length=200)] | None = None
    """Of a turn of a tool: the function."""


class Sampling(Part):
    """How a token is drawn, where the temperature is above 0."""

    temperature: Temperature = 0.0
    """0, as is all below 0.001: always the most probable token."""
    top_p: TopP = 1.0
    """With a temperature: choose among the most probable tokens that have this probability together."""
    top_k: Annotated[int, Field(ge=0, le=1000)] = 0
    """With a temperature: choose among so many of the most probable tokens; 0: among all."""
    seed: Seed | None = None
    """With a temperature: the same seed gives the same text on the same device; null: a random one, which the answer
    names."""

    @property
    def sampling(self) -> dict[str, Any]:
        """Arguments of `generate` in transformers, which has these names, but for the seed: that is set before."""
        if not self.temperature:
            return {"do_sample": False}
        return {"do_sample": True, **self.model_dump(include={*Sampling.model_fields} - {"seed"})}


class GenerateBody(Sampling):
    """What a model is to answer, and how. One of `input`, `row`, `rows` and `messages` is needed."""

    input: Text | None = None
    """A text, as the job's template for inputs would write it; of a causal model a prompt."""
    row: dict[str, Any] | None = None
    """Columns of a row, from which the job's template makes the input."""
    rows: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MOST_ROWS)] | None = None
    """Several of these, answered one after the other, each as if it were alone."""
    messages: Annotated[list[ChatTurn], Field(min_length=1, max_length=MOST_MESSAGES)] | None = None
    """A chat, whose next reply is wanted."""
    tools: Annotated[list[dict[str, Any]], Field(max_length=MOST_TOOLS)] | None = None
    """Functions that the reply to `messages` may call, as OpenAI describes them: the chat template gets them. Calls
    are in the text, as the template writes them, and in `tool_calls`."""
    checkpoint: CheckpointName | None = None
    """Use the weights of this checkpoint, such as `step-00000500` or `500`, or of the `best` or the `last`; null: the
    model that the job delivered."""
    base: bool = False
    """Let the model before training answer, too."""
    stream: bool = False
    """Answer with server-sent events: text as it is written."""
    max_new_tokens: NewTokens | None = None
    """Tokens to write at most; null: as many as 99 % of the targets that the model learned do not exceed."""
    stop: StopTexts = Field([])
    """A text, or up to 4, before the first of which the answer ends; a classifier does not look at them."""
    num_beams: Annotated[int, Field(ge=1, le=8)] = 1
    """Beams of a beam search; it cannot be streamed."""

    @model_validator(mode="after")
    def _one_input(self) -> Self:
        given = [name for name in ("input", "row", "rows", "messages") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give one of input, row, rows and messages (got {' and '.join(given) or 'none'})")
        if self.tools and self.messages is None:
            raise ValueError("tools go with messages; of a row they are its column tools")
        if self.num_beams > 1 and (self.stream or self.temperature):
            raise ValueError("num_beams above 1 goes with neither stream nor temperature")
        return self

    @property
    def models(self) -> tuple[ModelName, ...]:
        """Who answers."""
        return ("trained", "base") if self.base else ("trained",)


class LabelProbability(Frozen):
    """A class, and how probable the model finds it."""

    label: str
    """Its name."""
    probability: float
    """0 to 1."""


class CalledFunction(Frozen):
    """A function, and what it is called with."""

    name: str
    """One of `tools`."""
    arguments: str
    """A JSON object."""


class ToolCall(Frozen):
    """A call in a reply, in OpenAI's form."""

    id: str
    """Of this call: `tool_call_id` of the turn that brings its result."""
    type: Literal["function"]
    """Always `function`."""
    function: CalledFunction
    """What is called."""


class Output(Frozen):
    """What one model answered to one input."""

    model: ModelName
    """`trained`, or `base`: the model before training."""
    index: int
    """Of the input, from 0 on."""
    input: str
    """What the model read, as text."""
    input_tokens: int
    """Of that."""
    input_cut: bool
    """Whether the end of the input was cut off at the job's limit, as in training."""
    text: str
    """What the model wrote; of a classifier its label, or its labels with `; ` between; of a regression its score."""
    tokens: int
    """That were written; of a classifier or a regression 0."""
    finish_reason: Literal["stop", "length"]
    """`length`: it ended at `max_new_tokens`; else `stop`: where the model ended it, or before a text of `stop`."""
    content: str | None = None
    """Of a reply with `tool_calls`: what it says besides; else null."""
    tool_calls: list[ToolCall] | None = None
    """Calls of `tools`, where the chat template writes exactly this text for them; else null."""
    labels: list[LabelProbability] | None = None
    """Of a classifier: every label, the most probable first; else null."""
    score: float | None = None
    """Of a regression: the number, of which `text` has six digits; else null."""
    error: str | None = None
    """Why there is no answer to this row, as in the report on rejected rows; null: there is one."""


class Generated(Frozen):
    """How the outputs of a request came about."""

    device: Literal["cpu", "cuda"]
    """Where the model ran."""
    why: str | None = None
    """Why it was the CPU; null on a GPU."""
    seconds: float
    """Of generating, without waiting and loading."""
    loading_s: float
    """Of loading the model for this request; 0: it was there."""
    tokens_per_s: float | None
    """Null where none was written."""
    seed: int | None
    """That sampling began with; null: nothing was drawn."""
