"""The tasks by name. Nothing else imports the folder of a task."""

from __future__ import annotations

from collections.abc import Callable

from jobs.errors import Rejected
from jobs.spec import BUILTIN_MODELS, JobSpec
from worker.training.tasks.causal.task import Causal
from worker.training.tasks.seq2seq.task import Seq2Seq
from worker.training.tasks.task import Config, Task

_TASKS: dict[str, Callable[[JobSpec], Task]] = {"seq2seq": Seq2Seq.of, "causal": Causal.of}


def task_of(spec: JobSpec, name: str) -> Task:
    """The task of this name, as the job sets it. `name`: `plan.task`."""
    return _TASKS[name](spec)


def assumed_task(spec: JobSpec) -> Task:
    """The task while nothing is known of the model: the job's own, else the one that knows the most kinds of rows."""
    return task_of(spec, "causal" if spec.task.type == "auto" else spec.task.type)


def builtin_of(spec: JobSpec) -> Task | None:
    """The task whose built-in model the job trains; None: it is another model.

    Raises Rejected (`model_not_supported`) where the job says another task.
    """
    if spec.model not in BUILTIN_MODELS:
        return None
    task = task_of(spec, BUILTIN_MODELS[spec.model])
    if spec.task.type not in ("auto", task.name):
        raise _not_supported(f"{spec.model} is for the task {task.name}, and the job's is {spec.task.type}", task.name)
    return task


def task_for(spec: JobSpec, config: Config, source: str) -> Task:
    """The task of a job whose model has this config.json. Raises Rejected (`model_not_supported`)."""
    kind = config.get("model_type")
    if spec.task.type != "auto":
        task = task_of(spec, spec.task.type)
        if not task.takes(config):
            raise _not_supported(f"{source} is of type {kind!r}, which the task {task.name} cannot train", None)
        return task
    for make in _TASKS.values():
        if (task := make(spec)).takes(config):
            return task
    raise _not_supported(f"{source} is of type {kind!r}, which is not supported yet", None)


def _not_supported(what: str, task: str | None) -> Rejected:
    known = "; ".join(f"{name}: {Task_.models}" for name, Task_ in (("seq2seq", Seq2Seq), ("causal", Causal)))
    return Rejected(
        f"model: {what}",
        code="model_not_supported",
        param="model" if task is None else "task",
        hint=f"today: {known}" if task is None else f"set task: {task}, or leave it out",
    )
