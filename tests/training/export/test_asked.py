"""Exports and uploads that are asked for over HTTP: service, queue, worker and process together."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ctranslate2
import pytest
import requests

from jobs.disk.rundir import RunDir
from jobs.export import ExportFormat
from jobs.process.lifeline import WARM
from jobs.redis.connection import connect
from jobs.redis.requests import Requests
from longhaul.api import ApiError, Longhaul
from longhaul.main import main
from tests.service.running import Service, running
from tests.sinks.driving import until
from tests.support.samples import STATES, beating, heartbeat
from tests.support.stack import warm_of_all_tests
from tests.training.attempts import attempt
from tests.training.conftest import MakeRun
from tests.training.export.test_export import SHORT
from tests.training.generation.conftest import CLASSES
from tests.training.hub_server import Hub, running_hub
from tests.training.workplace import Workplace, pairs
from tests.training.workplace import of_rows as of_rows
from worker.exports import ExportHandler, ProcessHandler, PushHandler
from worker.requests import serve
from worker.settings import from_environment

TOKEN = "hf_plantedPlantedPlantedPlanted"


@pytest.fixture
def service(redis_url: str, tmp_path: Path) -> Iterator[Service]:
    (tmp_path / "runs").mkdir(exist_ok=True)
    with running(redis_url, tmp_path) as service:
        yield service


@pytest.fixture
def run(make_run: MakeRun, service: Service) -> RunDir:
    """A finished job, and a worker of each role that says that it is there."""
    run = make_run("job-tuned", **SHORT)
    assert attempt(run) == 0
    service.store.append(run, STATES["succeeded"])
    for role in ("generate", "push"):
        service.store.workers.report(heartbeat(f"{role}-box", stage=role))
    return run


@pytest.fixture
def at_work(service: Service) -> Iterator[Any]:
    """Starts a worker's thread of one kind, and says from then on that workers are there."""
    stop, threads, beats = threading.Event(), [], ExitStack()

    def start(kind: type[ProcessHandler], **environment: str) -> None:
        settings = from_environment({**os.environ, "LONGHAUL_REDIS_URL": service.settings.redis_url, **environment})
        settings = dataclasses.replace(settings, runs=service.settings.runs)
        threads.append(threading.Thread(target=serve, args=(settings, kind(settings), stop)))
        threads[-1].start()
        beats.enter_context(beating(service.store, "generate", "push"))

    with beats:
        yield start
    stop.set()
    for thread in threads:
        thread.join(60)


