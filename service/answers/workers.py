"""Who works here, by what each reported of itself."""

from __future__ import annotations

from jobs.heartbeat import Worker
from service.answers.parts import Page


class WorkerList(Page):
    """Workers by name."""

    data: list[Worker]
    damaged: list[str]
    """Ids of jobs whose run directory cannot be read, oldest first: no worker takes them."""
