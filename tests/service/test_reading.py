"""Lists, series, logs, workers, health, keys, and the one shape of errors."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import requests

from jobs.events import AttemptEnded, AttemptStarted, JobQueued
from jobs.trainer_facts import DeviceWaiting
from service.settings import ServiceSettings, read_settings
from tests.service.running import TINY, Service, running
from tests.support.redis_server import RedisServer
from tests.support.samples import check_summary, checked, metric_row, prepared, time_summary

ROOT = Path(__file__).resolve().parents[2]


def test_pages_of_jobs(service: Service) -> None:
    ids = [service.submit(name=f"n{number}") for number in range(7)]
    service.post(f"/jobs/{ids[3]}/cancel")
    seen: list[str] = []
    after = ""
    while True:
        page = service.get("/jobs", params={"limit": 3, **({"after": after} if after else {})}).json()
        assert page["object"] == "list"
        assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
        seen += [job["id"] for job in page["data"]]
        after = page["last_id"]
        if not page["has_more"]:
            break
    assert sorted(seen) == sorted(ids)
    created = [service.run(job).record().submitted_at for job in seen]
    assert created == sorted(created, reverse=True)
    cancelled = service.get("/jobs", params={"status": "cancelled"}).json()
    assert [job["id"] for job in cancelled["data"]] == [ids[3]]
    empty = service.get("/jobs", params={"status": "failed"}).json()
    assert (empty["data"], empty["has_more"], empty["first_id"]) == ([], False, None)
    assert service.get("/jobs", params={"after": "job-unknown"}).status_code == 404


def test_figures_of_an_attempt_that_is_over_are_not_those_of_the_next(service: Service) -> None:
    job = service.submit()
    service.append(job, checked(), prepared(10), JobQueued())
    service.append(job, AttemptStarted(worker="w", device="cuda"))
    service.store.set_latest(job, metric_row(9, eta_s=59.0))
    shown = service.get(f"/jobs/{job}").json()
    assert (shown["progress"]["step"], shown["progress"]["eta_s"]) == (9, 59.0)
    service.append(job, AttemptEnded(reason="crash", step=9), JobQueued())
    shown = service.get(f"/jobs/{job}").json()
    assert (shown["progress"]["step"], shown["progress"]["eta_s"], shown["estimated_finish"]) == (0, None, None)
    record = service.append(job, AttemptStarted(worker="w", device="cuda"))
    shown = service.get(f"/jobs/{job}").json()
    progress = shown["progress"]
    assert (progress["step"], progress["at"], progress["eta_s"], progress["eta_from"]) == (0, None, 590.0, "measured")
    assert shown["estimated_finish"] == int((record.attempt_started_at or 0) + 590)


def test_time_left_is_the_plans_until_it_is_measured(service: Service) -> None:
    job = service.submit()
    time = time_summary(
        hours_expected=2.0, text="about 1.0 h at the nominal peak of an RTX 5090 (about 2.0 h expected)"
    )
    service.append(job, checked(steps=9, time=time_summary(hours_expected=9.0)))
    service.append(job, prepared(9, time=time), JobQueued())
    shown = service.get(f"/jobs/{job}").json()
    assert shown["plan"] == check_summary(steps=9, time=time).model_dump()
    assert (shown["progress"]["eta_s"], shown["progress"]["eta_from"], shown["estimated_finish"]) == (None, None, None)
    service.append(job, AttemptStarted(worker="w", device="cuda"))
    shown = service.get(f"/jobs/{job}").json()
    assert (shown["progress"]["eta_s"], shown["progress"]["eta_from"]) == (7200.0, "plan")
    assert shown["estimated_finish"] - shown["started_at"] in (7200, 7201)
    service.store.set_latest(job, metric_row(1, at=1.0, mfu=0.5, tokens_per_s=900.0))
    shown = service.get(f"/jobs/{job}").json()
    assert (shown["progress"]["eta_s"], shown["progress"]["eta_from"], shown["estimated_finish"]) == (
        60.0,
        "measured",
        61,
    )
    assert (shown["progress"]["mfu"], shown["progress"]["tokens_per_s"]) == (0.5, 900.0)


def test_a_queued_job_says_why_no_gpu_takes_it(service: Service) -> None:
    job = service.submit()
    assert service.get(f"/jobs/{job}").json()["waiting_reason"] is None
    service.append(job, checked(), prepared(9), JobQueued())
    service.append(job, DeviceWaiting(message="no NVIDIA driver was found here"))
    shown = service.get(f"/jobs/{job}").json()
    assert (shown["status"], shown["waiting_reason"]) == ("queued", "no NVIDIA driver was found here")
    event = service.get(f"/jobs/{job}/events").json()["data"][-1]
    assert (event["type"], event["level"]) == ("device.waiting", "warn")
    assert event["message"] == "waiting for the GPU: no NVIDIA driver was found here"
    service.append(job, DeviceWaiting(message="33.0 GiB are needed", memory_of_host=True))
    event = service.get(f"/jobs/{job}/events").json()["data"][-1]
    assert event["message"] == "waiting for memory of the host: 33.0 GiB are needed"


def test_health_says_what_is_wrong(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis") as redis, running(redis.url, tmp_path) as service:
        assert service.get("/health/live").status_code == 200
        assert service.get("/health/ready").json() == {"status": "ok"}
        service.settings.uploads.rmdir()
        assert service.get("/health/ready").status_code == 200, "an upload makes it again"
        service.settings.uploads.rmdir()
        service.settings.uploads.touch()
        answer = service.get("/health/ready")
        assert (answer.status_code, answer.json()["error"]["param"]) == (503, "uploads")
        upload = {"data": b"{}", "headers": {"Content-Type": "application/octet-stream"}}
        refused = service.request("PUT", "/datasets/rows.jsonl", **upload)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unreadable"), "as an upload is answered"
        service.settings.uploads.unlink()
        assert service.get("/health/ready").status_code == 200
        service.settings.runs.rmdir()
        assert service.get("/health/ready").json()["error"]["param"] == "runs"
        redis.stop()
        answer = service.get("/health/ready")
        assert (answer.status_code, answer.json()["error"]["param"]) == (503, "redis")
        assert "Retry-After" in answer.headers
        assert service.get("/health/live").status_code == 200


def test_with_a_key_only_health_is_open(redis_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    key = "s3cret-key-0123456789"
    with running(redis_url, tmp_path, api_key=key) as service:
        for path in ("/jobs", "/workers", "/openapi.json", "/nowhere", "/health/other"):
            for header in (
                {},
                {"Authorization": "Bearer wrong"},
                {"Authorization": key},
                {"Authorization": "Bearer é"},
            ):
                encoded = {name: value.encode("latin-1") for name, value in header.items()}
                answer = requests.get(service.url + path, headers=encoded, timeout=60)
                assert answer.status_code == 401, (path, header)
                assert answer.headers["WWW-Authenticate"] == "Bearer"
                assert answer.json()["error"]["code"] == "invalid_api_key"
                assert key not in answer.text
        assert requests.get(service.url + "/health/live", timeout=60).status_code == 200
        assert requests.get(service.url + "/health/ready", timeout=60).status_code == 200
        assert service.get("/jobs").status_code == 200
        assert key not in repr(service.settings)
    assert "GET /jobs 200" in caplog.text
    assert key not in caplog.text


def test_without_a_key_all_web_pages_but_our_own_are_kept_out(redis_url: str, tmp_path: Path) -> None:
    with running(redis_url, tmp_path) as service:
        port = service.settings.port
        origins = ["https://evil.example", "null", "http://localhost:3000", "http://127.0.0.1"]
        # The last two are not the address that is asked, 127.0.0.1, though they lead here.
        origins += [f"https://127.0.0.1:{port}", f"http://localhost:{port}"]
        foreign = [({"Origin": origin}, origin) for origin in origins]
        foreign += [({"Host": host}, host) for host in ("evil.example", "[")]
        foreign += [({"Sec-Fetch-Site": site}, "another address") for site in ("cross-site", "same-site")]
        for headers, named in foreign:
            for method in ("GET", "POST"):
                answer = requests.request(method, service.url + "/jobs", json=TINY, headers=headers, timeout=60)
                error = answer.json()["error"]
                assert (answer.status_code, error["code"]) == (403, "foreign_origin"), headers
                assert named in error["message"], error
        assert list(service.settings.runs.iterdir()) == []
        here = f"localhost:{service.settings.port}"
        for own in ({"Origin": f"http://{here}"}, {"Sec-Fetch-Site": "same-origin"}, {"Sec-Fetch-Site": "none"}):
            answer = requests.post(service.url + "/jobs", json=TINY, headers={"Host": here, **own}, timeout=60)
            assert answer.status_code == 202, own


@pytest.mark.parametrize(
    ("method", "path", "status", "param"),
    [
        ("GET", "/nowhere", 404, None),
        ("DELETE", "/jobs", 405, None),
        ("GET", "/jobs?limit=0", 422, "limit"),
        ("GET", "/jobs?limit=many", 422, "limit"),
        ("GET", "/jobs?status=asleep", 422, "status"),
        ("POST", "/jobs?dry_run=perhaps", 422, "dry_run"),
        ("GET", "/jobs/job-unknown", 404, None),
        ("GET", "/jobs/job-unknown/events?after=-1", 422, "after"),
        ("GET", "/jobs/job-unknown/logs?tail=99999999", 422, "tail"),
    ],
)
def test_every_error_has_the_one_shape(
    service: Service, method: str, path: str, status: int, param: str | None
) -> None:
    answer = service.request(method, path, data=b"{}" if method == "POST" else None)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert {"type", "code", "message", "param"} <= set(error)
    assert error["param"] == param
    assert error["message"]


def test_a_fault_of_ours_has_the_one_shape_and_tells_no_details(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("internal detail")

    monkeypatch.setattr("service.jobs.actions.Actions.find", broken)
    answer = service.get("/jobs/job-1")
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert "internal detail" not in answer.text


def test_settings_name_the_variable() -> None:
    assert read_settings({"LONGHAUL_API_KEY": "", "LONGHAUL_PORT": ""}) == ServiceSettings()
    with pytest.raises(ValueError, match="LONGHAUL_API_KEY"):
        read_settings({"LONGHAUL_HOST": "0.0.0.0"})
    with pytest.raises(ValueError, match="LONGHAUL_API_KEY"):
        read_settings({"LONGHAUL_HOST": "::"})
    for loopback in ("localhost", "127.0.0.1", "::1"):
        assert read_settings({"LONGHAUL_HOST": loopback}).host == loopback
    with pytest.raises(ValueError, match="LONGHAUL_PORT='http'"):
        read_settings({"LONGHAUL_PORT": "http"})
    with pytest.raises(ValueError, match=r"LONGHAUL_REDIS_URL=http://\*\*\*@redis") as caught:
        read_settings({"LONGHAUL_REDIS_URL": "http://me:hunter2@redis"})
    assert "hunter2" not in str(caught.value)
    settings = read_settings(
        {"LONGHAUL_HOST": "0.0.0.0", "LONGHAUL_API_KEY": "k3y", "LONGHAUL_REDIS_URL": "redis://u:hunter2@redis:6379/0"}
    )
    assert "hunter2" not in repr(settings)
    assert "k3y" not in repr(settings)


def test_importing_the_service_does_nothing_and_needs_no_ml() -> None:
    """In a fresh interpreter, without Redis: other tests may have imported anything here."""
    code = (
        "import sys, service.main; print([name for name in ('torch', 'transformers', 'wandb') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_it_refuses_to_listen_for_others_without_a_key() -> None:
    environment = {**os.environ, "LONGHAUL_HOST": "0.0.0.0", "LONGHAUL_API_KEY": ""}
    command = [sys.executable, "-m", "service"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert "set LONGHAUL_API_KEY" in done.stderr
    assert "Traceback" not in done.stderr
