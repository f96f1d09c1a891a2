"""Requests of the kind `generate`: a process for the model that is asked for, ended when it is idle or in the way.

It runs on a GPU only while nothing trains there and nothing waits to train: it has the GPU's lock, so that a trainer
waits for the moment that it takes to end it. Else it runs on the CPU, at the lowest priority, and the answer says so.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from dataclasses import dataclass
from typing import Any, Literal, cast

from jobs.disk.rundir import RunDir
from jobs.errors import StoreUnavailable
from jobs.frozen import Frozen
from jobs.generation import GenerateBody
from jobs.heartbeat import TOGETHER
from jobs.process.lifeline import PARENT_PID
from jobs.redis.connection import connect
from jobs.redis.requests import Request
from jobs.redis.store import Store
from jobs.state import Stage
from worker.child import ChildGone, JsonChild
from worker.requests import Abandoned, AnswerWriter, RequestFailed, TurnPassed
from worker.settings import WorkerSettings
from worker.training.machine.host import ended_by_limit

log = logging.getLogger("longhaul.worker")
KIND = "generate"
LOOK_S = 1.0
CANCELLED_WITHIN_S = 10.0
TURN_S = 10.0
"""While other clients wait, a request of several rows has a turn of so long, or as long as its model took to load."""
LAST = ("done", "error", "cancelled")
TRAINS, WAITS, UNKNOWN = "no GPU is idle", "a job waits to train", "Redis does not say whether a GPU is free"
NO_GPU = "no train worker has a GPU"


@dataclass(frozen=True)
class Place:
    """Where a model runs."""

    device: Literal["cpu", "cuda"]
    why: str | None = None
    """Why on the CPU."""
    gpu: str | None = None
    """UUID."""
    limit: int | None = None
    """Bytes of the GPU at most."""


@dataclass(frozen=True)
class _Done:
    """How one question was answered: what its process said at the end, and the tokens that it wrote."""

    data: dict[str, Any]
    tokens: int


class AnsweredRows(Frozen):
    """What a request of several rows keeps from turn to turn."""

    answered: int = 0
    tokens: int = 0
    seconds: float = 0.0
    loading_s: float = 0.0
    seed: int | None = None
    """Drawn for the first row: it is that of all."""
    parts: int = 0
    """Of the answer; the AnswerWriter's."""

    def plus(self, how: _Done) -> AnsweredRows:
        """With another row."""
        return AnsweredRows(
            answered=self.answered + 1,
            tokens=self.tokens + how.tokens,
            seconds=self.seconds + how.data["seconds"],
            loading_s=self.loading_s + how.data["loading_s"],
            seed=how.data["seed"],
        )

    def whole(self) -> dict[str, Any]:
        """What `done` says of all rows."""
        tokens_per_s = self.tokens / self.seconds if self.tokens else None
        return self.model_dump(include={"seconds", "loading_s", "seed"}) | {"tokens_per_s": tokens_per_s}


def place_for(settings: WorkerSettings, store: Store) -> Place:
    """A GPU of this box on which nothing trains, in none of its slots, while nothing waits to; else the CPU."""
    if settings.device == "cpu":
        return Place("cpu", "this box uses no GPU")
    try:
        trainers = [
            worker for worker in store.workers.all()
            if worker.stage == Stage.TRAIN and worker.engine is None and worker.gpu is not None
            and worker.box in (settings.box, None)
        ]  # fmt: skip
        waiting = any(needs.engine is None for _, needs in store.waiting_to_train())
    except StoreUnavailable:
        return Place("cpu", UNKNOWN)
    if not trainers:
        return Place("cpu", NO_GPU)
    if waiting:
        return Place("cpu", WAITS)
    held = {worker.gpu.uuid for worker in trainers if worker.gpu and (worker.job is not None or worker.busy)}
    free = [worker.gpu for worker in trainers if worker.gpu and worker.gpu.uuid not in held and worker.healthy]
    if not free:
        return Place("cpu", TRAINS)
    return Place("cuda", gpu=free[0].uuid, limit=free[0].facts.limit_bytes)


