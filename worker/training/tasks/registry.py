"""The tasks by name. Nothing else imports the folder of a task."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches

from jobs.errors import Rejected
from jobs.evaluation_metrics import EvaluationMetric
from jobs.plan import DataPlan
from jobs.spec import PAIR, JobSpec, builtin_task
from worker.training.tasks.causal.task import Causal
from worker.training.tasks.classification.regression import Regression
from worker.training.tasks.classification.task import Classification
from worker.training.tasks.seq2seq.task import Seq2Seq
from worker.training.tasks.task import Config, Task

_TASKS: dict[str, Callable[[JobSpec, DataPlan | None], Task]] = {
    "seq2seq": Seq2Seq.of, "causal": Causal.of, "classification": Classification.of,
    "regression": Regression.of,
}  # fmt: skip


def task_of(spec: JobSpec, name: str, data: DataPlan | None = None) -> Task:
    """The task of this name, as the job sets it, with what is known of its rows. `name`: `plan.task`."""
    return _TASKS[name](spec, data)


def assumed_task(spec: JobSpec) -> Task:
    """The task while nothing is known of the model: the job's own, else the one that knows the most kinds of rows; of
    pairs of texts, the one that reads them."""
    likely = "classification" if PAIR in (spec.data.input or "") else "causal"
    return task_of(spec, likely if spec.task.type == "auto" else spec.task.type)


def builtin_of(spec: JobSpec) -> Task | None:
    """The task whose built-in model the job trains; None: it is another model.

    Raises Rejected (`model_not_supported`) where the job says another task.
    """
    if (name := builtin_task(spec.model, spec.task.type)) is None:
        return None
    task = task_of(spec, name)
    if spec.task.type not in ("auto", task.name):
        raise _not_supported(f"{spec.model} is for the task {task.name}, and the job's is {spec.task.type}", task.name)
    return _with_its_options(spec, task)


def task_for(spec: JobSpec, config: Config, source: str) -> Task:
    """The task of a job whose model has this config.json. Raises Rejected (`model_not_supported`)."""
    kind = config.get("model_type")
    if spec.task.type != "auto":
        task = task_of(spec, spec.task.type)
        if not task.takes(config):
            raise _not_supported(f"{source} is of type {kind!r}, which the task {task.name} cannot train", None)
        return _with_its_options(spec, task)
    for make in _TASKS.values():
        if (task := make(spec, None)).takes(config):
            return _with_its_options(spec, task)
    raise _not_supported(f"{source} is of type {kind!r}, which is not supported yet", None)


def _with_its_options(spec: JobSpec, task: Task) -> Task:
    """The task; raises Rejected (`option_of_another_task`, `metric_of_another_task`) for what the job sets in vain."""
    if (option := spec.task.options_of_others(task.name)) is not None:
        raise Rejected(
            f"task.{option}: {spec.task.foreign_option(option, task.name)}",
            code="option_of_another_task",
            param=f"task.{option}",
            hint="or take a model that is made for that task",
        )
    if spec.data.learn != "all" and task.name != "causal":
        raise Rejected(
            f"data.learn: {spec.data.learn} takes parts of the replies of chats, which causal models alone learn",
            code="option_of_another_task",
            param="data.learn",
            hint="leave it out, or take a causal model",
        )
    if spec.data.chat_template is not None and task.name != "causal":
        raise Rejected(
            "data.chat_template: chats are learned by causal models alone",
            code="option_of_another_task",
            param="data.chat_template",
            hint="leave it out, or take a causal model",
        )
    if foreign := [metric for metric in spec.evaluation.named if metric not in task.metrics]:
        known = [str(metric) for metric in task.metrics]
        near = get_close_matches(foreign[0], known, n=1, cutoff=0.4)
        meant = f"did you mean {near[0]}? " if near else ""
        raise Rejected(
            f"evaluation.metrics: {foreign[0]} is not measured of {_answers(task)}",
            code="metric_of_another_task",
            param="evaluation.metrics",
            hint=f"{meant}There are {', '.join(known)}; auto takes all of them",
        )
    return task


def _answers(task: Task) -> str:
    """What its models answer with, for people."""
    if not task.has_labels:
        return f"texts, which the task {task.name} writes"
    if task.squares:
        return "rows with a score each"
    return "rows with several labels" if EvaluationMetric.MICRO_F1 in task.metrics else "rows with one label each"


def _not_supported(what: str, task: str | None) -> Rejected:
    known = "; ".join(f"{each.name}: {each.models}" for each in (Seq2Seq, Causal, Classification, Regression))
    return Rejected(
        f"model: {what}",
        code="model_not_supported",
        param="model" if task is None else "task",
        hint=f"today: {known}" if task is None else f"set task: {task}, or leave it out",
    )
