"""The trainer's log: its tail, from a place on, and followed to the end of the job; whole lines, without secrets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from jobs.events import JobCancelled
from service.reading import stream
from service.reading.stream import TrainerLog
from tests.service.running import Service
from tests.support.samples import RUNNING

TOKEN = "hf_" + "a1B2c3D4" * 4


@pytest.fixture
def job(service: Service) -> str:
    return service.submit()


@pytest.fixture
def file(service: Service, job: str) -> Path:
    return service.run(job).trainer_log


def add(file: Path, text: str) -> None:
    with open(file, "a", newline="") as log:
        log.write(text)


def follow(service: Service, job: str, **params: str) -> requests.Response:
    url = f"{service.url}/jobs/{job}/logs"
    return requests.get(url, params={"follow": "true", **params}, stream=True, timeout=60)


def lines(answer: requests.Response) -> Iterator[str]:
    return answer.iter_lines(chunk_size=None, decode_unicode=True)


def test_the_tail_and_then_what_is_new(service: Service, job: str, file: Path) -> None:
    url = f"/jobs/{job}/logs"
    assert service.get(url).text == ""
    file.write_text("one\ntwo\nthree\n")
    answer = service.get(url, params={"tail": 2})
    assert answer.headers["Content-Type"].startswith("text/plain")
    assert (answer.text, answer.headers["X-Next-Offset"]) == ("two\nthree\n", "14")
    add(file, "four\n")
    assert service.get(url, params={"offset": 14}).text == "four\n"
    assert service.get(url, params={"tail": 0}).headers["X-Next-Offset"] == "19"
    assert service.get(url, params={"offset": 999}).headers["X-Next-Offset"] == "19"


def test_a_line_that_may_go_on_is_left_for_later(service: Service, job: str, file: Path) -> None:
    url = f"/jobs/{job}/logs"
    file.write_text(f"one\ntoken {TOKEN[:12]}")
    answer = service.get(url)
    assert (answer.text, answer.headers["X-Next-Offset"]) == ("one\n", "4")
    add(file, f"{TOKEN[12:]} and no newline at the end")
    assert service.get(url, params={"offset": 4}).text == ""
    service.append(job, JobCancelled())
    assert service.get(url, params={"offset": 4}).text == "token hf_*** and no newline at the end"


def test_the_log_of_a_damaged_job_can_be_read(service: Service, job: str, file: Path) -> None:
    file.write_text("one\na last word")
    service.run(job).events_file.write_text("no event\n")
    assert service.get(f"/jobs/{job}/logs").text == "one\na last word"


def test_from_inside_a_line_it_begins_at_the_next(service: Service, job: str, file: Path) -> None:
    """Otherwise the second half of a secret would be there to read."""
    file.write_text(f"token {TOKEN}\nstep 1\rstep 2\n")
    for offset in (1, 20, len(TOKEN) + 6):
        assert service.get(f"/jobs/{job}/logs", params={"offset": offset}).text == "step 1\rstep 2\n", offset
    after_return = len(TOKEN) + 7 + len("step 1\r")
    assert service.get(f"/jobs/{job}/logs", params={"offset": after_return}).text == "step 2\n"


def test_a_line_too_long_to_be_looked_at_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "trainer.log"
    file.write_text("before\n" + "x" * 60 + TOKEN + "x" * 60 + "\nafter\n")
    log = TrainerLog(file, 0)
    said = ""
    while log.offset < file.stat().st_size:
        said += log.read(50, ended=True)
    assert said == "before\n[a line of more than 50 bytes is left out]\nafter\n"


def test_a_followed_log_goes_on_until_the_job_has_ended(service: Service, job: str, file: Path) -> None:
    service.append(job, *RUNNING)
    with follow(service, job) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        assert "X-Next-Offset" not in answer.headers
        there = lines(answer)
        add(file, "one\ntwo\n")  # the file appears only now
        assert [next(there), next(there)] == ["one", "two"]
        add(file, f"Authorization: Bearer {TOKEN}")
        add(file, "\nthree\n")
        assert [next(there), next(there)] == ["Authorization: Bearer ***", "three"]
        add(file, "a last word")
        service.append(job, JobCancelled())
        assert list(there) == ["a last word"]


def test_of_a_job_that_has_ended_all_is_sent_at_once(service: Service, job: str, file: Path) -> None:
    service.append(job, JobCancelled())
    assert follow(service, job).text == ""
    text = "".join(f"line {number}: {'é' * 50}\n" for number in range(5000))  # several pieces
    file.write_text(text)
    assert follow(service, job, tail="10000").content.decode() == text
    assert follow(service, job, tail="2").text.splitlines()[0].startswith("line 4998")
    assert follow(service, job, offset=str(len(text.encode()) - 5)).text == ""


def test_a_log_that_is_cut_or_replaced_is_read_from_its_beginning(service: Service, job: str, file: Path) -> None:
    file.write_text("one\ntwo\n")
    with follow(service, job) as answer:
        there = lines(answer)
        assert [next(there), next(there)] == ["one", "two"]
        os.truncate(file, 0)
        add(file, "cut\n")
        assert next(there) == "cut"
        other = file.with_name("other")
        other.write_text("another file, and a longer one\n")
        os.replace(other, file)
        assert next(there) == "another file, and a longer one"
        file.unlink()
        service.append(job, JobCancelled())
        assert list(there) == []


def test_whoever_waits_holds_no_thread(service: Service, job: str, file: Path) -> None:
    """More followers than the pool has threads (40), and plain requests are answered all the same."""
    service.append(job, *RUNNING)
    answers = [follow(service, job) for _ in range(60)]
    streams = [service.session.get(f"{service.url}/jobs/{job}/events", headers={"Accept": "text/event-stream"},
                                   stream=True, timeout=60) for _ in range(10)]  # fmt: skip
    assert service.get(f"/jobs/{job}").status_code == 200
    add(file, "one\n")
    assert [next(lines(answer)) for answer in answers] == ["one"] * 60
    service.append(job, JobCancelled())
    for answer in (*answers, *streams):
        answer.close()


def test_a_reader_who_takes_nothing_costs_no_memory(
    service: Service, job: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it does not take is not read from the file either: 64 MiB of log, of which a few pieces are on their way."""
    pieces = []
    read = TrainerLog.read

    def counted(log: TrainerLog, most: int, *, ended: bool) -> str:
        pieces.append(log.offset)
        return read(log, most, ended=ended)

    monkeypatch.setattr(TrainerLog, "read", counted)
    other = service.submit()
    file.write_bytes((b"x" * 127 + b"\n") * 2**19)
    with follow(service, job, offset="0") as slow:
        assert slow.raw.read(1) == b"x"
        service.run(other).trainer_log.write_text("quick\n")
        with follow(service, other) as quick:
            assert next(lines(quick)) == "quick"
        most = 64 * 2**20 // stream.PIECE_BYTES
        assert 0 < len(pieces) < most / 4, "what the kernel's buffers hold, and no more"
