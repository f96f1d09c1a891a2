"""`/metrics` for Prometheus: true figures, bounded cost, and an answer when Redis is away."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml

from jobs.events import AttemptStarted, JobCancelled, JobQueued
from jobs.metrics import MetricRow
from jobs.redis.connection import connect
from jobs.redis.gauges import Gauges
from jobs.state import Stage
from tests.service.running import Service, running
from tests.service.scraping import figure, scrape, scraped
from tests.sinks.driving import until
from tests.support.redis_server import RedisServer
from tests.support.samples import H200, checked, heartbeat, metric_row, prepared

ROOT = Path(__file__).resolve().parents[2]
TO_QUEUE = (checked(), prepared(900), JobQueued())


def test_jobs_and_queues(service: Service) -> None:
    first, second, third = (service.submit() for _ in range(3))
    for job in (first, second):
        service.append(job, *TO_QUEUE)
    service.append(second, JobCancelled())
    figures = scrape(service)
    assert figure(figures, "redis_up") == 1
    by_status = {status: figure(figures, "jobs", status=status) for status in ("validating", "queued", "cancelled")}
    assert by_status == {"validating": 1, "queued": 1, "cancelled": 1}
    assert figure(figures, "jobs", status="failed") == 0
    waiting = {stage: figure(figures, "queue_length", stage=stage) for stage in ("check", "prepare", "train")}
    assert waiting == {"check": 1, "prepare": 0, "train": 1}
    assert figure(figures, "queue_oldest_age_seconds", stage="prepare") == 0
    age = figure(figures, "queue_oldest_age_seconds", stage="check")
    assert age is not None and 0 <= age < 60
    assert third


def test_the_oldest_of_a_queue_is_found_behind_every_priority(service: Service) -> None:
    client = connect(service.settings.redis_url)
    now = time.time() * 1000
    for number, (priority, age_s) in enumerate([(100, 5), (7, 60), (7, 50), (0, 90), (0, 80), (-3, 900), (-100, 1)]):
        client.zadd("longhaul:order:train", {f"job-{number}": -priority * 10**13 + now - age_s * 1000})
    queue = Gauges(client).read().queues[Stage.TRAIN]
    assert queue.length == 7
    assert queue.oldest_s == pytest.approx(900, abs=30)


def test_a_running_job(service: Service) -> None:
    job = service.submit(name="chef")
    service.append(job, *TO_QUEUE, AttemptStarted(worker="w", device="cuda"))
    figures = scrape(service)
    assert figure(figures, "job_info", job=job, name="chef", model="builtin:t5-tiny") == 1
    assert figure(figures, "job_steps", job=job) == 900
    assert figure(figures, "job_step", job=job) is None, "no row of metrics yet"
    newest = metric_row(30, loss=1.25).model_copy(
        update={"gpu_memory_used_bytes": 2**35, "memory_planned_bytes": 2**34, "gpu_temperature_c": 61}
    )
    service.store.set_latest(job, newest)
    figures = scrape(service)
    told = {
        name: figure(figures, f"job_{name}", job=job)
        for name in (
            "step", "loss", "rows_per_second", "eta_seconds", "gpu_memory_used_bytes", "memory_planned_bytes",
            "gpu_temperature_celsius", "restarts", "attempt", "tokens_per_second",
        )
    }  # fmt: skip
    assert told == {
        "step": 30, "loss": 1.25, "rows_per_second": 10, "eta_seconds": 60, "gpu_memory_used_bytes": 2**35,
        "memory_planned_bytes": 2**34, "gpu_temperature_celsius": 61, "restarts": 0, "attempt": 1,
        "tokens_per_second": None,
    }  # fmt: skip


def test_workers_and_sinks(service: Service) -> None:
    cases: tuple[tuple[str, dict[str, Any]], ...] = (
        ("train-0", {"gpu": H200, "slot": 0}),
        ("train-2", {"gpu": H200, "slot": 1}),
        ("train-1", {"why": "no driver", "gpu": None}),
        ("train-3", {"gpu": H200.model_copy(update={"uuid": "cluster/0"}), "engine": "cluster"}),
        ("publish-0", {"sinks": {"discord": {"jobs_behind": 2, "oldest_s": 61.5}}}),
        ("publish-1", {"sinks": {"discord": {"jobs_behind": 0, "oldest_s": 0.0}}}),  # waits for the first to go
    )
    for name, more in cases:
        service.store.workers.report(heartbeat(name, **more))
    figures = scrape(service)
    assert figure(figures, "workers", stage="train") == 4
    assert figure(figures, "workers_healthy", stage="train") == 3
    assert figure(figures, "workers_healthy", stage="publish") == 2
    assert figure(figures, "gpu_memory_total_bytes", gpu="GPU-1", name="NVIDIA H200") == 2**37
    assert "cluster/0" not in str(figures), "nobody knows which GPUs an engine has now"
    assert figure(figures, "sink_jobs_behind", sink="discord") == 2
    assert figure(figures, "sink_oldest_event_age_seconds", sink="discord") == 61.5


@pytest.fixture
def uncounted(redis_url: str, tmp_path: Path) -> Iterator[Service]:
    """A service that nobody has asked for anything."""
    with running(redis_url, tmp_path) as service:
        yield service


def test_requests_are_counted_by_what_was_asked_never_by_what_was_typed(uncounted: Service) -> None:
    service = uncounted
    job = service.submit()
    for path in (f"/jobs/{job}", "/jobs/job-unknown", "/jobs/job-other", f"/jobs/{job}/plan", "/a/path", "/etc/x"):
        service.get(path)
    service.request("BREW", "/jobs")
    with service.session.get(
        f"{service.url}/jobs/{job}/events", headers={"Accept": "text/event-stream"}, stream=True, timeout=9
    ) as stream:
        following = stream.iter_lines()
        assert next(following)
        text = service.get("/metrics").text
    figures = scraped(text)

    def count(method: str, route: str, status: str) -> float | None:
        labels = {"method": method, "route": route, "status": status}
        return figure(figures, "http_request_duration_seconds_count", **labels)

    assert count("POST", "/jobs", "2xx") == 1
    assert count("GET", "/jobs/{job}", "2xx") == 1
    assert count("GET", "/jobs/{job}", "4xx") == 2
    assert count("GET", "none", "4xx") == 2
    assert count("GET", "/jobs/{job}/events", "2xx") == 1, "counted when it begins"
    assert figure(figures, "open_streams") == 1
    until(lambda: figure(scrape(service), "open_streams") == 0)  # the reader has left
    assert not any(word in text for word in ("unknown", "other-", "etc", "a/path", "BREW"))


def test_without_redis_it_answers_and_says_so(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis") as redis, running(redis.url, tmp_path) as service:
        service.submit()
        redis.stop()
        figures = scrape(service)
        assert figure(figures, "redis_up") == 0
        assert figure(figures, "jobs", status="validating") is None
        labels = {"method": "POST", "route": "/jobs", "status": "2xx"}
        assert figure(figures, "http_request_duration_seconds_count", **labels) == 1
        redis.start()
        assert figure(scrape(service), "redis_up") == 1


def test_with_a_key_it_needs_one(redis_url: str, tmp_path: Path) -> None:
    with running(redis_url, tmp_path, api_key="a-key-of-some-length") as service:
        assert requests.get(f"{service.url}/metrics", timeout=60).status_code == 401
        scrape(service)


def test_the_cost_does_not_grow_with_the_number_of_jobs(redis_server: RedisServer) -> None:
    """Commands that Redis runs for one scrape, with 10 and with 3,000 jobs in its indexes."""
    client = connect(redis_server.url)
    gauges = Gauges(client)
    gauges.read()

    def calls() -> int:
        stats = client.info("commandstats")
        return sum(each["calls"] for name, each in stats.items() if name != "cmdstat_info")

    costs = []
    for number in (10, 3000):
        jobs = {f"job-{n}": n for n in range(number)}
        for index in ("jobs", "status:succeeded", "status:queued", "order:train"):
            client.zadd(f"longhaul:{index}", jobs)
        before = calls()
        gauges.read()
        costs.append(calls() - before)
    assert costs[0] == costs[1] < 60


FIGURE = re.compile(r"\b(longhaul_[a-z_]+)(?:\{([a-z_]+)=)?")
RULES, DASHBOARD = (ROOT / "docs" / "prometheus" / name for name in ("alerts.yml", "grafana.json"))


def expressions() -> list[str]:
    """Every expression of the alert rules and of the dashboard."""
    rules = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
    dashboard = json.loads(DASHBOARD.read_text())
    targets = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    return [rule["expr"] for rule in rules] + targets + [dashboard["templating"]["list"][1]["query"]]


def test_alerts_and_dashboard_name_figures_that_there_are(service: Service) -> None:
    job = service.submit()
    service.append(job, *TO_QUEUE, AttemptStarted(worker="w", device="cuda"))
    everything = {name: 1 for name, field in MetricRow.model_fields.items() if field.default is None and name != "loss"}
    service.store.set_latest(job, metric_row(30).model_copy(update=everything))
    service.store.workers.report(heartbeat("train-1", gpu=H200))
    service.store.workers.report(heartbeat("publish-1", sinks={"discord": {"jobs_behind": 1, "oldest_s": 2.0}}))
    shown: dict[str, set[str]] = {}
    for name, labels in scrape(service):
        shown.setdefault(name, set()).update(dict(labels))
    named = [match for expression in expressions() for match in FIGURE.findall(expression)]
    assert len(named) > 25
    for name, label in named:
        assert name in shown, name
        assert not label or label in shown[name], (name, label)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (of Prometheus) is not installed")
def test_promtool_accepts_the_alert_rules() -> None:
    done = subprocess.run(["promtool", "check", "rules", str(RULES)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
