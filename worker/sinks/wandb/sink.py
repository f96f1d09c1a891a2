"""Weights & Biases: one child process per open run (`child_process`), rows keyed by our own step.

The cursor moves when the child has answered, and the child answers when the rows are in the run's file. Nothing here
waits longer than a moment: an answer that is not there yet is `Later`, so one job's slow run delays no other job's.

A row is never lost, wherever W&B goes away. Before the run is opened: the child opens an offline one. While it is open:
rows gather in its file and the library keeps trying. At its end: the wait is bounded, and what is left stays in the
file. Such a file is sent before the run is opened again, and otherwise waits for `wandb sync` (the log says which).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jobs.events import (
    AttemptStarted,
    EvaluationFinished,
    Event,
    JobCancelled,
    JobFailed,
    JobPaused,
    JobQueued,
    JobRepaired,
    JobSubmitted,
    JobSucceeded,
    OomRecovered,
)
from jobs.metrics import MetricRow
from jobs.text.printable import printable_document
from jobs.text.units import format_duration
from worker.sinks.base import DONE, Later, Outcome, SinkJob
from worker.sinks.child import ChildGone, SinkChild
from worker.sinks.wandb.access import child_environment, why_offline
from worker.sinks.wandb.rows import alert, evaluation, farewell, fresh_rows, metric_row

ROWS_AT_ONCE = 60
"""Of about 1,000 bytes as JSON: a question fits into the pipe."""
LISTEN_S = 0.05
ASK_AGAIN_S = 0.2
LIMIT_S = {"init": 75.0, "log": 30.0, "alert": 30.0, "finish": 45.0}
"""After so long without an answer a child is given up. The child's own bounds come first."""
FINISH_S = 20.0
"""How long the end of a run waits for the server."""
CLOSE_S = 12.0
LONGEST_BACKOFF_S = 300.0

log = logging.getLogger("longhaul.wandb")


@dataclass
class Talk:
    """A conversation with the child of one job."""

    child: SinkChild
    asked: str | None = None
    """What is being waited for."""
    since: float = 0.0
    step: int = -1
    """Highest step of the rows being waited for."""
    number: int = 0
    """Number of the event being waited for; 0: rows, or none."""
    finished: bool = False


