"""Where a finished model runs: on a GPU that nobody trains on or waits for, else on the CPU, with the reason."""

from __future__ import annotations

import json
import shutil
import signal
import threading
from pathlib import Path
from typing import Any, cast

import pytest
import redis
from pydantic import ValidationError

from jobs.errors import StoreUnavailable
from jobs.heartbeat import Gpu, TrainWorker
from jobs.redis.connection import connect
from jobs.redis.requests import Request, Requests, answer_key
from jobs.redis.store import Store
from jobs.redis.workers import lease_token
from jobs.state import Stage
from tests.support.samples import H200, heartbeat
from worker import generation
from worker.child import ChildGone
from worker.generation import NO_GPU, TRAINS, UNKNOWN, WAITS, GenerationHandler, Place, place_for
from worker.requests import Abandoned, AnswerWriter, RequestFailed, serve_one
from worker.settings import WorkerSettings, from_environment

OTHER = Gpu(uuid="GPU-2", name="NVIDIA H200", memory_bytes=2**37, driver="580")


@pytest.fixture
def client(redis_url: str) -> redis.Redis:
    return connect(redis_url)


def settings(redis_url: str, tmp_path: Path, device: str = "cuda") -> WorkerSettings:
    return from_environment(
        {"LONGHAUL_REDIS_URL": redis_url, "LONGHAUL_RUNS": str(tmp_path), "LONGHAUL_DEVICE": device}
    )


def on_gpu(gpu: Gpu) -> Place:
    return Place("cuda", gpu=gpu.uuid, limit=gpu.facts.limit_bytes)


def wait_to_train(client: redis.Redis) -> None:
    client.hset("longhaul:job:job-1", mapping={"number": 1, "status": "queued", "stage": "train", "score": 1})
    client.zadd("longhaul:order:train", {"job-1": 1})


def test_an_idle_gpu_is_taken_until_a_job_waits_or_trains(client: redis.Redis, redis_url: str, tmp_path: Path) -> None:
    store, ours = Store(client), settings(redis_url, tmp_path)
    assert place_for(ours, store) == Place("cpu", NO_GPU)
    store.workers.report(heartbeat("train-a", gpu=H200))
    assert place_for(ours, store) == on_gpu(H200)
    assert on_gpu(H200).limit == H200.facts.limit_bytes < H200.memory_bytes
    wait_to_train(client)
    assert place_for(ours, store) == Place("cpu", WAITS)
    assert store.claim(Stage.TRAIN, lease_token("train-a")) == "job-1"
    assert place_for(ours, store) == Place("cpu", TRAINS)
    store.workers.report(heartbeat("train-b", gpu=OTHER))
    assert place_for(ours, store) == on_gpu(OTHER), "a job trains on one of two"


def test_a_gpu_of_another_box_is_not_taken(client: redis.Redis, redis_url: str, tmp_path: Path) -> None:
    store, ours = Store(client), settings(redis_url, tmp_path)
    store.workers.report(heartbeat("train-a", gpu=H200, box="gpu2"))
    assert place_for(ours, store) == Place("cpu", NO_GPU)
    store.workers.report(heartbeat("train-b", gpu=OTHER, box=ours.box))
    assert place_for(ours, store) == on_gpu(OTHER)


def test_the_place_of_an_engine_is_no_gpu_of_this_machine(client: redis.Redis, redis_url: str, tmp_path: Path) -> None:
    store, ours = Store(client), settings(redis_url, tmp_path)
    store.workers.report(heartbeat("train-a", gpu=H200, engine="cluster"))
    assert place_for(ours, store) == Place("cpu", NO_GPU)
    store.workers.report(heartbeat("train-b", gpu=OTHER))
    wait_to_train(client)
    client.hset("longhaul:job:job-1", "engine", "cluster")
    assert place_for(ours, store) == on_gpu(OTHER), "the job waits for the engine"
    client.hdel("longhaul:job:job-1", "engine")
    assert place_for(ours, store) == Place("cpu", WAITS)


