"""What a stranger, or somebody with a key, can send: it is refused in the one shape, and the service continues.

Keys and limits are in tests/service/test_keys.py and test_limits.py, files in test_files.py, tickets in
tests/worker/test_ticket.py, Redis in tests/test_redis_rules.py, secrets in test_secrets_stay_in.py beside this file.
"""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
import requests

from jobs.process.logs import JsonLines, TextLines
from service.edge import body, connections
from tests.service.running import TINY, Service, running

KEY = "k" * 40
SHORT_S = 2.0
"""Of a deadline that passes, and within which a busy machine still sends a head."""
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
SPELLINGS = (
    "..", "%2e%2e", ".%2e", "..%2f", "..%2f..%2fsecret.txt", "%2e%2e%2fsecret.txt", "..%5csecret.txt",
    "..%252fsecret.txt",
    "%2fetc%2fpasswd", "%2e%2e%2f%2e%2e%2f%2e%2e%2fetc%2fpasswd", "....%2f%2fsecret.txt",
    "%c0%ae%c0%ae%c0%afsecret.txt",
    "%00", "secret.txt%00.jsonl", "job-1%00", ".", "~", "-", "%20", "%0d%0aX-Injected:%20yes", "%0aERROR%20forged",
    "%1b%5b2J", "a" * 3000, "%ff%fe", "%f0%9f%8d%95", "tmp-x", ".locks", "*", "con", "..;", "%2e%2e;%2fsecret.txt",
)  # fmt: skip


@pytest.fixture
def service(redis_url: str, tmp_path: Path) -> Iterator[Service]:
    """A service with a key."""
    with running(redis_url, tmp_path, api_key=KEY) as each:
        yield each


def talk(service: Service, *pieces: bytes) -> bytes:
    """All that the service answers on a connection of its own, to its end. What is sent need not be HTTP."""
    with socket.create_connection(("127.0.0.1", service.settings.port), timeout=300) as connection:
        try:
            for piece in pieces:
                connection.sendall(piece)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has heard enough; what it said is still to be read
        answer = b""
        try:
            while block := connection.recv(65536):
                answer += block
        except ConnectionResetError:
            pass
        return answer


def head(method: str, path: str, *more: str) -> bytes:
    """The head of a request with the key."""
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {KEY}", *more, "", ""]).encode()


def code(answer: bytes) -> str:
    """Of the error in a raw answer."""
    return str(json.loads(answer.rpartition(b"\r\n\r\n")[2])["error"]["code"])


# -- bodies ----------------------------------------------------------------------------------------------------------


def test_a_body_that_announces_too_much_is_refused_before_it_comes(service: Service) -> None:
    for announced in (body.MAX_BYTES + 1, 10**12, 10**19):
        answer = talk(service, head("POST", "/jobs", f"Content-Length: {announced}", "Connection: close"))
        assert answer.startswith(b"HTTP/1.1 413 ") and code(answer) == "body_too_large"
    # Without a key nobody even looks at it.
    assert talk(
        service, b"POST /jobs HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\nConnection: close\r\n\r\n"
    ).startswith(b"HTTP/1.1 401 ")


def test_a_body_in_pieces_is_read_no_further_than_to_the_limit(service: Service) -> None:
    piece = b"10000\r\n" + b" " * 65536 + b"\r\n"
    start = head("POST", "/jobs", "Transfer-Encoding: chunked", "Connection: close")
    answer = talk(service, start, *[piece] * 17)  # one more than may be; the end is never sent
    assert answer.startswith(b"HTTP/1.1 413 ") and code(answer) == "body_too_large"


BROKEN = (
    b"{", b"[1,]", b"NaN", b'{"a": 1e999}', b'{"a": 1, "a": 2}', b"\xff\xfe", b'"\\ud800"', b"[" * 500_000,
    b'{"a":' * 100_000, b"1" * 5000, b'{"data": {"train": "x"}} x', b"null", b"[]", b'"x"', b"\0",
)  # fmt: skip


