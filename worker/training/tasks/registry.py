"""The tasks by name. Nothing else imports the folder of a task."""

from __future__ import annotations

from jobs.spec import JobSpec
from worker.training.tasks.seq2seq.task import Seq2Seq
from worker.training.tasks.task import Task

TASKS: dict[str, Task] = {task.name: task for task in (Seq2Seq(),)}


def task_of(spec: JobSpec) -> Task:
    """The task of a job: `task.type`."""
    return TASKS[spec.task.type]
