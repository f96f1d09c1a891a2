"""What finished models answer: in our shape, and in that of OpenAI's chat completions."""

from __future__ import annotations

from typing import Literal

from jobs.generation import Output
from service.answers.parts import Answer


class Generation(Answer):
    """What a model, and where it was asked for the one before training, answered."""

    object: Literal["generation"]
    """Always `generation`."""
    job: str
    """Whose model it is."""
    checkpoint: str | None
    """Whose weights answered; null: those of the delivered model."""
    outputs: list[Output]
    """Of each input, in order; beside the trained model's that of the base model, where it was asked for."""
    device: Literal["cpu", "cuda"]
    """Where the model ran."""
    why: str | None
    """Why it was the CPU; null on a GPU."""
    seconds: float
    """Of generating, without waiting and loading."""
    loading_s: float
    """Of loading the model for this request; 0: it was there."""
    tokens_per_s: float | None
    """Null where none was written."""
    seed: int | None
    """That sampling began with; null: nothing was drawn."""


class ChatMessage(Answer):
    """A reply."""

    role: Literal["assistant"]
    """Always `assistant`."""
    content: str
    """What the model wrote; of a classifier its label."""
    refusal: None
    """Always null."""


class ChatChoice(Answer):
    """The one reply."""

    index: int
    """Always 0."""
    message: ChatMessage
    """The reply."""
    logprobs: None
    """Always null."""
    finish_reason: Literal["stop", "length"]
    """`length`: it ended at the limit of tokens."""


class ChatUsage(Answer):
    """Tokens."""

    prompt_tokens: int
    """That the model read."""
    completion_tokens: int
    """That it wrote."""
    total_tokens: int
    """Both."""


class ChatCompletion(Answer):
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


class Model(Answer):
    """A model that a job delivered."""

    id: str
    """`ft:<job>`: what `model` of a chat completion takes."""
    object: Literal["model"]
    """Always `model`."""
    created: int
    """When the job was submitted, Unix seconds."""
    owned_by: str
    """Always `longhaul`."""


class ModelList(Answer):
    """Models that can be asked, newest first."""

    object: Literal["list"]
    """Always `list`."""
    data: list[Model]
