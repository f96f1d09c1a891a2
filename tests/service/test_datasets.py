"""Uploading data sets: whole or not at all, bounded and compared; listed, reported on, deleted when unused."""

from __future__ import annotations

import base64
import gzip
import hashlib
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from jobs import answers
from jobs.data_names import DATA_SUFFIXES
from service.files import uploads
from tests.service.raw import begin, exchange, finish
from tests.service.running import Service, running
from tests.sinks.driving import until
from tests.support.processes import highest_memory
from tests.support.samples import dataset_report
from tests.support.stack import Stack

ROWS = b'{"input": "a", "target": "b"}\n' * 1000


def digest(content: bytes) -> dict[str, str]:
    return {"Content-Digest": f"sha-256=:{base64.b64encode(hashlib.sha256(content).digest()).decode()}:"}


def stored(service: Service, name: str = "rows.jsonl") -> bytes:
    return (service.settings.uploads / name / name).read_bytes()


def folders(service: Service) -> list[str]:
    """What lies in the uploads folder: data sets, and what is on its way."""
    return sorted(os.listdir(service.settings.uploads)) if service.settings.uploads.exists() else []


# -- taking in --------------------------------------------------------------------------------------------------------


def test_an_upload_is_a_data_set_with_its_checksum(service: Service) -> None:
    before = int(time.time())
    answer = service.request("PUT", "/datasets/rows.jsonl", data=ROWS, headers=digest(ROWS))
    assert answer.status_code == 201
    assert answer.headers["Location"] == "/datasets/rows.jsonl"
    dataset = TypeAdapter(answers.Dataset).validate_python(answer.json())
    assert (dataset["name"], dataset["uri"], dataset["format"]) == ("rows.jsonl", "dataset:rows.jsonl", "jsonl")
    assert (dataset["bytes"], dataset["sha256"]) == (len(ROWS), hashlib.sha256(ROWS).hexdigest())
    assert before <= dataset["created_at"] <= time.time()
    assert stored(service) == ROWS
    assert folders(service) == ["rows.jsonl"]


def test_the_same_again_does_no_harm_and_other_content_needs_another_name(service: Service) -> None:
    first = service.request("PUT", "/datasets/rows.jsonl", data=ROWS)
    again = service.request("PUT", "/datasets/rows.jsonl", data=ROWS)
    assert (first.status_code, again.status_code) == (201, 200)
    assert again.json() == first.json()
    for other in (ROWS[::-1], ROWS + b"{}\n"):  # of the same size, and of another
        answer = service.request("PUT", "/datasets/rows.jsonl", data=other)
        assert answer.status_code == 409
        error = answer.json()["error"]
        assert error["code"] == "dataset_exists"
        assert hashlib.sha256(ROWS).hexdigest() in error["message"]
        assert "DELETE /datasets/rows.jsonl" in error["message"]
    assert stored(service) == ROWS
    assert folders(service) == ["rows.jsonl"]


def test_a_body_of_unknown_length_is_taken_in_as_well(service: Service) -> None:
    def pieces() -> Iterator[bytes]:
        for start in range(0, len(ROWS), 777):
            yield ROWS[start : start + 777]

    assert service.request("PUT", "/datasets/rows.jsonl", data=pieces(), headers=digest(ROWS)).status_code == 201
    assert stored(service) == ROWS


def test_a_checksum_that_does_not_fit_is_refused(service: Service) -> None:
    for given, code in (
        (digest(ROWS + b"x")["Content-Digest"], "checksum_mismatch"),
        ("sha-256=:AAAA:", "invalid_value"),
        ("sha-512=:" + "A" * 86 + "==:", "invalid_value"),
        ("md5", "invalid_value"),
    ):
        answer = service.request("PUT", "/datasets/rows.jsonl", data=ROWS, headers={"Content-Digest": given})
        assert (answer.status_code, answer.json()["error"]["code"]) == (422, code)
        assert answer.json()["error"]["param"] == "Content-Digest"
    assert folders(service) == []


