"""Exports and uploads of finished models: asked for over HTTP, done by workers, looked up in Redis and on disk."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError

from jobs.answers import Export, Push, WorkStatus
from jobs.disk.rundir import RunDir
from jobs.errors import Conflict, Damaged, NotFound, WorkerMissing
from jobs.export import (
    EXPORTS,
    REPORT,
    ExportFormat,
    ExportReport,
    ExportRequest,
    FinishedModel,
    PushRequest,
    wrong_dtype,
)
from jobs.redis.requests import Requests, Standing, role_of
from jobs.state import Status
from jobs.trainer_facts import Fault
from jobs.wrong_spec import explain
from service.errors import AnswerFailed
from service.files.confined import NoFile, content
from service.jobs.actions import Actions
from service.jobs.checkpoints import require_model

PATIENCE_S = 86_400.0
"""A request waits for a worker for so long; nobody has to stay to hear of it."""


@dataclass(frozen=True)
class Work:
    """Where something stands that was asked for."""

    status: WorkStatus
    phase: Any = None
    ahead: int | None = None
    error: Fault | None = None


class NoPush(NotFound):
    """Nobody has asked for an upload of this job of late."""

    code = "no_push"


class Exports:
    """Raises the errors of `jobs.errors`."""

    def __init__(self, actions: Actions, requests: Requests) -> None:
        self._actions, self._requests = actions, requests

    def make(self, job: str, body: object, client: str) -> Export:
        """An ExportRequest: have it made, unless it is being made. What is there is replaced by what is verified."""
        asked = _parsed(body, ExportRequest, "the keys are `format` and `dtype`")
        run = self._finished(job)
        model = self._model(run)
        if (refusal := model.refusal(asked.format)) is not None:
            raise AnswerFailed(409, *refusal, hint=model.instead_of(asked.format))
        if (why := wrong_dtype(asked.format, run.plan().resolved.dtype, asked.dtype)) is not None:
            raise Conflict(why)
        self._ask("export", _id(job, asked.format), run, asked.model_dump(mode="json"), client)
        return self._export(run, asked.format) or _shown(asked.format, Work("queued"), None)

    def all(self, job: str) -> list[Export]:
        """What is there, and what was asked for."""
        run = self._actions.run(job)
        return [found for each in sorted(ExportFormat) if (found := self._export(run, each)) is not None]

    def cancel(self, job: str, format: ExportFormat) -> None:
        """End one that waits or is being made; what is there stays. Raises Conflict."""
        run = self._actions.run(job)
        if not self._requests.cancel(_id(run.id, format)):
            raise Conflict(f"no export of job {run.id} to {format} waits or is being made")

    def table(self, job: str) -> list[tuple[ExportFormat, Export | None]]:
        """Every format that the model of this job may have, with what there is of it; none without a model."""
        run, found = self._actions.run(job), {each["format"]: each for each in self.all(job)}
        return [(each, found.get(each)) for each in self._model(run).formats] if run.has_model() else []

    def push(self, job: str, body: object, client: str) -> Push:
        """A PushRequest: have it uploaded, unless an upload of it is on its way."""
        asked = _parsed(body, PushRequest, "the keys are `repository`, `license`, `public` and `export`")
        run = self._finished(job)
        if asked.export is not None and _report(run, asked.export) is None:
            raise Conflict(
                f"job {job} has no export {asked.export}: make it with `longhaul export {job} --to {asked.export}`"
            )
        self._ask("push", _id(job, "push"), run, asked.model_dump(mode="json"), client)
        return self.pushed(job)

    def pushed(self, job: str) -> Push:
        """The newest upload. Raises NoPush."""
        run = self._actions.run(job)
        work, payload = self._work("push", _id(job, "push")), self._requests.payload(_id(job, "push"))
        if work is None or payload is None:
            raise NoPush(f"nobody has asked for an upload of job {run.id} in the last minutes")
        return Push(
            object="push",
            repository=PushRequest.model_validate(payload).repository,
            status=work.status,
            ahead=work.ahead,
            error=work.error,
        )

    def _finished(self, job: str) -> RunDir:
        run = self._actions.run(job)
        require_model(run)
        if (status := run.record().status) is not Status.SUCCEEDED:
            raise Conflict(f"job {job} is {status}: it has a model once it has succeeded")
        return run

    def _model(self, run: RunDir) -> FinishedModel:
        try:
            family = json.loads(content(run.path, f"{run.model.name}/config.json")).get("model_type")
        except (NoFile, ValueError):  # adapters alone, or damaged: then the worker says so
            family = None
        return FinishedModel.of(run.id, run.spec(), run.plan().task, family)

    def _ask(self, kind: str, id: str, run: RunDir, payload: Mapping[str, object], client: str) -> None:
        self._actions.store.workers.require(role_of(kind))
        standing, _ = self._requests.standing(id)
        if standing in (Standing.WAITING, Standing.TAKEN):
            if (other := self._requests.payload(id)) is not None and other != payload:
                raise Conflict(f"job {run.id} is at {_words(kind, other)}: ask again when that is over")
            if self._requests.cancelled(id):
                raise Conflict(f"{_words(kind, payload)} is being cancelled: ask again in a few seconds")
            return
        self._requests.give_up(id)
        self._requests.submit(kind, run.id, payload, client=client, patience_s=PATIENCE_S, id=id)

    def _export(self, run: RunDir, format: ExportFormat) -> Export | None:
        work, report = self._work("export", _id(run.id, format)), _report(run, format)
        if work is None and report is None:
            return None
        return _shown(format, work or Work("done"), report)

    def _why_nobody(self, kind: str) -> Fault | None:
        """Why nobody does what waits; None: somebody will."""
        try:
            self._actions.store.workers.require(role_of(kind))
        except WorkerMissing as error:
            return Fault(code=error.code, message=str(error), hint=error.hint)
        return None

    def _work(self, kind: str, id: str) -> Work | None:
        """None: nobody has asked for it of late."""
        standing, ahead = self._requests.standing(id)
        newest = self._requests.newest_part(id)
        match standing:
            case Standing.GONE:
                return None
            case Standing.WAITING:
                return Work("queued", ahead=ahead, error=self._why_nobody(kind))
            case Standing.TAKEN:
                return Work("running", phase=newest[1].get("phase") if newest else None)
            case Standing.LOST:
                lost = Fault(code="worker_lost", message="the worker ended while it was at work", hint="ask again")
                return Work("failed", error=lost)
            case Standing.ENDED:
                if newest is None or newest[0] == "done":
                    return Work("done")
                return Work("failed", error=Fault.model_validate({"param": None, **newest[1]}))


Asked = TypeVar("Asked", ExportRequest, PushRequest)


def _parsed(body: object, kind: type[Asked], keys: str) -> Asked:
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise explain(error, kind, keys=keys) from None


def _id(job: str, what: str) -> str:
    """Of the one request there can be."""
    return f"{job}.{what}"


def _words(kind: str, payload: Mapping[str, object]) -> str:
    """What is under way."""
    if kind == "push":
        return f"an upload to {payload['repository']}"
    return f"an export to {payload['format']} in {payload['dtype'] or 'its default type'}"


def _report(run: RunDir, format: ExportFormat) -> ExportReport | None:
    try:
        return ExportReport.model_validate_json(content(run.path, f"{EXPORTS}/{format}/{REPORT}"))
    except NoFile:
        return None
    except ValidationError as error:
        raise Damaged(
            f"{EXPORTS}/{format}/{REPORT} cannot be read: {error.errors()[0]['msg']}", hint="export it again"
        ) from error


def _shown(format: ExportFormat, work: Work, report: ExportReport | None) -> Export:
    return Export(
        object="export",
        format=format,
        status=work.status,
        phase=work.phase,
        ahead=work.ahead,
        error=work.error,
        path=None if report is None else f"{EXPORTS}/{format}",
        report=report,
    )
