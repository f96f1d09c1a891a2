"""What our processes write: lines of JSON that can be read again, the job and request they are about, no secrets."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from contextvars import copy_context
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import requests

from jobs.process.logs import JOB, JsonLines, TextLines, about, last_error, log_format
from tests.service.running import running
from tests.support.redis_server import free_port

ROOT = Path(__file__).parents[2]
TOKEN = "hf_" + "a1B2c3D4" * 4


def record(message: str = "said %s", *args: object, **more: Any) -> logging.LogRecord:
    made = logging.LogRecord("longhaul.test", logging.WARNING, "file.py", 7, message, args or ("once",), None)
    for name, value in more.items():
        setattr(made, name, value)
    return made


def test_a_line_is_one_object() -> None:
    line = JsonLines().format(record("a\nb \u2028 %s \ud800", "é"))
    assert "\n" not in line and line.isascii()
    told = json.loads(line)
    assert told.keys() == {"time", "level", "logger", "message"}
    assert (told["level"], told["logger"], told["message"]) == ("warning", "longhaul.test", "a\nb \u2028 é \ud800")
    assert told["time"].endswith("Z")
    assert abs((datetime.now(UTC) - datetime.fromisoformat(told["time"])).total_seconds()) < 60


def test_a_line_for_people_commands_no_terminal() -> None:
    shown = TextLines().format(record("%s", "a\x1b]0;owned\x07\x9b2J\u202e\ud800\rb\tc"))
    assert shown.endswith("a]0;owned2J\ufffd\nb\tc")


def test_it_says_which_job_it_is_about() -> None:
    with about("job-1"):
        assert json.loads(JsonLines().format(record()))["job"] == "job-1"
        told: list[str | None] = []
        thread = threading.Thread(target=copy_context().run, args=(lambda: told.append(JOB.get()),))
        thread.start()
        thread.join()
        assert told == ["job-1"]
    assert "job" not in json.loads(JsonLines().format(record()))


def test_no_secret_is_written() -> None:
    try:
        raise ValueError(f"Bearer {TOKEN}")
    except ValueError:
        caught = sys.exc_info()
    made = record("key %s", TOKEN, exc_info=caught, fields={"path": f"/x/{TOKEN}", "status": 200})
    for form in (JsonLines(), TextLines()):
        text = form.format(made)
        assert TOKEN not in text and "***" in text
        made.exc_text = None
    told = json.loads(JsonLines().format(made))
    assert told["exception"].startswith("Traceback") and told["exception"].endswith("***")
    assert (told["path"], told["status"]) == ("/x/hf_***", 200)


def test_another_format_is_refused() -> None:
    assert [log_format(each) for each in ("text", "json")] == ["text", "json"]
    with pytest.raises(ValueError, match="LONGHAUL_LOG='yaml' is no format"):
        log_format("yaml")


@pytest.mark.parametrize("module", [["service"], ["worker", "publish"]])
def test_a_wrong_format_is_told_at_the_start(module: list[str]) -> None:
    environment = {**os.environ, "LONGHAUL_LOG": "yaml", "LONGHAUL_PORT": str(free_port())}
    command = [sys.executable, "-m", *module]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert "LONGHAUL_LOG='yaml'" in done.stderr


def test_what_goes_wrong_in_a_request_is_written_with_its_id(
    redis_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Messages of a pool thread carry the request's id and job, too."""

    class Listening(logging.Handler):
        told: list[dict[str, Any]] = []  # noqa: RUF012 - one handler, one list

        def emit(self, record: logging.LogRecord) -> None:
            self.told.append(json.loads(JsonLines().format(record)))

    handler = Listening()
    logging.getLogger("longhaul").addHandler(handler)
    try:
        with running(redis_url, tmp_path) as service:
            job = service.submit()
            service.run(job).metrics_file.write_text("no row\n")
            answer = service.get(f"/jobs/{job}/metrics", headers={"X-Request-Id": "abc"})
            assert answer.headers["X-Request-Id"] == "abc"
    finally:
        logging.getLogger("longhaul").removeHandler(handler)
    (warning,) = (line for line in handler.told if "no row of metrics" in line["message"])
    assert (warning["request_id"], warning["job"]) == ("abc", job)


def test_the_line_of_a_request_says_whose_key_it_came_with(
    redis_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    key = "a-key-of-some-length"
    with running(redis_url, tmp_path, api_key=key) as service:
        service.get("/jobs?metadata[a]=b")
        requests.get(f"{service.url}/workers", headers={"Authorization": "Bearer wrong"}, timeout=60)
    told = {
        line["path"]: line
        for record in caplog.records
        if hasattr(record, "fields") and (line := json.loads(JsonLines().format(record)))
    }
    assert {"method", "path", "status", "ms", "key", "time", "message"} <= told["/jobs"].keys()
    assert (told["/jobs"]["status"], told["/workers"]["status"]) == (200, 401)
    assert "key" not in told["/workers"], "nobody's"
    assert told["/jobs"]["message"].endswith(f" by {told['/jobs']['key']}")
    assert key not in caplog.text


AT = "2026-11-22 07:31:01,490"
TRACE = """Traceback (most recent call last):
  File "loop.py", line 3, in step
    loss.backward()
RuntimeError: CUDA error: an illegal memory access was encountered
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."""


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", ""),
        (f"{AT} INFO step 1200: validation loss 3.0384", ""),
        (f"{AT} INFO began\n{AT} ERROR the GPU is gone", "the GPU is gone"),
        (f"{AT} INFO began\n{TRACE}", "RuntimeError: CUDA error: an illegal memory access was encountered"),
        (f"{TRACE}\n{AT} INFO step 1200: validation loss 3.0384", ""),
        (f"{AT} WARNING slow\nFatal Python error: Segmentation fault\n\nThread 0x1:\n  File x",
         "Fatal Python error: Segmentation fault"),
        (f"{AT} ERROR first\n{TRACE}\n\nDuring handling of the above:\n\n{TRACE.replace('CUDA', 'other')}",
         "RuntimeError: other error: an illegal memory access was encountered"),
        (f"{AT} INFO step 3\nsome library says something", ""),
    ],
)  # fmt: skip
def test_only_an_error_that_a_log_ends_with_is_one(text: str, error: str) -> None:
    assert last_error(text) == error