def test_a_checksum_is_found_among_others(service: Service) -> None:
    given = f"sha-512=:{'A' * 86}==:, {digest(ROWS)['Content-Digest']}, id-crc=:AA==:"
    assert service.request("PUT", "/datasets/r.jsonl", data=ROWS, headers={"Content-Digest": given}).status_code == 201


NO_NAMES = [
    "rows.txt", "rows", "jsonl", ".jsonl", ".rows.jsonl", "-rf.jsonl", "_.jsonl", "about.json", "a%20b.jsonl", "%2e%2e",
    "..", "%2e%2e.jsonl", "a%00.jsonl", "a%0a.jsonl", "a%5cb.jsonl", "%c3%bc.jsonl", "%ff.jsonl", "a:b.jsonl",
    "dataset:a.jsonl", "a*.jsonl", "a'.jsonl", "$(x).jsonl", "a%7f.jsonl", "a" * 123 + ".jsonl", "x" * 5000 + ".jsonl",
]  # fmt: skip


def test_names_that_are_none_are_refused_with_the_endings(service: Service) -> None:
    for name in NO_NAMES:
        status, _, body = exchange(service, "PUT", f"/datasets/{name}", ROWS)
        error = json.loads(body)["error"]
        assert (status, error["param"]) == (422, "name"), name
        assert all(suffix in error["message"] for suffix in DATA_SUFFIXES)
        for method in ("GET", "DELETE"):
            assert exchange(service, method, f"/datasets/{name}")[0] == 404, name
    assert folders(service) == []


def test_a_name_is_one_segment(service: Service) -> None:
    for path in ("..%2fdata%2fx.jsonl", "a%2fb.jsonl", "../x.jsonl", "a/b.jsonl", "%2fetc%2fx.jsonl", ""):
        assert exchange(service, "PUT", f"/datasets/{path}", ROWS)[0] in (404, 405)
    assert folders(service) == []
    assert not (service.settings.data / "x.jsonl").exists()


def test_names_that_are_good(service: Service) -> None:
    for name in ("a.jsonl", "A.JSONL.GZ", "0.parquet", "tmp-a.csv", "a..b.tsv.zst", "a" * 122 + ".jsonl"):
        assert service.request("PUT", f"/datasets/{name}", data=ROWS).status_code == 201
        assert service.get(f"/datasets/{name}").json()["name"] == name


def test_nothing_is_no_data_set_and_a_part_neither(service: Service) -> None:
    empty = service.request("PUT", "/datasets/rows.jsonl", data=b"")
    assert (empty.status_code, empty.json()["error"]["param"]) == (422, "body")
    part = service.request("PUT", "/datasets/rows.jsonl", data=ROWS, headers={"Content-Range": "bytes 5-9/*"})
    assert (part.status_code, part.json()["error"]["param"]) == (422, "Content-Range")
    assert folders(service) == []


def test_what_is_too_large_is_refused_before_it_comes_or_as_soon_as_it_is(redis_url: str, tmp_path: Path) -> None:
    with running(redis_url, tmp_path, max_upload_bytes=100_000) as service:
        head = "PUT /datasets/rows.jsonl HTTP/1.1\nHost: localhost\nContent-Length: 100001\nExpect: 100-continue"
        with begin(service, head) as connection:  # not even asked for the body
            assert connection.recv(12) == b"HTTP/1.1 413"
        chunk = b"10000\r\n" + bytes(0x10000) + b"\r\n"
        head = "PUT /datasets/rows.jsonl HTTP/1.1\nHost: localhost\nTransfer-Encoding: chunked"
        with begin(service, head, chunk) as connection:
            connection.sendall(chunk)  # it has not ended, and will never
            assert connection.recv(12) == b"HTTP/1.1 413"
        answer = service.request("PUT", "/datasets/rows.jsonl", data=bytes(100_001))
        assert answer.json()["error"]["code"] == "body_too_large"
        assert "100,000 bytes" in answer.json()["error"]["message"]
        assert service.request("PUT", "/datasets/rows.jsonl", data=bytes(100_000)).status_code == 201
        assert folders(service) == ["rows.jsonl"]


