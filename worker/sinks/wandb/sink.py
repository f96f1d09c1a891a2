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
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict, cast

from jobs.events import (
    AttemptStarted,
    Event,
    JobCancelled,
    JobFailed,
    JobPaused,
    JobQueued,
    JobRepaired,
    JobSubmitted,
    JobSucceeded,
)
from jobs.integrations import WandbSpec
from jobs.metrics import MetricRow
from jobs.process.lifeline import tied_to_parent
from jobs.text.units import format_duration, printable_document
from jobs.trainer_facts import EvaluationFinished, Fault, OomRecovered
from worker.child import ChildGone, JsonChild
from worker.sinks.base import DONE, WANDB_URL, Later, Outcome, SinkJob, SinkSettings
from worker.sinks.wandb.config import (
    child_environment,
    model_artifact,
    notes,
    rows_artifact,
    run_config,
    tags,
    why_offline,
)
from worker.sinks.wandb.protocol import (
    AlertRequest,
    ArtifactRequest,
    FinishRequest,
    InitRequest,
    LogRequest,
    Request,
    WandbRow,
)
from worker.sinks.wording import shortage

# -- rows --------------------------------------------------------------------------------------------------------------
# What W&B receives: rows of history, keyed by our own step, tables of samples, alerts, the end of a run.

EXIT_CODES = {"job.succeeded": 0, "job.paused": 0, "job.failed": 1, "job.cancelled": 255}
SAMPLES = "eval/samples"
SAMPLE_COLUMNS: list[str | int] = ["step", "input", "target", "generated"]
ALERT_TITLE = 63
ALERT_TEXT = 2000

_GROUPS = {"gpu_": "gpu/", "host_": "host/", "trainer_": "host/trainer_"}
"""How the names of our metrics begin, and where they go; all others are `train/`."""


def metric_row(row: MetricRow) -> WandbRow:
    """One row of metrics, without what this machine does not have. W&B has its own clock."""
    return {_key(name): value for name, value in row.model_dump(exclude={"at"}, exclude_none=True).items()}


def _key(name: str) -> str:
    for begin, group in _GROUPS.items():
        if name.startswith(begin):
            return group + name.removeprefix(begin)
    return f"train/{name}"


def evaluation(event: Event, fact: EvaluationFinished) -> LogRequest:
    """One evaluation with its table of samples; the event's number makes a repeat recognizable."""
    row: WandbRow = {
        "train/step": fact.step,
        "eval/loss": fact.loss,
        "eval/rows": fact.rows,
        "eval/seconds": fact.seconds,
        "eval/event": event.number,
        **{f"eval/{name}": value for name, value in fact.metrics.items()},
    }
    samples: list[list[int | str]] = [[fact.step, each.input, each.target, each.generated] for each in fact.samples]
    return {"do": "log", "rows": [row], "table": {"key": SAMPLES, "columns": SAMPLE_COLUMNS, "data": samples}}


def fresh_rows(rows: Sequence[MetricRow], highest: int) -> list[MetricRow]:
    """Rows above the highest step so far; an attempt that repeats steps does not repeat them here."""
    fresh = []
    for row in rows:
        if row.step > highest:
            fresh.append(row)
            highest = row.step
    return fresh


def alert(event: Event, job: SinkJob) -> AlertRequest | None:
    """What W&B should call a person for: a job that cannot continue, an attempt that failed, memory that ran out."""
    match event.fact:
        case JobFailed(error=error) | JobPaused(error=Fault() as error):
            hint = f"\n{error.hint}" if error.hint else ""
            return _alert(job, event.fact.title, f"{error.code}: {error.message}{hint}", "ERROR")
        case JobQueued() if job.failed_attempt is not None:
            ended = job.failed_attempt
            why = f": {ended.error.message}" if ended.error else ""
            text = f"{ended.reason.headline}{f' {ended.where}' if ended.step else ''}{why}"
            return _alert(job, f"attempt {event.attempt} failed, trying again", text, "WARN")
        case OomRecovered() as fact:
            text = f"Nothing was lost at step {fact.step:,}. {shortage(fact)}. {fact.message}"
            return _alert(job, fact.title, text, "WARN")
        case _:
            return None


def _alert(job: SinkJob, what: str, text: str, level: str) -> AlertRequest:
    title = f"{job.submitted.name}: {what}"
    return {"do": "alert", "title": title[:ALERT_TITLE], "text": text[:ALERT_TEXT], "level": level}