class WandbSink:
    """Accepts the jobs that want W&B. Offline without a key, or as `mode` says."""

    name = "wandb"
    follows_metrics = True

    def __init__(
        self,
        command: Callable[[], Sequence[str]],
        api_key: str | None = None,
        base_url: str | None = None,
        mode: str | None = None,
        environ: Mapping[str, str] | None = None,
        flush_s: float = 1.0,
        finish_s: float = FINISH_S,
    ) -> None:
        """`command` makes a child's command line, tied to this process; a run's file is written every `flush_s`."""
        self._bounds = {"flush_s": flush_s, "finish_s": finish_s}
        self._command = command
        self._wanted = mode != "disabled"
        self._why_offline = why_offline(api_key, mode)
        inherited = os.environ if environ is None else environ
        self._environment = child_environment(inherited, api_key, base_url, online=self._why_offline is None)
        self._talks: dict[str, Talk] = {}
        self._failures: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"WandbSink({'online' if self._why_offline is None else 'offline'})"

    def accepts(self, submitted: JobSubmitted) -> bool:
        """As the job says."""
        return self._wanted and submitted.wandb

    def event(self, event: Event, job: SinkJob) -> Outcome:
        """The run is opened when training starts; a job refused before has none."""
        match event.fact:
            case AttemptStarted():
                late = self._ready(job)
                return late if isinstance(late, Later) else DONE
            case JobRepaired():  # the numbers from here on may have been sent events of others
                job.state["reported"] = min(job.state.get("reported", 0), event.number)
                if job.id in self._talks:
                    self._talks[job.id].number = 0
                return DONE
            case EvaluationFinished() as fact:
                return self._tell(job, event, evaluation(event, fact))
            case OomRecovered() | JobQueued():
                question = alert(event, job)
                return self._tell(job, event, question) if question and job.state.get("opened") else DONE
            case JobSucceeded() | JobFailed() | JobCancelled() | JobPaused():
                rests = event.fact == JobPaused() and job.id not in self._talks
                if rests or not job.state.get("opened"):
                    return DONE
                outcome = self._tell(job, event, farewell(event, job))
                if outcome == DONE:
                    self._end(job, CLOSE_S)
                return outcome
            case _:
                return DONE

    def metrics(self, rows: Sequence[MetricRow], job: SinkJob) -> Outcome:
        """Rows above the highest step sent. An attempt that repeats steps after a crash does not repeat them here."""
        if not fresh_rows(rows, job.highest_step):
            return DONE
        talk = self._ready(job)
        if isinstance(talk, Later):
            return talk
        fresh = fresh_rows(rows, job.highest_step)[:ROWS_AT_ONCE]
        if fresh:
            talk.step = fresh[-1].step
            late = self._ask(job, talk, {"do": "log", "rows": [metric_row(row) for row in fresh]})
            if late is not None:
                return late
        return Later(0.0, "more rows") if fresh_rows(rows, job.highest_step) else DONE

    def close(self, job: SinkJob) -> None:
        """Publish stops, or the job has ended: the run is finished in good order, within bounds."""
        talk = self._talks.get(job.id)
        if talk is None:
            return
        deadline = time.monotonic() + CLOSE_S
        goodbye = {"do": "finish", "exit_code": 0, "summary": {}}
        while job.id in self._talks and not talk.finished and time.monotonic() < deadline:
            if self._settle(job, talk, listen_s=0.2) is None and not talk.finished:
                self._ask(job, talk, goodbye)
        self._end(job, max(0.5, deadline - time.monotonic()))

    # -- conversation --------------------------------------------------------------------------------------------------

    def _ready(self, job: SinkJob) -> Talk | Later:
        """The conversation, with nothing open in it and the run begun."""
        talk = self._talks.get(job.id)
        if talk is not None:
            return self._settle(job, talk) or talk
        talk = self._talks[job.id] = Talk(SinkChild(self._command(), self._environment))
        job.state["opened"] = True
        wandb = job.config.get("integrations", {}).get("wandb") or {}
        question = {
            "do": "init",
            "online": self._why_offline is None,
            "why_offline": self._why_offline,
            "project": wandb.get("project", "longhaul"),
            "entity": wandb.get("entity"),
            "id": job.id,
            "name": job.submitted.name,
            "folder": os.fspath(job.folder),
            "config": job.config,
            **self._bounds,
        }
        return self._ask(job, talk, question) or talk

    def _tell(self, job: SinkJob, event: Event, question: dict[str, Any]) -> Outcome:
        """Ask once, however often the event comes again meanwhile."""
        if job.state.get("reported", 0) >= event.number:
            return DONE
        talk = self._ready(job)
        if isinstance(talk, Later):
            return talk
        if job.state.get("reported", 0) < event.number:  # what was being waited for was not this event
            late = self._ask(job, talk, question, event.number)
            if late is not None:
                return late
        return DONE

    def _ask(self, job: SinkJob, talk: Talk, question: dict[str, Any], number: int = 0) -> Later | None:
        assert talk.asked is None, f"{job.id}: asked {question['do']} while waiting for {talk.asked}"
        try:
            talk.child.ask(printable_document(question))
        except ChildGone as error:
            return self._lost(job, str(error))
        talk.asked, talk.since, talk.number = question["do"], time.monotonic(), number
        return self._settle(job, talk)

    def _settle(self, job: SinkJob, talk: Talk, listen_s: float = LISTEN_S) -> Later | None:
        """None once nothing is open any more."""
        if talk.asked is None:
            return None
        try:
            answer = talk.child.answer(listen_s)
        except ChildGone as error:
            return self._lost(job, str(error))
        if answer is None:
            if time.monotonic() - talk.since > LIMIT_S[talk.asked]:
                return self._lost(job, f"no answer to {talk.asked} within {format_duration(LIMIT_S[talk.asked])}")
            return Later(ASK_AGAIN_S, f"waiting for {talk.asked}")
        if talk.asked == "init" and answer.get("mode") == "offline":
            log.warning(
                "job %s: W&B run is offline: %s; later: wandb sync %s",
                job.id,
                answer.get("why"),
                job.folder / "wandb" / "offline-run-*",
            )
        if answer.get("unsent"):
            log.warning("job %s: W&B has not taken everything; later: wandb sync --include-online %s",
                        job.id, answer["unsent"])  # fmt: skip
        if talk.number:
            # Kept with the cursor: an answer that comes while publish stops counts after the restart.
            job.state["reported"], talk.number = talk.number, 0
        elif talk.asked == "log":
            job.highest_step = max(job.highest_step, talk.step)
        talk.finished = talk.asked == "finish"
        if talk.asked != "init":
            self._failures.pop(job.id, None)
        talk.asked = None
        return None

    def _lost(self, job: SinkJob, why: str) -> Later:
        failures = self._failures[job.id] = self._failures.get(job.id, 0) + 1
        wait = min(LONGEST_BACKOFF_S, 2.0**failures)
        log.error("job %s: the W&B process %s; a new one in %.0f s", job.id, why, wait)
        self._end(job, 0.5)
        return Later(wait, why)

    def _end(self, job: SinkJob, timeout_s: float) -> None:
        talk = self._talks.pop(job.id, None)
        if talk is not None:
            talk.child.end(timeout_s)
