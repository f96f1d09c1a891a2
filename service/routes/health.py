"""How the service is, for container engines (is it alive, can it do its work?), people (workers) and Prometheus."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Literal

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from jobs import answers
from jobs.disk.files import probe
from jobs.errors import Recovering, StoreUnavailable
from jobs.frozen import Frozen
from jobs.heartbeat import Worker
from jobs.metrics import MetricRow
from jobs.record import JobRecord, present
from jobs.redis.gauges import Gauges, Snapshot
from jobs.redis.store import Store
from jobs.redis.workers import Workers
from service.errors import error_response
from service.files.uploads import Uploads
from service.openapi.documented import documented
from service.reading.stream import Streams


class Health(Frozen):
    """All is well."""

    status: Literal["ok"]
    """Always `ok`: what is not well is an error."""


def routes(*, store: Store, runs: Path, uploads: Uploads) -> APIRouter:
    """`/health/live` and `/health/ready`."""
    router = APIRouter(prefix="/health", tags=["health"])

    needs: dict[str, Callable[[], None]] = {"runs": partial(probe, runs), "uploads": uploads.probe}

    @router.get("/live", responses=documented(everywhere=(500,)))
    def health_live() -> Health:
        """The process answers."""
        return Health(status="ok")

    @router.get("/ready", response_model=Health, responses=documented(503, everywhere=(500,)))
    def health_ready() -> Health | JSONResponse:
        """What `POST /jobs` and `PUT /datasets/{name}` need: Redis, the folder of runs and that of uploads take writes.

        Otherwise 503, whose `param` says which of them fails: `redis`, `runs` or `uploads`."""
        try:
            store.ping()
        except StoreUnavailable:
            return error_response(503, "not_ready", "Redis does not answer, or takes no writes", param="redis")
        for param, look in needs.items():
            try:
                look()
            except OSError as error:
                message = f"the folder of {param} cannot be written: {os.strerror(error.errno or 0)}"
                return error_response(503, "not_ready", message, param=param)
        return Health(status="ok")

    return router


# -- workers -----------------------------------------------------------------------------------------------------------
# Who works here.


def worker_routes(store: Store) -> APIRouter:
    """`/workers`."""
    router = APIRouter(tags=["workers"])

    @router.get("/workers", response_model_exclude_unset=True, responses=documented())
    def list_workers() -> answers.WorkerList:
        """Workers heard of in the last minute, with what each reported of itself; and jobs that none can work on."""
        workers, damaged = store.workers.all(), store.all_damaged()
        return answers.WorkerList(object="list", data=workers, has_more=False, damaged=damaged)

    return router


# -- prometheus --------------------------------------------------------------------------------------------------------
# `GET /metrics`, for Prometheus: jobs, queues, workers, sinks and streams.
#
# Made again for each scrape from what Redis can say at once: nothing walks over jobs, and no label is what somebody
# typed into an address.

log = logging.getLogger("longhaul.service")

_Figure = Callable[[JobRecord, MetricRow], float | None]
_OF_RUNNING: dict[str, tuple[str, _Figure]] = {
    "step": ("Optimizer steps done.", lambda _, row: row.step),
    "loss": (
        "Training loss: nats per target token (of a classifier: per row), or squared error.",
        lambda _, row: row.loss,
    ),
    "rows_per_second": ("Training rows a second.", lambda _, row: row.rows_per_s),
    "tokens_per_second": (
        "Tokens that went through the model a second, without padding.",
        lambda _, row: row.tokens_per_s,
    ),
    "eta_seconds": ("Seconds left, by what was measured so far.", lambda _, row: row.eta_s),
    "mfu_ratio": ("Use of the GPU's peak, 0 to 1.", lambda _, row: row.mfu),
    "memory_bytes": (
        "Of the trainer: at peak on a GPU, resident on a CPU.",
        lambda _, row: row.memory_bytes,
    ),
    "memory_planned_bytes": ("What was predicted for that.", lambda _, row: row.memory_planned_bytes),
    "gpu_memory_used_bytes": ("Of the whole GPU, by everybody.", lambda _, row: row.gpu_memory_used_bytes),
    "gpu_temperature_celsius": ("Of the GPU.", lambda _, row: row.gpu_temperature_c),
    "gpu_power_watts": ("Of the GPU.", lambda _, row: row.gpu_power_w),
    "gpu_utilization_ratio": ("Share of time in which the GPU was busy.", lambda _, row: row.gpu_utilization),
    "host_memory_available_bytes": ("Of the machine or container.", lambda _, row: row.host_memory_available_bytes),
    "reported_timestamp_seconds": ("When the trainer reported all this.", lambda _, row: row.at),
}
"""`longhaul_job_…` of a running job, from the newest row of metrics of its attempt. None: not known, left out."""


class ServiceCollector(Collector):
    """Jobs, queues, running jobs, workers and sinks, as Redis knows them; and open streams."""

    def __init__(self, gauges: Gauges, workers: Workers, streams: Streams) -> None:
        self._gauges = gauges
        self._workers = workers
        self._streams = streams

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering must not ask Redis."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Redis away: that alone, and what needs none. While it recovers: nothing of jobs."""
        workers: list[Worker] | None = None
        snapshot: Snapshot | None = None
        try:
            workers = self._workers.all()
            with suppress(Recovering):
                snapshot = self._gauges.read()
        except StoreUnavailable as error:
            log.warning("metrics without Redis: %s", error)
            workers = None
        yield from families(workers, snapshot, self._streams.open)


