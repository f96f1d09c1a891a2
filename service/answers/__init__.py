"""What every route answers, field by field. Routes return these models: they validate what is answered, and the OpenAPI
document is made of them. The model of a job is made, and turned to JSON, once for each state of that job
(`conversion.job_json`). Rows of metrics, thousands in one answer, are only described here; the tests validate those.

Closed models: an answer with a field that is not described here is a fault. OpenAI's names keep their meaning.
"""

from jobs.heartbeat import Gpu, Worker
from service.answers.events import Event, EventList
from service.answers.jobs import DeletedJob, Hyperparameters, Job, JobActivity, JobList, Progress, Repaired, ShownStatus
from service.answers.parts import Error, ErrorResponse, Health, WorkerList
from service.answers.results import (
    ChatChoice,
    ChatCompletion,
    ChatMessage,
    ChatUsage,
    Checkpoint,
    CheckpointList,
    CheckpointMetrics,
    Dataset,
    DatasetDetail,
    DatasetList,
    DeletedDataset,
    Export,
    ExportList,
    Generation,
    Model,
    ModelList,
    Push,
    RunFile,
    RunFileList,
)
from service.answers.series import MetricList, MetricPoint
from service.answers.sweeps import DeletedSweep, Sweep, SweepList, Trial, TrialList

__all__ = [
    "ChatChoice",
    "ChatCompletion",
    "ChatMessage",
    "ChatUsage",
    "Checkpoint",
    "CheckpointList",
    "CheckpointMetrics",
    "Dataset",
    "DatasetDetail",
    "DatasetList",
    "DeletedDataset",
    "DeletedJob",
    "DeletedSweep",
    "Error",
    "ErrorResponse",
    "Event",
    "EventList",
    "Export",
    "ExportList",
    "Generation",
    "Gpu",
    "Health",
    "Hyperparameters",
    "Job",
    "JobActivity",
    "JobList",
    "MetricList",
    "MetricPoint",
    "Model",
    "ModelList",
    "Progress",
    "Push",
    "Repaired",
    "RunFile",
    "RunFileList",
    "ShownStatus",
    "Sweep",
    "SweepList",
    "Trial",
    "TrialList",
    "Worker",
    "WorkerList",
]  # fmt: skip