def command(service: Service, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """`longhaul …`; returns its exit code."""
    monkeypatch.setenv("LONGHAUL_URL", service.url)
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(main(list(arguments)))
    return int(ended.value.code or 0)


def interrupt(_: float) -> None:
    raise KeyboardInterrupt


def test_an_export_is_waited_for_downloaded_and_opens(
    service: Service, run: RunDir, at_work: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    api = Longhaul(service.url)
    queued = api.export(run.id, "ctranslate2")
    assert (queued["status"], queued["path"], queued["ahead"]) == ("queued", None, 0)
    assert api.export(run.id, "ctranslate2")["ahead"] == 0, "asked for twice, made once"
    assert queued["error"] is None
    service.store.workers.forget("generate-box")
    [alone] = api.exports(run.id)
    assert alone["status"] == "queued" and alone["error"] is not None and alone["error"]["code"] == "no_worker"
    assert "waits for a worker" in service.get(f"/jobs/{run.id}?tab=files", headers={"Accept": "text/html"}).text
    service.store.workers.report(heartbeat("generate-box", stage="generate"))
    with pytest.raises(ApiError, match="is at an export to ctranslate2 in its default type: ask again"):
        api.export(run.id, "ctranslate2", dtype="int8")
    with monkeypatch.context() as patched:
        patched.setattr("longhaul.commands.exports.time.sleep", interrupt)
        assert command(service, "export", run.id, "--to", "ctranslate2", monkeypatch=monkeypatch) == 130
    left = capsys.readouterr().err
    assert (
        "the server continues; until it is made the same command follows it, and with --cancel ends it; "
        f"then: longhaul download {run.id}" in left
    )
    at_work(ExportHandler, **{WARM: warm_of_all_tests().socket})
    to = ["--to", "ctranslate2", "--dir", str(tmp_path / "mine")]
    assert command(service, "export", run.id, *to, monkeypatch=monkeypatch) == 0
    said = capsys.readouterr()
    assert "ctranslate2 (bfloat16)" in said.out and f"in {tmp_path / 'mine' / 'exports' / 'ctranslate2'}" in said.out
    [made] = api.exports(run.id)
    assert made["status"] == "done" and made["path"] == "exports/ctranslate2" and made["report"] is not None
    names = {each["name"] for each in made["report"]["files"]} | {"export.json"}
    folder = tmp_path / "mine" / "exports" / "ctranslate2"
    assert {file.name for file in folder.iterdir()} == names
    assert ctranslate2.Translator(str(folder)).translate_batch([["w3", "</s>"]])
    as_int8 = ("export", run.id, *to, "--dtype", "int8")
    assert command(service, *as_int8, monkeypatch=monkeypatch) == 0
    said = capsys.readouterr()
    assert "replaces exports/ctranslate2 (in bfloat16) once it is verified" in said.err
    assert "ctranslate2 (int8)" in said.out and [each["format"] for each in api.exports(run.id)] == ["ctranslate2"]
    shown = service.get(f"/jobs/{run.id}?tab=files", headers={"Accept": "text/html"}).text
    assert "verified by ctranslate2" in shown
    assert f'href="/jobs/{run.id}/files/exports/ctranslate2"' in shown
    assert f'data-url="/jobs/{run.id}/exports" data-body="{{&#34;format&#34;: &#34;ctranslate2&#34;}}"' in shown


def test_an_export_that_waits_or_is_being_made_is_cancelled(
    service: Service, run: RunDir, at_work: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    api = Longhaul(service.url)
    cancel = ("export", run.id, "--to", "ctranslate2", "--cancel")
    api.export(run.id, "ctranslate2")
    assert command(service, *cancel, monkeypatch=monkeypatch) == 0 and list(api.exports(run.id)) == []
    assert "the export to ctranslate2 is cancelled" in capsys.readouterr().out
    assert command(service, *cancel, monkeypatch=monkeypatch) == 2
    assert f"no export of job {run.id} to ctranslate2 waits or is being made" in capsys.readouterr().err
    api.export(run.id, "ctranslate2")
    queue = Requests(connect(service.settings.redis_url))
    taken = queue.take("export")
    assert taken is not None and queue.hold(taken.id)
    api.cancel_export(run.id, "ctranslate2")
    with pytest.raises(ApiError, match="an export to ctranslate2 in its default type is being cancelled"):
        api.export(run.id, "ctranslate2")
    assert not queue.hold(taken.id) and list(api.exports(run.id)) == []
    api.export(run.id, "ctranslate2")
    at_work(ExportHandler, **{WARM: warm_of_all_tests().socket})
    until(lambda: [each["status"] for each in api.exports(run.id)] == ["running"])
    api.cancel_export(run.id, "ctranslate2")
    until(lambda: not api.exports(run.id))
    until(lambda: not list((run.path / "exports").glob("*ctranslate2")))


def test_what_cannot_be_asked_for(service: Service, run: RunDir, make_run: MakeRun) -> None:
    api = Longhaul(service.url)
    assert list(api.exports(run.id)) == []
    for refused, code in (
        (lambda: api.export(run.id, "onnx"), "invalid_value"),
        (lambda: api.export(run.id, "ctranslate2", dtype="q8_0"), "conflict"),
        (lambda: api.push(run.id, "cooks/tuned", license="mit", export="gguf"), "conflict"),
        (lambda: api.export("job-none", "gguf"), "not_found"),
        (lambda: api.pushed(run.id), "no_push"),
    ):
        with pytest.raises(ApiError) as caught:
            refused()
        assert caught.value.code == code
    with pytest.raises(ApiError, match=r"repository: must be organisation/name, .* such as acme/recipes") as caught:
        api.push(run.id, "no-slash", license="mit")
    assert caught.value.code == "invalid_value" and "[A-Za-z" not in str(caught.value)
    with pytest.raises(
        ApiError, match=r"license: must be a licence as the hub names it, .* such as apache-2.0"
    ) as caught:
        api.push(run.id, "cooks/tuned", license="Apache 2.0")
    assert caught.value.code == "invalid_value" and "[a-z0-9]" not in str(caught.value)
    with pytest.raises(
        ApiError, match="ctranslate2 of this model is written in bfloat16 or float32 or int8, not in q8_0"
    ):
        api.export(run.id, "ctranslate2", dtype="q8_0")
    api.push(run.id, "cooks/tuned", license="mit")
    with pytest.raises(ApiError, match="is at an upload to cooks/tuned: ask again when that is over"):
        api.push(run.id, "cooks/other", license="mit")
    open_run = make_run("job-open", **SHORT)
    service.store.append(open_run, STATES["queued"])
    with pytest.raises(ApiError, match="job job-open has no model yet"):
        api.export(open_run.id, "ctranslate2")
    for worker in service.store.workers.all():
        service.store.workers.forget(worker.name)
    answer = requests.post(f"{service.url}/jobs/{run.id}/exports", json={"format": "ctranslate2"}, timeout=60)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_worker")


LORA = {"type": "lora", "rank": 4}


@pytest.mark.parametrize(
    ("job", "offered"),
    [
        ({}, {"ctranslate2"}),
        ({"method": LORA}, {"merged", "adapter", "ctranslate2"}),
        ({"method": LORA | {"merge": True}}, {"adapter", "ctranslate2"}),
        ({"model": "builtin:qwen-tiny"}, {"ctranslate2", "gguf"}),
        ({"model": "builtin:roberta-tiny"}, set()),
    ],
)
def test_formats_that_a_model_cannot_have_are_refused_at_once_and_not_offered(
    redis_url: str, workplace: Workplace, job: dict[str, Any], offered: set[str]
) -> None:
    workplace.rows("rows.jsonl", CLASSES if "roberta" in job.get("model", "") else pairs(48))
    run = workplace.job(data={"validation": 0.2}, **SHORT | {"training": {"max_steps": 1}}, **job)
    workplace.prepare(run)
    assert attempt(run) == 0
    with running(redis_url, workplace.root) as service:
        service.store.append(run, STATES["succeeded"])
        service.store.workers.report(heartbeat("generate-box", stage="generate"))
        check_offered(service, run, offered)


def check_offered(service: Service, run: RunDir, offered: set[str]) -> None:
    page = service.get(f"/jobs/{run.id}?tab=files", headers={"Accept": "text/html"}).text
    api = Longhaul(service.url)
    for format in ExportFormat:
        assert (f"{{&#34;format&#34;: &#34;{format}&#34;}}" in page) == (format in offered)
        if format in offered:
            assert api.export(run.id, format)["status"] == "queued"
        else:
            with pytest.raises(ApiError) as refused:
                api.export(run.id, format)
            assert refused.value.code in ("nothing_to_merge", "no_adapter", "export_unsupported")
            assert {*re.findall(r"--to (\w+)", refused.value.hint or "")} == offered
            assert f"longhaul download {run.id}" in (refused.value.hint or "")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running_hub(monkeypatch) as server:
        server.token = TOKEN
        yield server


def test_an_upload_needs_a_licence_and_its_token_is_nowhere_to_be_read(
    service: Service, run: RunDir, at_work: Any, hub: Hub, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert command(service, "push", run.id, "cooks/tuned", monkeypatch=monkeypatch) == 2
    assert "--license apache-2.0" in capsys.readouterr().err
    at_work(PushHandler, HF_TOKEN=TOKEN, HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="")
    push = ("push", run.id, "cooks/tuned", "--license", "mit")
    assert command(service, *push, monkeypatch=monkeypatch) == 0
    assert "uploaded to cooks/tuned" in capsys.readouterr().out
    assert "license: mit" in hub.commits[0]["README.md"].decode() and hub.created == {"cooks/tuned": True}
    hub.token = "another"
    assert command(service, *push, "--json", monkeypatch=monkeypatch) == 1
    told = capsys.readouterr()
    assert json.loads(told.out)["error"]["code"] == "hub_refused"
    kept = b"".join(file.read_bytes() for file in run.path.rglob("*") if file.is_file())
    redis = service.store._redis
    stored = repr([redis.dump(key) for key in redis.keys("*")])
    assert TOKEN not in told.out + told.err + stored and TOKEN.encode() not in kept