@pytest.mark.parametrize("path", ["/jobs", "/jobs/{job}/clone"])
def test_broken_and_deep_json_is_422(service: Service, path: str) -> None:
    job = service.submit()
    for sent in BROKEN:
        answer = service.post(path.format(job=job), data=sent, headers={"Content-Type": "application/json"})
        assert answer.status_code == 422, (sent[:40], answer.text)
        assert set(answer.json()["error"]) >= {"type", "code", "message", "param"}


def test_a_body_that_stops_coming_is_408_and_the_connection_ends(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body, "SILENCE_S", 0.1)
    for start in ("Content-Length: 100", "Transfer-Encoding: chunked"):
        answer = talk(service, head("POST", "/jobs", start), b"2\r\n{}\r\n")
        assert answer.startswith(b"HTTP/1.1 408 ") and code(answer) == "body_too_slow"
    # A trickle is no silence, but it has an end, too.
    monkeypatch.setattr(body, "SILENCE_S", 30.0)
    monkeypatch.setattr(body, "JSON_WITHIN_S", 0.1)
    answer = talk(service, head("POST", "/jobs", "Content-Length: 100"), b"{")
    assert answer.startswith(b"HTTP/1.1 408 ") and code(answer) == "body_too_slow"


# -- heads and connections -------------------------------------------------------------------------------------------


FLOODS = {
    "many": [b"X-Many: " + b"a" * 1000 + b"\r\n"] * 200,
    "long": [b"X-One: " + b"a" * 1_000_000],
    "short": [b"X-%d: y\r\n" % number for number in range(20_000)],
}
NO_HTTP = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"\0" * 100, b"GET\r\n\r\n", b"GET /jobs HTTP/1.1\r\n\r\n",
    b"POST /jobs HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    b"POST /jobs HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
    b"POST /jobs HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
    b"GET /jobs HTTP/1.1\r\nHost: x\r\nX: a\nb\r\n\r\n", b"GET /jobs\x01 HTTP/1.1\r\nHost: x\r\n\r\n",
)  # fmt: skip


def test_a_flood_of_headers_is_400_and_the_connection_ends(service: Service) -> None:
    for name, flood in FLOODS.items():
        answer = talk(service, b"GET /jobs HTTP/1.1\r\nHost: x\r\n", *flood)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 400 "), name
    assert service.get("/health/live").status_code == 200


