"""The client's types name what the service answers: no field more, none less."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

from jobs.events import Fault
from jobs.generation import LabelProbability, Output
from jobs.heartbeat import Gpu, Worker
from jobs.plan import CheckSummary
from longhaul import answers as client
from service import answers as service

PAIRS: list[tuple[Any, type[BaseModel]]] = [
    (client.JobDict, service.Job),
    (client.ProgressDict, service.Progress),
    (client.FaultDict, Fault),
    (client.PlanSummaryDict, CheckSummary),
    (client.RepairedDict, service.Repaired),
    (client.DeletedJobDict, service.DeletedJob),
    (client.PageDict, service.JobList),
    (client.CheckpointDict, service.Checkpoint),
    (client.CheckpointMetricsDict, service.CheckpointMetrics),
    (client.RunFileDict, service.RunFile),
    (client.ExportDict, service.Export),
    (client.PushDict, service.Push),
    (client.SweepDict, service.Sweep),
    (client.TrialDict, service.Trial),
    (client.DeletedSweepDict, service.DeletedSweep),
    (client.DatasetDict, service.Dataset),
    (client.DatasetDetailDict, service.DatasetDetail),
    (client.DeletedDatasetDict, service.DeletedDataset),
    (client.WorkerDict, Worker),
    (client.GpuDict, Gpu),
    (client.GenerationDict, service.Generation),
    (client.OutputDict, Output),
    (client.LabelProbabilityDict, LabelProbability),
]


@pytest.mark.parametrize(("kind", "model"), PAIRS, ids=lambda each: each.__name__)
def test_the_client_names_each_field_of_an_answer(kind: Any, model: type[BaseModel]) -> None:
    assert kind.__required_keys__ | kind.__optional_keys__ == model.model_fields.keys()


def test_events_and_workers() -> None:
    (of_event,) = {frozenset(model.model_fields) for model in service.events._MODELS.values()}
    assert client.EventDict.__required_keys__ == of_event
    assert client.WorkersDict.__required_keys__ == service.WorkerList.model_fields.keys()
