"""Answers about what a run leaves behind (checkpoints, files, exports, texts), and about data sets."""

from __future__ import annotations

from typing import Literal

from pydantic.json_schema import SkipJsonSchema

from jobs.attempt import Phase
from jobs.data_names import FileFormat
from jobs.dataset_report import DatasetReport
from jobs.events import Fault
from jobs.export import ExportFormat, ExportReport
from jobs.frozen import left_out
from jobs.generation import Output
from service.answers.parts import Answer, Page


class CheckpointMetrics(Answer):
    """What is known of exactly these weights."""

    step: int
    """Optimizer steps done."""
    train_loss: float | SkipJsonSchema[None] = left_out()
    """Training loss of the newest row of metrics up to here; left out where there is none."""
    valid_loss: float | SkipJsonSchema[None] = left_out()
    """Validation loss, nats per target token (of a classifier: per row); left out where they were not evaluated."""
    others: dict[str, float] | SkipJsonSchema[None] = left_out()
    """Other metrics of the evaluation by name, such as `accuracy`; left out where there are none."""


class Checkpoint(Answer):
    """A complete checkpoint on disk."""

    object: Literal["fine_tuning.job.checkpoint"]
    """Always `fine_tuning.job.checkpoint`."""
    id: str
    """`<job>/step-00000500`: what `resume_from` of another job takes."""
    created_at: int
    """Unix time, seconds."""
    fine_tuning_job_id: str
    """Whose it is."""
    fine_tuned_model_checkpoint: str
    """Its folder, which begins with the name of the runs folder."""
    step_number: int
    """Optimizer steps done."""
    metrics: CheckpointMetrics
    bytes: int
    """Size of all its files."""
    best: bool
    """Whether it has the lowest validation loss of those on disk: it is kept, however old it gets."""
    path: str
    """Relative to the run directory: download it from `/jobs/{job}/files/{path}`."""


class CheckpointList(Page):
    """Checkpoints, newest first."""

    cursor = "id"
    data: list[Checkpoint]
    first_id: str | None
    """Id of the first one; null for an empty list."""
    last_id: str | None
    """Id of the last one."""


class RunFile(Answer):
    """A file of a run directory."""

    object: Literal["file"]
    """Always `file`."""
    path: str
    """Relative to the run directory: download it from `/jobs/{job}/files/{path}`."""
    bytes: int
    """Its size."""
    modified_at: float
    """Unix time, seconds."""


class RunFileList(Page):
    """Files in order of path."""

    cursor = "path"
    data: list[RunFile]
    first_id: str | None
    """Path of the first one; null for an empty list."""
    last_id: str | None
    """Path of the last one."""


# -- exports -----------------------------------------------------------------------------------------------------------
# Exports of a model, and its upload to the hub.

WorkStatus = Literal["queued", "running", "done", "failed"]


class Export(Answer):
    """One format of a model: there, being made, or refused."""

    object: Literal["export"]
    """Always `export`."""
    format: ExportFormat
    """`merged`, `adapter`, `ctranslate2` or `gguf`."""
    status: WorkStatus
    """Of what was asked for last; `done` for what is there."""
    phase: Phase | None
    """While it runs: `load`, `save` (it is converted) or `evaluate` (it is compared with the model)."""
    ahead: int | None
    """While it is queued: requests that have their turn before it, at most."""
    error: Fault | None
    """Why it failed, and what was there before is kept; while it is queued, why no worker takes it."""
    path: str | None
    """Folder to download from `/jobs/{job}/files/{path}`; null: none is there."""
    report: ExportReport | None
    """export.json of what is there: types, versions, figures of the verification, files with sha256."""


class ExportList(Page):
    """Exports in order of format."""

    data: list[Export]


class Push(Answer):
    """The newest upload of a job to the hub that was asked for."""

    object: Literal["push"]
    """Always `push`."""
    repository: str
    """`org/name`."""
    status: WorkStatus
    """Of the upload."""
    ahead: int | None
    """While it is queued: requests that have their turn before it, at most."""
    error: Fault | None
    """Why it failed: repeating it uploads only what is missing; while it is queued, why no worker takes it."""


# -- datasets ----------------------------------------------------------------------------------------------------------
# Uploaded data sets.


class Dataset(Answer):
    """An uploaded file of rows. A job names it `dataset:<name>`."""

    object: Literal["dataset"]
    """Always `dataset`."""
    name: str
    """As it was uploaded; other content needs another name."""
    uri: str
    """How a job names it in `data.train` or `data.validation`: `dataset:<name>`."""
    format: FileFormat
    """What its ending says."""
    bytes: int
    """Its size."""
    sha256: str
    """Of its content, in hexadecimal."""
    created_at: int
    """When it was uploaded, Unix seconds."""


class DatasetDetail(Dataset):
    """A data set, and what became of it."""

    jobs: list[str]
    """Ids of jobs that name it, newest first, at most ten."""
    in_use: bool
    """Whether an open job needs it: it cannot be deleted while there is one."""
    report: DatasetReport | None
    """What the newest job that read it found in its rows (`dataset.json`); null before the first."""
    report_job: str | None
    """That job."""


class DatasetList(Page):
    """Data sets in order of name."""

    cursor = "name"
    data: list[Dataset]
    first_id: str | None
    """Name of the first one; null for an empty list."""
    last_id: str | None
    """Name of the last one."""


class DeletedDataset(Answer):
    """It is gone."""

    name: str
    """Which one it was."""
    object: Literal["dataset"]
    """Always `dataset`."""
    deleted: Literal[True]
    """Always true."""


# -- generation --------------------------------------------------------------------------------------------------------
# What finished models answer: in our shape, and in that of OpenAI's chat completions.


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