def test_a_sick_or_busy_worker_keeps_its_gpu(client: redis.Redis, redis_url: str, tmp_path: Path) -> None:
    store, ours = Store(client), settings(redis_url, tmp_path)
    store.workers.report(heartbeat("train-a", why="the GPU is lost", gpu=H200))
    assert place_for(ours, store) == Place("cpu", TRAINS)
    store.workers.report(heartbeat("train-a", gpu=H200, busy=True))
    assert place_for(ours, store) == Place("cpu", TRAINS)


def test_a_gpu_is_idle_when_each_of_its_slots_is(client: redis.Redis, redis_url: str, tmp_path: Path) -> None:
    store, ours = Store(client), settings(redis_url, tmp_path)
    for slot in range(3):
        store.workers.report(heartbeat(f"train-{slot}", gpu=H200, slot=slot))
    assert place_for(ours, store) == on_gpu(H200)
    wait_to_train(client)
    client.hset("longhaul:job:job-1", "trial", "1")
    assert store.claim(Stage.TRAIN, lease_token("train-2"), TrainWorker(gpu=H200, slot=2)) == "job-1"
    assert place_for(ours, store) == Place("cpu", TRAINS)


def test_without_redis_or_a_gpu_of_ours_it_is_the_cpu(redis_url: str, tmp_path: Path) -> None:
    nobody = Store(connect("redis://127.0.0.1:1/0"))
    assert place_for(settings(redis_url, tmp_path), nobody) == Place("cpu", UNKNOWN)
    at_home = Store(connect(redis_url))
    assert place_for(settings(redis_url, tmp_path, "cpu"), at_home) == Place("cpu", "this box uses no GPU")


class StubProcess:
    """A model process that writes these parts."""

    code = -signal.SIGKILL

    def __init__(self, *parts: dict[str, Any]) -> None:
        self.parts, self.asked, self.running = list(parts), list[Any](), True

    def ask(self, question: Any) -> None:
        self.asked.append(question)

    def answer(self, _within_s: float) -> dict[str, Any] | None:
        if not self.parts:
            raise ChildGone("has ended")
        return self.parts.pop(0)

    def kill(self) -> int:
        self.running = False
        return self.code


class StubWriter:
    """Where parts go; `failure` is raised at the first."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure, self.told = failure, list[tuple[str, Any]]()

    def hold(self) -> None:
        """Nobody is asked."""

    def add(self, type: str, data: Any) -> None:
        if self.failure is not None:
            raise self.failure
        self.told.append((type, data))


def part(id: str | None, type: str, text: str) -> dict[str, Any]:
    return {"id": id, "type": type, "data": {"text": text}}


@pytest.fixture
def answering(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Answer a request of this id, with a process that writes these parts."""
    (tmp_path / "job-1").mkdir()
    (tmp_path / "job-1" / "spec.json").write_text("{}")
    handler = GenerationHandler(settings(redis_url, tmp_path, "cpu"))

    def answer(id: str, process: StubProcess, writer: StubWriter, payload: Any = None) -> GenerationHandler:
        monkeypatch.setattr(generation, "JsonChild", lambda *_: process)
        handler.answer(
            Request(id=id, kind="generate", job="job-1", payload=payload or {"input": "x"}), cast("Any", writer)
        )
        return handler

    return answer


@pytest.mark.parametrize("failure", [StoreUnavailable("Redis is gone"), RequestFailed("the worker stops", code="x")])
def test_the_rest_of_an_answer_that_cannot_be_passed_on_reaches_nobody_else(answering: Any, failure: Exception) -> None:
    process = StubProcess(part("a", "text", "secret of a"), part("a", "done", "secret of a"))
    with pytest.raises(type(failure)):
        answering("a", process, StubWriter(failure))
    assert not process.running
    writer = StubWriter()
    answering("b", StubProcess(part("a", "text", "secret of a"), part("b", "done", "of b")), writer)
    assert writer.told == [("done", {"text": "of b", "why": "this box uses no GPU"})]


def test_whoever_leaves_at_the_end_of_an_answer_leaves_the_model_as_it_is(answering: Any) -> None:
    process = StubProcess(part("a", "done", "of a"))
    with pytest.raises(Abandoned):
        answering("a", process, StubWriter(Abandoned()))
    assert process.running and len(process.asked) == 1, "nothing is cancelled: it has answered"