class GenerationHandler:
    """The handler (`worker.requests.RequestHandler`). One model at a time."""

    kind = KIND

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings, self._store = settings, Store(connect(settings.redis_url))
        self._child: _Child | None = None

    def answer(self, request: Request, answer: AnswerWriter) -> None:
        """See `RequestHandler`."""
        run, body = RunDir(self._settings.runs / request.job), GenerateBody.model_validate(request.payload)
        if not run.exists():
            raise _deleted(run)
        child = self._ready(run, body.checkpoint, place_for(self._settings, self._store))
        try:
            self._answer_rows(child, request, body, answer)
        except ChildGone as error:
            code = self._end()
            if not run.exists():
                raise _deleted(run) from error
            if (limit := ended_by_limit(code)) is not None:
                raise RequestFailed(str(limit), code=limit.detail_code, hint=limit.hint) from error
            how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with code {code}"
            raise RequestFailed(
                f"the process that had the model {how} ({error})",
                code="model_process_ended",
                hint=f"ask again: it starts anew. If that repeats, the log of the worker `{KIND}` has the details",
            ) from error
        except (Abandoned, TurnPassed):
            if child.asked is not None:
                self._cancel(child)
            raise
        except Exception:  # the GPU is needed, the worker stops, Redis is gone: nobody else may get the rest of it
            self._end()
            raise
        child.used_at = time.monotonic()

    def idle(self) -> None:
        """See `RequestHandler`."""
        child = self._child
        if child is None:
            return
        if time.monotonic() - child.used_at > self._settings.generate_idle_s:
            log.info("the model of job %s is given up: nobody has asked it for a while", child.run.id)
            self._end()
        elif self._in_the_way(child):
            self._end()

    def close(self) -> None:
        """See `RequestHandler`."""
        self._end()

    def _ready(self, run: RunDir, checkpoint: str | None, place: Place) -> _Child:
        child = self._child
        wanted = (run.path, checkpoint, place.device, place.gpu)
        if child is not None and ((child.run.path, child.checkpoint, child.place.device, child.place.gpu) != wanted
                                  or not child.process.running):  # fmt: skip
            self._end()
            child = None
        if child is None:
            child = self._child = _Child(run, checkpoint, place, self._settings)
        return child

    def _answer_rows(self, child: _Child, request: Request, body: GenerateBody, answer: AnswerWriter) -> None:
        """A question for each row. Raises TurnPassed between two of them."""
        if body.rows is None:
            if (how := self._pass_on(child, request.id, body, 0, answer)) is not None:
                answer.add("done", how.data | {"why": child.place.why})
            return
        so_far, began, loading_s = AnsweredRows.model_validate(request.progress), time.monotonic(), 0.0
        for index in range(so_far.answered, len(body.rows)):
            row = {"rows": [body.rows[index]], "seed": body.seed if so_far.seed is None else so_far.seed}
            how = self._pass_on(child, request.id, body.model_copy(update=row), index, answer)
            if how is None:
                return
            so_far = so_far.plus(how)
            loading_s += how.data["loading_s"]
            worked_s = time.monotonic() - began - loading_s
            if so_far.answered == len(body.rows):
                answer.add("done", how.data | so_far.whole() | {"why": child.place.why})
            elif worked_s >= max(TURN_S, loading_s):
                answer.pass_turn(so_far.model_dump())

    def _pass_on(self, child: _Child, id: str, body: GenerateBody, index: int, answer: AnswerWriter) -> _Done | None:
        """Ask, and pass on what is answered, as that of the row `index`, but for `done`. None: it was an error."""
        child.asked, tokens = id, 0
        child.process.ask({"id": id, "body": body.model_dump(exclude_defaults=True)})
        while True:
            part = cast("dict[str, Any] | None", child.process.answer(LOOK_S))
            if time.monotonic() - child.looked_at >= LOOK_S:
                answer.hold()
                child.looked_at = time.monotonic()
                if self._in_the_way(child):
                    raise RequestFailed(
                        "a job needs the GPU, and this was ended for it",
                        code="gpu_needed",
                        hint="ask again: the model then runs on the CPU",
                    )
            if part is None or part["id"] not in (None, id):
                continue
            data: dict[str, Any] = part["data"]
            if part["type"] in LAST:
                child.asked = None
            if part["type"] == "error" and not child.run.exists():
                raise _deleted(child.run)
            if part["type"] == "done":
                return _Done(data, tokens)
            if part["type"] == "output":
                tokens += data["tokens"]
            if body.rows is not None and "index" in data:
                data["index"] = index
            answer.add(part["type"], data)
            if part["type"] in LAST:
                return None

    def _in_the_way(self, child: _Child) -> bool:
        """Whether it has a GPU that somebody else could use."""
        return child.place.device == "cuda" and place_for(self._settings, self._store).gpu != child.place.gpu

    def _cancel(self, child: _Child) -> None:
        """Have it leave the present answer, and keep the model."""
        try:
            child.process.ask({"cancel": True})
            deadline = time.monotonic() + CANCELLED_WITHIN_S
            while (left := deadline - time.monotonic()) > 0:
                part = child.process.answer(left)
                if part is not None and part["id"] == child.asked and part["type"] in LAST:
                    child.used_at, child.asked = time.monotonic(), None
                    return
        except ChildGone as error:
            log.warning("the process of job %s is gone: %s", child.run.id, error)
        self._end()

    def _end(self) -> int | None:
        """End the process; its exit code."""
        child, self._child = self._child, None
        return None if child is None else child.process.kill()


def _deleted(run: RunDir) -> RequestFailed:
    return RequestFailed(f"there is no job {run.id} any more: it was deleted", code="not_found")


class _Child:
    """A running `python -m worker.training generate`."""

    def __init__(self, run: RunDir, checkpoint: str | None, place: Place, settings: WorkerSettings) -> None:
        self.run, self.checkpoint, self.place = run, checkpoint, place
        arguments = ["generate", os.fspath(run.path)]
        if checkpoint is not None:
            arguments += ["--checkpoint", checkpoint]
        if place.limit is not None:
            arguments += ["--gpu-limit", str(place.limit)]
        environment = {
            **settings.trainer_environment,
            "LONGHAUL_DEVICE": place.device,
            "CUDA_VISIBLE_DEVICES": (place.gpu or "").split(TOGETHER)[0],
            "HF_HUB_OFFLINE": "1",
        }
        # What computes on a GPU is not forked.
        forked = JsonChild.forked(settings.warm, arguments, environment) if settings.warm and not place.gpu else None
        self.process = forked or JsonChild(
            [sys.executable, "-m", "worker.training", *arguments], environment | {PARENT_PID: str(os.getpid())}
        )
        self.used_at = self.looked_at = time.monotonic()
        self.asked: str | None = None
        """Id of the request that it answers."""