def test_a_disk_without_room_is_said_before_a_byte_is_sent(redis_url: str, tmp_path: Path) -> None:
    with running(redis_url, tmp_path, max_upload_bytes=2**62) as service:
        head = f"PUT /datasets/rows.jsonl HTTP/1.1\nHost: localhost\nContent-Length: {2**60}\nExpect: 100-continue"
        with begin(service, head) as connection:
            status, answer = finish(connection)
        assert (status, b"disk_full" in answer) == (503, True)
        assert folders(service) == []


def test_a_disk_that_fills_up_meanwhile_keeps_its_reserve(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    def pieces() -> Iterator[bytes]:
        yield bytes(3_000_000)
        until(lambda: any(file.stat().st_size >= 2 << 20 for file in service.settings.uploads.glob("*/*")))
        monkeypatch.setattr(uploads, "RESERVE", shutil.disk_usage(service.settings.uploads).total)
        yield bytes(3_000_000)

    answer = service.request("PUT", "/datasets/rows.jsonl", data=pieces())
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "disk_full")
    assert folders(service) == []


def test_an_upload_that_waits_to_be_asked_is_asked(service: Service) -> None:
    head = f"PUT /datasets/rows.jsonl HTTP/1.1\nHost: localhost\nContent-Length: {len(ROWS)}\nExpect: 100-continue"
    with begin(service, head) as connection:
        assert connection.recv(12) == b"HTTP/1.1 100"
        assert b"\r\n\r\n" in connection.recv(65_536)
        connection.sendall(ROWS)
        assert finish(connection)[0] == 201


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
def test_one_line_of_curl_is_the_whole_upload(service: Service, tmp_path: Path) -> None:
    file = tmp_path / "recipes.jsonl"
    file.write_bytes(ROWS * 100)  # long enough for curl to ask first
    for status in ("201", "200"):
        command = ["curl", "-sS", "-w", "%{http_code}", "-o", os.devnull, "-T", str(file), f"{service.url}/datasets/"]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == status
    assert stored(service, "recipes.jsonl") == ROWS * 100


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_nothing_is_left_of_a_broken_upload(service: Service) -> None:
    head = "PUT /datasets/rows.jsonl HTTP/1.1\nHost: localhost\nContent-Length: 9000000"
    with begin(service, head, bytes(3_000_000)):
        until(lambda: any(file.stat().st_size >= 2 << 20 for file in service.settings.uploads.glob("*/*")))
    until(lambda: folders(service) == [])
    assert service.get("/datasets/rows.jsonl").status_code == 404
    assert service.request("PUT", "/datasets/rows.jsonl", data=ROWS).status_code == 201


def test_a_service_that_is_stopped_leaves_nothing_of_an_upload(tmp_path: Path) -> None:
    with Stack(tmp_path / "stack", data=tmp_path) as stack:
        stack.start("service")
        uploads = stack.home / "uploads"
        with RawUpload(stack.port, "/datasets/rows.jsonl", 9_000_000) as sent:
            sent.connection.sendall(bytes(3_000_000))
            until(lambda: any(file.stat().st_size >= 2 << 20 for file in uploads.glob("*/*")))
            assert stack.stop("service") in (0, -signal.SIGTERM)
        assert os.listdir(uploads) == []