def families(workers: list[Worker] | None, snapshot: Snapshot | None, open_streams: int) -> Iterator[Metric]:
    """All figures but those of requests. `workers` is None while Redis is away, `snapshot` also while it recovers."""
    yield _gauge("open_streams", "Event streams and followed logs that are open.", open_streams)
    yield _gauge("redis_up", "Whether Redis answers.", workers is not None)
    if workers is None:
        return
    yield _gauge("redis_recovering", "Whether it is being refilled with all jobs.", snapshot is None)
    yield from _worker_metrics(workers)
    yield from _sink_metrics(workers)
    if snapshot is None:
        return
    yield _gauges("jobs", "Jobs by state, and damaged ones.", "status", snapshot.jobs)
    queues = {stage.value: queue for stage, queue in snapshot.queues.items()}
    yield _gauges("queue_length", "Jobs that wait.", "stage", {name: each.length for name, each in queues.items()})
    yield _gauges(
        "queue_oldest_age_seconds",
        "Since the job that waits longest was submitted; 0 when none waits.",
        "stage",
        {name: each.oldest_s for name, each in queues.items()},
    )
    yield from _job_metrics(snapshot.running)


def prometheus_routes(registry: CollectorRegistry) -> APIRouter:
    """`/metrics`."""
    router = APIRouter(tags=["operators"])

    @router.get("/metrics", response_class=PlainTextResponse, responses=documented())
    def read_prometheus() -> Response:
        """Figures for Prometheus, in its text format. Without Redis `longhaul_redis_up` is 0, and much is left out."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return router


def _job_metrics(running: list[tuple[JobRecord, MetricRow | None]]) -> Iterator[Metric]:
    info = _labelled("job_info", "A running job: who it is.", "job", "name", "model")
    steps = _labelled("job_steps", "Optimizer steps of the whole run.", "job")
    attempt = _labelled("job_attempt", "Number of the attempt.", "job")
    restarts = _labelled("job_restarts", "Restarts after crashes since the last progress.", "job")
    for record, _ in running:
        info.add_metric([record.id, record.name, record.model], 1)
        attempt.add_metric([record.id], record.attempt)
        restarts.add_metric([record.id], record.restarts)
        if record.steps is not None:
            steps.add_metric([record.id], record.steps)
    yield from (info, steps, attempt, restarts)
    for name, (meaning, figure) in _OF_RUNNING.items():
        family = _labelled(f"job_{name}", meaning, "job")
        for record, latest in running:
            row = present(record, latest)
            if row is not None and (value := figure(record, row)) is not None:
                family.add_metric([record.id], value)
        yield family


def _worker_metrics(workers: list[Worker]) -> Iterator[Metric]:
    stages = sorted({worker.stage for worker in workers})
    by_stage = {stage: [worker for worker in workers if worker.stage == stage] for stage in stages}
    yield _gauges("workers", "Heard of in the last minute.", "stage", {name: len(by_stage[name]) for name in stages})
    healthy = {name: sum(worker.healthy for worker in by_stage[name]) for name in stages}
    yield _gauges("workers_healthy", "Of those, how many can work.", "stage", healthy)
    ages = {name: max(worker.heartbeat_age_s for worker in by_stage[name]) for name in stages}
    yield _gauges("worker_heartbeat_age_seconds", "Of the one that was silent for longest.", "stage", ages)
    gpus = _labelled("gpu_memory_total_bytes", "Of a GPU that a worker has.", "gpu", "name")
    for gpu in {worker.gpu.uuid: worker.gpu for worker in workers if worker.gpu and worker.engine is None}.values():
        gpus.add_metric([gpu.uuid, gpu.name], gpu.count * gpu.memory_bytes)
    yield gpus


def _sink_metrics(workers: list[Worker]) -> Iterator[Metric]:
    """By what publish says of itself; a sink that two of them tell of shows the worse."""
    behind: dict[str, float] = {}
    oldest: dict[str, float] = {}
    for worker in workers:
        for sink, lag in (worker.sinks or {}).items() if worker.stage == "publish" else ():
            behind[sink] = max(behind.get(sink, 0), lag.jobs_behind)
            oldest[sink] = max(oldest.get(sink, 0.0), lag.oldest_s)
    yield _gauges("sink_jobs_behind", "Jobs with events that a sink has not taken.", "sink", behind)
    yield _gauges("sink_oldest_event_age_seconds", "Of the oldest event that a sink has not taken.", "sink", oldest)


def _gauge(name: str, meaning: str, value: float) -> Metric:
    return GaugeMetricFamily(f"longhaul_{name}", meaning, value=value)


def _gauges(name: str, meaning: str, label: str, values: dict[str, float] | dict[str, int]) -> Metric:
    family = _labelled(name, meaning, label)
    for value, figure in values.items():
        family.add_metric([value], figure)
    return family


def _labelled(name: str, meaning: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"longhaul_{name}", meaning, labels=labels)