def finish_request(event: Event, job: SinkJob) -> FinishRequest:
    """Exit state and summary."""
    summary: dict[str, str | float | None] = {"status": event.type.removeprefix("job."), "attempts": job.attempt}
    artifacts: list[ArtifactRequest] = []
    match event.fact:
        case JobSucceeded() as fact:
            artifacts = model_artifact(job, fact)
            summary |= {"model": fact.model, "model_step": fact.step, "model_loss": fact.loss}
            summary |= {
                "chosen_by": fact.chosen_by,
                "better_step": fact.better_step,
                "kept_from": fact.kept_from,
                "reason": fact.reason.value,
            }
            summary |= {f"model_{name}": figure for name, figure in fact.metrics.items()}
            for name, between in fact.intervals.items():
                summary |= {f"model_{name}_low": between.low, f"model_{name}_high": between.high}
            if fact.verdict is not None:
                summary |= {"verdict": fact.verdict.outcome, "verdict_text": fact.verdict.text}
        case JobFailed(error=error) | JobPaused(error=Fault() as error):
            summary |= {"error_code": error.code, "error": error.message[:2000]}
    return {
        "do": "finish", "exit_code": EXIT_CODES[event.type], "summary": summary, "alert": alert(event, job),
        "artifacts": artifacts,
    }  # fmt: skip


# -- sink --------------------------------------------------------------------------------------------------------------

ROWS_AT_ONCE = 60
"""Of about 1,000 bytes as JSON: a request fits into the pipe."""
LISTEN_S = 0.05
ASK_AGAIN_S = 0.2
LIMIT_S = {"init": 75.0, "log": 30.0, "alert": 30.0, "finish": 45.0}
"""After so long without an answer a child is given up. The child's own bounds come first."""
FINISH_S = 20.0
"""How long the end of a run waits for the server."""
UNKNOWN_ROWS = 1000
"""So many rows an earlier child may have written at most, of which the cursor does not know (one request)."""
CLOSE_S = 12.0
LONGEST_BACKOFF_S = 300.0

log = logging.getLogger("longhaul.wandb")


class WandbNotes(TypedDict, total=False):
    """What is kept with the cursor."""

    opened: bool
    """The run was begun."""
    reported: int
    """Number of the last event that the child has taken."""
    rows: int
    """W&B's own step of the next row. It never goes back, whether the run is online or offline."""


@dataclass
class Session:
    """The requests to the child of one job."""

    child: JsonChild
    pending: str | None = None
    """What is being waited for."""
    since: float = 0.0
    step: int = -1
    """Highest step of the rows being waited for."""
    number: int = 0
    """Number of the event being waited for; 0: rows, or none."""
    finished: bool = False


def make(settings: SinkSettings) -> WandbSink:
    """From the environment."""
    variables = settings.variables
    return WandbSink(
        command=lambda: tied_to_parent(sys.executable, "-m", "worker.sinks.wandb.child_process"),
        api_key=variables.get("WANDB_API_KEY"),
        base_url=variables.get("WANDB_BASE_URL"),
        mode=variables.get("WANDB_MODE"),
    )