@pytest.mark.parametrize("same", [True, False])
def test_of_two_uploads_under_one_name_one_wins(service: Service, same: bool) -> None:
    contents = [ROWS * 500, ROWS * 500 if same else ROWS[::-1] * 500]
    together = threading.Barrier(2)
    statuses: dict[int, int] = {}

    def send(number: int) -> None:
        def pieces() -> Iterator[bytes]:
            yield contents[number][:1000]
            together.wait(20)  # both have begun
            yield contents[number][1000:]

        statuses[number] = service.request("PUT", "/datasets/rows.jsonl", data=pieces()).status_code

    threads = [threading.Thread(target=send, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(statuses.values()) == ([200, 201] if same else [201, 409])
    [winner] = [number for number, status in statuses.items() if status == 201]
    assert stored(service) == contents[winner]
    assert folders(service) == ["rows.jsonl"]


def test_leftovers_are_swept_at_the_start(redis_url: str, tmp_path: Path) -> None:
    uploads = tmp_path / "uploads"
    for name, days in (("tmp-" + "0" * 32, 2), ("tmp-" + "1" * 32, 0), ("tmp-rows.jsonl", 2)):
        (uploads / name).mkdir(parents=True)
        (uploads / name / "rows.jsonl").write_bytes(ROWS)
        for path in (uploads / name / "rows.jsonl", uploads / name):
            os.utime(path, (time.time() - days * 86_400 - 60,) * 2)
    with running(redis_url, tmp_path) as service:
        assert folders(service) == ["tmp-" + "1" * 32, "tmp-rows.jsonl"]
        assert service.get("/datasets").json()["data"] == []


def test_what_somebody_else_put_there_is_no_data_set_and_is_left_alone(service: Service) -> None:
    foreign = service.settings.uploads / "rows.jsonl"
    foreign.mkdir(parents=True)
    (foreign / "mine").write_bytes(b"mine")
    (service.settings.uploads / "file.jsonl").write_bytes(b"mine")
    for name in ("rows.jsonl", "file.jsonl"):
        answer = service.request("PUT", f"/datasets/{name}", data=ROWS)
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "dataset_exists")
        assert service.get(f"/datasets/{name}").status_code == 404
    assert folders(service) == ["file.jsonl", "rows.jsonl"]


def test_memory_stays_flat_while_a_large_file_comes(tmp_path: Path) -> None:
    size = 1 << 28
    big = tmp_path / "big.jsonl"
    with open(big, "wb") as file:
        file.truncate(size)
    with Stack(tmp_path / "stack", data=tmp_path) as stack:
        stack.start("service")
        before = highest_memory(stack)
        with open(big, "rb") as file, RawUpload(stack.port, "/datasets/big.jsonl", size) as sent:
            sent.connection.sendfile(file)
            assert sent.status() == 201
        assert (stack.home / "uploads" / "big.jsonl" / "big.jsonl").stat().st_size == size
        assert highest_memory(stack) - before < 48 << 20


class RawUpload:
    """An upload whose body the test sends itself."""

    def __init__(self, port: int, path: str, size: int) -> None:
        self.connection = socket.create_connection(("127.0.0.1", port), timeout=120)
        self.connection.sendall(f"PUT {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n\r\n".encode())

    def status(self) -> int:
        return int(self.connection.recv(65_536).split()[1])

    def __enter__(self) -> RawUpload:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()


# -- reading and deleting ----------------------------------------------------------------------------------------------


def test_data_sets_are_listed_by_name_in_pages(service: Service) -> None:
    assert service.get("/datasets").json() == {
        "object": "list", "data": [], "has_more": False, "first_id": None, "last_id": None,
    }  # fmt: skip
    names = [f"{letter}.jsonl" for letter in "dbaec"]
    for name in names:
        assert service.request("PUT", f"/datasets/{name}", data=ROWS).status_code == 201
    seen, after = [], ""
    while True:
        page = TypeAdapter(answers.DatasetList).validate_python(service.get(f"/datasets?limit=2&after={after}").json())
        seen += [dataset["name"] for dataset in page["data"]]
        if not page["has_more"]:
            break
        after = str(page["last_id"])
    assert seen == sorted(names)


def test_a_job_names_it_and_then_it_cannot_be_deleted(service: Service) -> None:
    for name in ("rows.jsonl", "other.jsonl"):
        service.request("PUT", f"/datasets/{name}", data=ROWS)
    jobs = [
        service.submit(data={"train": "dataset:rows.jsonl", "validation": "dataset:other.jsonl"}) for _ in range(12)
    ]
    service.submit(data={"train": "rows.jsonl"})  # of the data directory
    service.request("PUT", "/datasets/third.jsonl", data=ROWS)
    mixed = service.submit(data={"train": ["rows.jsonl", {"source": "dataset:third.jsonl", "weight": 2}]})
    assert service.get("/datasets/third.jsonl").json()["jobs"] == [mixed]
    assert service.get(f"/jobs/{mixed}").json()["training_file"] == "rows.jsonl, dataset:third.jsonl"
    for name in ("rows.jsonl", "other.jsonl"):
        dataset = TypeAdapter(answers.DatasetDetail).validate_python(service.get(f"/datasets/{name}").json())
        assert (dataset["jobs"], dataset["in_use"]) == (jobs[::-1][:10], True)
        assert (dataset["report"], dataset["report_job"]) == (None, None)
        refused = service.request("DELETE", f"/datasets/{name}")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "dataset_in_use")
        assert jobs[-1] in refused.json()["error"]["message"]
        assert "12 open jobs" in refused.json()["error"]["message"]
    for job in jobs:
        assert service.post(f"/jobs/{job}/cancel").status_code == 200
    assert service.get("/datasets/rows.jsonl").json()["in_use"] is False
    deleted = service.request("DELETE", "/datasets/rows.jsonl")
    assert deleted.json() == {"name": "rows.jsonl", "object": "dataset", "deleted": True}
    assert TypeAdapter(answers.DeletedDataset).validate_python(deleted.json())
    assert service.request("DELETE", "/datasets/rows.jsonl").status_code == 404
    assert service.get("/datasets/rows.jsonl").status_code == 404
    assert folders(service) == ["other.jsonl", "third.jsonl"]
    assert service.request("PUT", "/datasets/rows.jsonl", data=ROWS[::-1]).status_code == 201


