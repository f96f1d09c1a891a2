"""What comes live, across outages: nothing missing, nothing twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.events import JobCancelled
from longhaul import Longhaul
from longhaul.main import main
from tests.service.running import running
from tests.support.redis_server import free_port
from tests.support.samples import checked


def test_events_go_on_after_a_restart_of_the_service(redis_url: str, tmp_path: Path) -> None:
    troubles: list[str] = []
    with running(redis_url, tmp_path) as first:
        job = first.submit()
        api = Longhaul(first.url)
        events = api.events(job, on_trouble=troubles.append)
        assert next(events)["number"] == 1
        port = first.settings.port
    assert troubles == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.service.running.free_port", lambda: port)
        with running(redis_url, tmp_path) as second, api:
            second.append(job, checked())
            second.append(job, JobCancelled())
            assert [event["number"] for event in events] == [2, 3]


def test_the_log_is_followed_across_a_restart_of_the_service(redis_url: str, tmp_path: Path) -> None:
    """Every line once, also behind one that is shown shorter than it is, for there was a secret in it."""
    with running(redis_url, tmp_path) as first:
        job = first.submit()
        log = first.run(job).trainer_log
        log.write_text("zero\none ½\n")
        api = Longhaul(first.url)
        text = api.follow_logs(job, tail=1)
        got = next(text)
        assert got == "one ½\n"
        with open(log, "a") as file:
            file.write(f"HF_TOKEN=hf_{'x' * 34}\nthree ½\n")
        while "three" not in got:
            got += next(text)
        port = first.settings.port
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.service.running.free_port", lambda: port)
        with running(redis_url, tmp_path) as second, api:
            with open(log, "a") as file:
                file.write("four\nfive, without an end")
            second.append(job, JobCancelled())
            got += "".join(text)
    assert "xxxx" not in got
    assert [line for line in got.splitlines() if "***" not in line] == [
        "one ½",
        "three ½",
        "four",
        "five, without an end",
    ]
    assert len(got.splitlines()) == 5


@pytest.mark.parametrize("command", [["events", "-f"], ["logs", "-f"], ["watch"], ["watch", "--json"]])
def test_a_service_that_never_answered_is_not_waited_for(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("LONGHAUL_URL", url)
    monkeypatch.setattr("longhaul.connection.PAUSE_S", 0.01)
    assert main([*command, "job-1"]) == 3
    error = capsys.readouterr().err
    assert f"no answer from {url}" in error and f"`longhaul local --port {url.rpartition(':')[2]}`" in error