def test_what_is_no_http_is_refused(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_WITHIN_S", 0.2)  # for what may still become a request
    for words in NO_HTTP:
        answer = talk(service, words)
        assert answer == b"" or answer[9:12] in (b"400", b"401"), (words, answer)
    assert service.get("/health/live").status_code == 200


@pytest.mark.parametrize("said", [b"", b"GET /jo", b"GET /jobs HTTP/1.1\r\nHost: x\r\nX-Slow: "])
def test_who_connects_and_does_not_ask_is_sent_away(
    service: Service, said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_WITHIN_S", 0.1)
    assert talk(service, said) == b""  # returns, for the service ends the connection


def test_the_second_request_of_a_connection_has_to_come_in_time_too(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_WITHIN_S", SHORT_S)
    with socket.create_connection(("127.0.0.1", service.settings.port), timeout=300) as connection:
        connection.sendall(head("GET", "/health/live"))
        answer = b""
        while not answer.endswith(b'{"status":"ok"}'):
            block = connection.recv(65536)
            assert block, "the first head came too late"
            answer += block
        connection.sendall(b"GET /heal")
        assert connection.recv(65536) == b""


def test_a_long_answer_is_not_cut_by_the_deadline_of_heads(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_WITHIN_S", SHORT_S)
    service.settings.runs.mkdir(exist_ok=True)
    job = service.submit()
    with service.get(f"/jobs/{job}/events", headers={"Accept": "text/event-stream"}, stream=True) as answer:
        lines = answer.iter_lines()
        assert next(lines) == b": following"
        ids = (line for line in lines if line.startswith(b"id:"))
        assert next(ids) == b"id: 1"
        assert talk(service, b"") == b""  # the deadline of a connection that is younger
        assert service.post(f"/jobs/{job}/cancel").status_code == 200
        assert next(ids) == b"id: 2"


# -- names -----------------------------------------------------------------------------------------------------------


def test_no_spelling_of_a_path_leads_out(service: Service, tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("the secret")
    (tmp_path / "uploads").mkdir(exist_ok=True)
    job = service.submit()
    before = sorted(path for path in tmp_path.rglob("*") if ".ready" not in path.name)
    paths: dict[str, dict[str, object]] = service.get("/openapi.json").json()["paths"]
    asked = 0
    for template, methods in paths.items():
        if "{" not in template:
            continue
        for spelling in SPELLINGS:
            forms = {template.replace("{job}", spelling).replace("{path}", "spec.json").replace("{name}", spelling)}
            if "{path}" in template:
                forms |= {template.replace("{job}", job).replace("{path}", spelling)}
                forms |= {template.replace("{job}", job).replace("{path}", f"model/{spelling}/../../../secret.txt")}
            for form in forms:
                for method in methods:
                    more = b"{}" if method in ("post", "patch", "put") else b""
                    length = f"Content-Length: {len(more)}"
                    answer = talk(service, head(method.upper(), form, length, "Connection: close") + more)
                    status = int(answer[9:12])
                    assert 400 <= status < 500, f"{method} {form}: {answer[:500]!r}"
                    assert b"the secret" not in answer and b"root:" not in answer
                    assert b"X-Injected" not in answer.partition(b"\r\n\r\n")[0]
                    asked += 1
    assert asked > 500
    assert sorted(path for path in tmp_path.rglob("*") if ".ready" not in path.name) == before


@pytest.mark.parametrize(
    "name", ["a\nERROR forged", "\x1b[2J\x1b[31mred", "<script>alert(1)</script>", "../../x", "½ 🍕"]
)
def test_hostile_names_are_refused_or_are_words_like_others(
    service: Service, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        sent = TINY | {"name": name, "metadata": {name[:64]: name}}
        answer = service.post("/jobs", json=sent, headers={"X-Request-Id": "x y"})
        assert answer.status_code in (202, 422)
        if answer.status_code == 202:
            job = service.get(f"/jobs/{answer.json()['id']}").json()
            assert job["name"] == name and job["metadata"] == {name[:64]: name}
            assert sorted(path.name for path in service.settings.runs.iterdir() if path.name[0] != ".") == [job["id"]]
        service.get("/jobs/" + quote(name))
        service.post(f"/jobs?{quote(name)}", json={name: name})
    for record in caplog.records:
        for form in (TextLines(), JsonLines()):
            line = form.format(record)
            assert line.isprintable(), line


# -- browsers --------------------------------------------------------------------------------------------------------


def test_every_answer_has_the_headers_whatever_it_is(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    job = service.submit()

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("internal detail")

    answers = [
        service.get(path) for path in ("/jobs", f"/jobs/{job}", "/metrics", "/health/live", "/health/ready", "/nothing")
    ]
    answers += [service.post("/jobs", data=b"{"), service.request("PUT", "/jobs"), requests.get(f"{service.url}/jobs")]
    answers += [service.get(f"/jobs/{job}/files/spec.json"), service.request("OPTIONS", "/jobs")]
    monkeypatch.setattr("service.jobs.actions.Actions.find", broken)
    answers += [service.get(f"/jobs/{job}")]
    assert {each.status_code for each in answers} == {200, 401, 404, 405, 422, 500}
    for answer in answers:
        assert {name: answer.headers.get(name) for name in HEADERS} == HEADERS
        assert "Server" not in answer.headers and answer.headers["X-Request-Id"]


def test_there_is_nothing_to_see_without_a_key(service: Service) -> None:
    paths = service.get("/openapi.json").json()["paths"]
    for path in [*paths, "/openapi.json", "/docs", "/redoc", "/", "/docs/oauth2-redirect"]:
        if not path.startswith("/health/"):
            for headers in ({}, {"Authorization": f"Bearer {KEY}x"}, {"Authorization": KEY}, {"Cookie": KEY}):
                answer = requests.get(service.url + path, headers=headers, timeout=60)
                assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
    for path in ("/docs", "/redoc", "/docs/oauth2-redirect"):
        assert service.get(path).status_code == 404