def test_the_report_is_that_of_the_newest_job_that_read_it(service: Service) -> None:
    service.request("PUT", "/datasets/rows.jsonl", data=ROWS)
    old, newer, newest = (service.submit(data={"train": "dataset:rows.jsonl"}) for _ in range(3))
    for job, rows in ((old, 1), (newer, 2)):
        (service.run(job).path / "dataset.json").write_text(dataset_report(rows_read=rows).model_dump_json())
    dataset = service.get("/datasets/rows.jsonl").json()
    assert (dataset["report"], dataset["report_job"]) == (dataset_report(rows_read=2).model_dump(), newer)
    (service.run(newest).path / "dataset.json").write_text('{"rows_read": 3}')
    assert service.get("/datasets/rows.jsonl").json()["report_job"] == newer, "that one is of another version"
    (service.run(newest).path / "dataset.json").unlink()
    (service.run(newest).path / "dataset.json").symlink_to(service.run(old).path / "dataset.json")
    assert service.get("/datasets/rows.jsonl").json()["report_job"] == newer


def test_a_job_cannot_name_what_was_not_uploaded(service: Service) -> None:
    service.request("PUT", "/datasets/rows.jsonl", data=ROWS)
    names = ("gone.jsonl", "../../etc/x.jsonl", "..", "", "rows.jsonl/../rows.jsonl", "/etc/x.jsonl", "about.json")
    for param, name in itertools.product(("train", "validation"), names):
        data = {"train": "rows.jsonl", "format": "jsonl", param: f"dataset:{name}"}
        answer = service.post("/jobs", json={"data": data})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (422, f"data.{param}")
        assert "longhaul datasets add" in error["hint"] and "PUT /datasets" in error["hint"]
    for name, meant in (("row.jsonl", "dataset:rows.jsonl"), ("another.csv", None)):
        hint = service.post("/jobs", json={"data": {"train": f"dataset:{name}"}}).json()["error"]["hint"]
        assert re.findall(r"did you mean (\S+)\?", hint) == ([meant] if meant else [])


def test_without_redis_data_sets_can_be_uploaded_and_listed_and_none_is_deleted(tmp_path: Path) -> None:
    with running("redis://127.0.0.1:1/0", tmp_path) as service:
        assert service.request("PUT", "/datasets/rows.jsonl.gz", data=gzip.compress(ROWS)).status_code == 201
        assert len(service.get("/datasets").json()["data"]) == 1
        assert service.request("DELETE", "/datasets/rows.jsonl.gz").status_code == 503
        assert folders(service) == ["rows.jsonl.gz"]