class WandbSink:
    """Offline without a key, or as `mode` says."""

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
        self._flush_s, self._finish_s = flush_s, finish_s
        self._command = command
        self._wanted = mode != "disabled"
        self._why_offline = why_offline(api_key, mode)
        inherited = os.environ if environ is None else environ
        self._environment = child_environment(inherited, api_key, base_url, online=self._why_offline is None)
        self._sessions: dict[str, Session] = {}
        self._failures: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"WandbSink({'online' if self._why_offline is None else 'offline'})"

    def accepts(self, submitted: JobSubmitted) -> bool:
        """All, unless W&B is disabled."""
        return self._wanted

    def event(self, event: Event, job: SinkJob) -> Outcome:
        """The run is opened when training starts; a job refused before has none."""
        match event.fact:
            case AttemptStarted():
                late = self._ready(job)
                return late if isinstance(late, Later) else DONE
            case JobRepaired():  # the numbers from here on may have been sent events of others
                _notes(job)["reported"] = min(_notes(job).get("reported", 0), event.number)
                if job.id in self._sessions:
                    self._sessions[job.id].number = 0
                return DONE
            case EvaluationFinished() as fact:
                return self._send_once(job, event, evaluation(event, fact))
            case OomRecovered() | JobQueued():
                request = alert(event, job)
                return self._send_once(job, event, request) if request and _notes(job).get("opened") else DONE
            case JobSucceeded() | JobFailed() | JobCancelled() | JobPaused():
                rests = event.fact == JobPaused() and job.id not in self._sessions
                if rests or not _notes(job).get("opened"):
                    return DONE
                outcome = self._send_once(job, event, finish_request(event, job))
                if outcome == DONE:
                    self._end(job, CLOSE_S)
                return outcome
            case _:
                return DONE

    def metrics(self, rows: Sequence[MetricRow], job: SinkJob) -> Outcome:
        """Rows above the highest step sent. An attempt that repeats steps after a crash does not repeat them here."""
        if not fresh_rows(rows, job.highest_step):
            return DONE
        session = self._ready(job)
        if isinstance(session, Later):
            return session
        fresh = fresh_rows(rows, job.highest_step)[:ROWS_AT_ONCE]
        if fresh:
            session.step = fresh[-1].step
            late = self._send(job, session, {"do": "log", "rows": [metric_row(row) for row in fresh]})
            if late is not None:
                return late
        return Later(0.0, "more rows") if fresh_rows(rows, job.highest_step) else DONE

    def close(self, job: SinkJob) -> None:
        """Publish stops, or the job has ended: finish the run cleanly, within bounds."""
        session = self._sessions.get(job.id)
        if session is None:
            return
        deadline = time.monotonic() + CLOSE_S
        finish: FinishRequest = {"do": "finish", "exit_code": 0, "summary": {}, "alert": None, "artifacts": []}
        while job.id in self._sessions and not session.finished and time.monotonic() < deadline:
            if self._receive(job, session, listen_s=0.2) is None and not session.finished:
                self._send(job, session, finish)
        self._end(job, max(0.5, deadline - time.monotonic()))

    # -- requests ------------------------------------------------------------------------------------------------------

    def _ready(self, job: SinkJob) -> Session | Later:
        """The session, with no request pending and the run opened."""
        session = self._sessions.get(job.id)
        if session is not None:
            return self._receive(job, session) or session
        session = self._sessions[job.id] = Session(JsonChild(self._command(), self._environment))
        _notes(job)["opened"] = True
        _notes(job)["rows"] = _notes(job).get("rows", -UNKNOWN_ROWS) + UNKNOWN_ROWS
        wandb = job.spec.integrations.wandb or WandbSpec()
        request: InitRequest = {
            "do": "init",
            "online": self._why_offline is None,
            "why_offline": self._why_offline,
            "project": wandb.project,
            "entity": wandb.entity,
            "id": job.id,
            "group": job.submitted.sweep or job.id,
            "job_type": job.spec.kind,
            "name": job.submitted.name,
            "folder": os.fspath(job.folder),
            "config": run_config(job),
            "tags": tags(job),
            "notes": notes(job),
            "artifacts": rows_artifact(job),
            "flush_s": self._flush_s,
            "finish_s": self._finish_s,
        }
        return self._send(job, session, request) or session

    def _send_once(self, job: SinkJob, event: Event, request: Request) -> Outcome:
        """Send once, however often the event is delivered meanwhile."""
        if _notes(job).get("reported", 0) >= event.number:
            return DONE
        session = self._ready(job)
        if isinstance(session, Later):
            return session
        if _notes(job).get("reported", 0) < event.number:  # what was being waited for was not this event
            late = self._send(job, session, request, event.number)
            if late is not None:
                return late
        return DONE

    def _send(self, job: SinkJob, session: Session, request: Request, number: int = 0) -> Later | None:
        assert session.pending is None, f"{job.id}: asked {request['do']} while waiting for {session.pending}"
        if request["do"] == "log":
            request["first"] = _notes(job).get("rows", 0)
            _notes(job)["rows"] = request["first"] + len(request["rows"])
        try:
            session.child.ask(printable_document(request))
        except ChildGone as error:
            return self._lost(job, str(error))
        session.pending, session.since, session.number = request["do"], time.monotonic(), number
        return self._receive(job, session)

    def _receive(self, job: SinkJob, session: Session, listen_s: float = LISTEN_S) -> Later | None:
        """None once nothing is pending."""
        if session.pending is None:
            return None
        try:
            answer = session.child.answer(listen_s)
        except ChildGone as error:
            return self._lost(job, str(error))
        if answer is None:
            if time.monotonic() - session.since > LIMIT_S[session.pending]:
                return self._lost(
                    job, f"no answer to {session.pending} within {format_duration(LIMIT_S[session.pending])}"
                )
            return Later(ASK_AGAIN_S, f"waiting for {session.pending}")
        if session.pending == "init" and answer.get("mode") == "offline":
            log.warning(
                "job %s: W&B run is offline: %s; later: wandb sync %s",
                job.id,
                answer.get("why"),
                job.folder / "wandb" / "offline-run-*",
            )
        if url := answer.get("url"):
            job.write(WANDB_URL, f"{url}\n".encode())
        if answer.get("artifacts"):
            log.warning("job %s: not all artifacts are in its W&B run: %s", job.id, answer["artifacts"])
        if answer.get("unsent"):
            log.warning("job %s: W&B has not taken everything; later: wandb sync --include-online %s",
                        job.id, answer["unsent"])  # fmt: skip
        if session.number:
            # Kept with the cursor: an answer that comes while publish stops counts after the restart.
            _notes(job)["reported"], session.number = session.number, 0
        elif session.pending == "log":
            job.highest_step = max(job.highest_step, session.step)
        session.finished = session.pending == "finish"
        if session.pending != "init":
            self._failures.pop(job.id, None)
        session.pending = None
        return None

    def _lost(self, job: SinkJob, why: str) -> Later:
        failures = self._failures[job.id] = self._failures.get(job.id, 0) + 1
        wait = min(LONGEST_BACKOFF_S, 2.0**failures)
        log.error("job %s: the W&B process %s; a new one in %.0f s", job.id, why, wait)
        self._end(job, 0.5)
        return Later(wait, why)

    def _end(self, job: SinkJob, timeout_s: float) -> None:
        session = self._sessions.pop(job.id, None)
        if session is not None:
            session.child.end(timeout_s)


def _notes(job: SinkJob) -> WandbNotes:
    return cast("WandbNotes", job.state)
