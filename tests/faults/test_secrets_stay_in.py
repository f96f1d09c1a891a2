"""Secrets planted wherever one could get to are in nothing that anybody reads: answers, streams, logs, argv, reprs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

import service.settings
import worker.settings
from jobs.disk.rundir import RunDir
from jobs.events import AttemptEnded, AttemptStarted, JobFailed, JobQueued
from jobs.process.secrets import new_key, register
from jobs.redis.connection import connect
from jobs.redis.store import Store
from jobs.trainer_facts import Fault
from tests.support.processes import of_stack
from tests.support.redis_server import compose_rules
from tests.support.samples import checked, heartbeat, prepared
from tests.support.stack import ROOT, Stack, tiny_job

KEY, LINE = new_key("anna")
PLANTED = {
    "LONGHAUL_API_KEY": new_key("one")[0],
    "DISCORD_WEBHOOK": "http://127.0.0.1:9/api/webhooks/1/planted-discord",
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef00c0ffee",
    "HF_TOKEN": "planted, in a form of its own",
}
HUB = "hf_plantedPlantedPlanted"
"""Nobody was told of this one: it is known by its form."""
TOLD = f"401 for redis://u:planted-url@h/0, Authorization: Bearer planted-bearer, {HUB}, password=planted-word, {KEY}"


def text_with_secrets() -> str:
    """A message with all of them, as a library might say it."""
    return f"{TOLD}, {' '.join(PLANTED.values())}"


def assert_clean(text: str, where: object) -> None:
    """No secret, nor the half of one."""
    for secret in ("planted", "PlantedPlanted", KEY[3:], PLANTED["LONGHAUL_API_KEY"][3:], PLANTED["WANDB_API_KEY"]):
        at = text.find(secret)
        assert at < 0, f"{where}: …{text[max(0, at - 200) : at + 60]}…"


@pytest.fixture(scope="module", params=["text", "json"])
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Service and publish on a Redis with compose's user, with secrets all around."""
    home = tmp_path_factory.mktemp("stay_in")
    (home / "keys").write_text(f"{LINE}\n")
    (home / "rows.jsonl").write_text("")
    environment = PLANTED | {"LONGHAUL_API_KEYS_FILE": str(home / "keys"), "LONGHAUL_LOG": request.param}
    with Stack(home / "home", data=home, environment=environment, rules=compose_rules()) as stack:
        stack.start("service", "publish")
        yield stack


@pytest.fixture(scope="module")
def http() -> Iterator[requests.Session]:
    """Asks with a key."""
    with requests.Session() as session:
        session.headers["Authorization"] = f"Bearer {KEY}"
        yield session


@pytest.fixture(scope="module")
def run(stack: Stack, http: requests.Session) -> RunDir:
    """A failed job: its error, its log, the last words of an attempt hold secrets; and a worker that says one."""
    job = http.post(f"{stack.url}/jobs", json=tiny_job(integrations={"discord": True})).json()["id"]
    run, store = RunDir(stack.runs / job), Store(connect(stack.redis.url))
    register(PLANTED)  # as a worker does when it starts: its own are not written down, either
    fault = Fault(code="crash", message=text_with_secrets(), hint=text_with_secrets())
    store.append(run, [checked(train=text_with_secrets()), prepared(1, noticed={text_with_secrets(): 1}), JobQueued()])
    store.append(run, [AttemptStarted(worker="w", device="cpu")])
    store.append(run, [AttemptEnded(reason="crash", error=fault), JobFailed(error=fault)])
    register({})
    run.trainer_log.write_text(f"{text_with_secrets()}\n" * 50)
    run.plan_file.write_text('{"why": "' + text_with_secrets() + '"}')
    store.workers.report(heartbeat("train-0", why=text_with_secrets()))
    return run