def test_a_request_that_is_none_leaves_the_model_as_it_is(answering: Any) -> None:
    process = StubProcess()
    with pytest.raises(ValidationError, match="checkpoint"):
        answering("a", process, StubWriter(), {"input": "x", "checkpoint": "../model"})
    assert process.asked == [] and process.running


class EchoingProcess(StubProcess):
    """A model process that answers each question with what it was asked."""

    def ask(self, question: Any) -> None:
        super().ask(question)
        rows = question["body"].get("rows", [None])
        output = {"model": "trained", "index": 0, "text": json.dumps(rows), "tokens": 2}
        done = {"device": "cpu", "seconds": 0.5, "loading_s": 0.0, "tokens_per_s": 4.0, "seed": 7}
        self.parts = [{"id": question["id"], "type": type, "data": data} for type, data in
                      (("output", output), ("done", done))]  # fmt: skip


def answered(url: str, id: str) -> list[tuple[str, Any]]:
    return [
        (fields[b"type"].decode(), json.loads(fields[b"data"]))
        for _, fields in cast(Any, connect(url).xrange(answer_key(id)))
    ]


def test_a_request_of_many_rows_gives_the_turn_away_between_them(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = EchoingProcess()
    monkeypatch.setattr(generation, "JsonChild", lambda *_: process)
    monkeypatch.setattr(generation, "TURN_S", 0.0)
    (tmp_path / "job-1").mkdir()
    (tmp_path / "job-1" / "spec.json").write_text("{}")
    requests, handler = Requests(connect(redis_url)), GenerationHandler(settings(redis_url, tmp_path, "cpu"))
    many = requests.submit(
        "generate", "job-1", {"rows": [{"n": n} for n in range(4)], "temperature": 1.0}, client="one"
    )
    others = [requests.submit("generate", "job-1", {"input": "x"}, client=f"other {n}") for n in range(2)]
    order = []
    while (request := requests.take("generate")) is not None:
        order.append(request.id)
        serve_one(handler, request, AnswerWriter(requests, request, threading.Event()))
    assert order == [many.id, *(each.id for each in others), many.id]
    told = answered(redis_url, many.id)
    assert [(data["index"], json.loads(data["text"])) for type, data in told[:-1]] == [
        (n, [{"n": n}]) for n in range(4)
    ]
    assert told[-1] == ("done", {"device": "cpu", "why": "this box uses no GPU", "seconds": 2.0, "loading_s": 0.0,
                                 "tokens_per_s": 4.0, "seed": 7})  # fmt: skip
    assert [each["body"].get("seed") for each in process.asked if "rows" in each["body"]] == [None, 7, 7, 7]
    assert [answered(redis_url, each.id)[-1][0] for each in others] == ["done", "done"]


@pytest.mark.parametrize(
    ("ended_by", "code"), [(signal.SIGKILL, "model_process_ended"), (signal.SIGPROF, "chat_template")]
)
def test_whoever_asks_is_told_what_ended_the_model(answering: Any, ended_by: signal.Signals, code: str) -> None:
    process = StubProcess()
    process.code = -ended_by
    with pytest.raises(RequestFailed) as failed:
        answering("a", process, StubWriter())
    assert failed.value.code == code


@pytest.mark.parametrize("parts", [(), (part("a", "error", "model/config.json is missing"),)], ids=["ended", "refused"])
def test_a_job_deleted_while_its_model_loads_is_not_found(answering: Any, tmp_path: Path, parts: Any) -> None:
    class Deleted(StubProcess):
        """While it loads, the job is deleted."""

        def ask(self, question: Any) -> None:
            super().ask(question)
            shutil.rmtree(tmp_path / "job-1")

    process, writer = Deleted(*parts), StubWriter()
    with pytest.raises(RequestFailed, match="there is no job job-1 any more: it was deleted") as failed:
        answering("a", process, writer)
    assert failed.value.code == "not_found" and writer.told == [] and not process.running