def test_no_job_is_taken_that_holds_one(stack: Stack, http: requests.Session) -> None:
    spec = tiny_job()
    cases: dict[str, dict[str, Any]] = {
        "metadata.note": {"metadata": {"note": f"use {HUB}"}},
        "metadata.api_key": {"metadata": {"api_key": "planted-word"}},
        "name": {"name": KEY},
        "model": {"model": "https://me:planted@hub.test/model"},
        "data.input": {"data": {**spec["data"], "input": PLANTED["HF_TOKEN"], "target": "x"}},
    }
    for param, more in cases.items():
        answer = http.post(f"{stack.url}/jobs", json={**spec, **more})
        assert answer.status_code == 422, answer.text
        assert answer.json()["error"]["param"] == param
        assert_clean(answer.text, param)


def test_no_answer_shows_one(stack: Stack, http: requests.Session, run: RunDir) -> None:
    paths = http.get(f"{stack.url}/openapi.json").json()["paths"]
    files = [each["path"] for each in http.get(f"{stack.url}/jobs/{run.id}/files").json()["data"]]
    assert "events.jsonl" in files
    asked = [
        "/openapi.json",
        f"/jobs/{run.id}/logs?follow=true",
        f"/jobs/{run.id}/logs?offset=7",
        f"/jobs/{KEY}",
        f"/{KEY}",
    ]
    for template, methods in paths.items():
        if "get" in methods:
            filled = template.replace("{job}", run.id).replace("{name}", HUB)
            asked += [filled.replace("{path}", file) for file in (files if "{path}" in filled else [""])]
    asked.remove(f"/jobs/{run.id}/files/plan.json")  # a download, byte for byte as prepare wrote it
    for path in asked:
        for accept in ("*/*", "text/event-stream"):
            answer = http.get(stack.url + path, headers={"Accept": accept}, timeout=300)
            assert answer.status_code < 500
            assert_clean(answer.text + str(answer.headers), path)
    wrong = [
        http.post(f"{stack.url}/jobs", json={KEY: HUB}),
        http.post(f"{stack.url}/jobs", data=f'{{"{HUB}'),
        http.post(
            f"{stack.url}/jobs", json=tiny_job(), headers={"Idempotency-Key": "planted-word é".encode("latin-1")}
        ),
        http.request("PUT", f"{stack.url}/{HUB}"),
        requests.get(f"{stack.url}/jobs", headers={"Authorization": "Bearer planted"}),
    ]
    for answer in wrong:
        assert 400 <= answer.status_code < 500, answer.text
        assert_clean(answer.text + str(answer.headers), answer.url)
    assert "***" in http.get(f"{stack.url}/jobs/{run.id}/logs").text
    assert "***" in http.get(f"{stack.url}/jobs/{run.id}").json()["error"]["message"]


def test_no_log_no_file_of_events_and_no_command_line_holds_one(
    stack: Stack, http: requests.Session, run: RunDir
) -> None:
    http.get(f"{stack.url}/{KEY}/{HUB}?key={KEY}")
    for file in [*stack.home.glob("*.log"), stack.home / "redis" / "redis.log", *stack.runs.glob("*/events.jsonl")]:
        said = file.read_text()
        assert said, file
        assert_clean(said, file)
        assert stack.redis.password not in said
    for pid in [*of_stack(stack), stack.redis.pid]:
        line = Path(f"/proc/{pid}/cmdline").read_text()
        assert_clean(line, pid)
        assert stack.redis.password not in line


def test_nothing_is_shown_by_repr_or_by_an_error_at_the_start(stack: Stack) -> None:
    for settings in (
        service.settings.read_settings(stack.environment),
        worker.settings.from_environment(stack.environment),
    ):
        assert_clean(repr(settings), type(settings))
        assert stack.redis.password not in repr(settings)
    for name, value in {
        "LONGHAUL_REDIS_URL": "http://u:planted-url@h/0",
        "LONGHAUL_API_KEYS_FILE": os.devnull,
        "LONGHAUL_RATE_LIMIT": "fast",
        "LONGHAUL_PORT": "none",
    }.items():
        environment = stack.environment | {name: value, "LONGHAUL_API_KEY": ""}
        command = [sys.executable, "-m", "service"]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 2 and name in done.stderr and "Traceback" not in done.stderr, done.stderr
        assert_clean(done.stdout + done.stderr, name)
