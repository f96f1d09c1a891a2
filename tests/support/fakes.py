"""Stand-ins for the services outside: real HTTP servers on loopback, to be used as context managers.

    with FakeDiscord() as discord:      discord.url        a webhook URL for DISCORD_WEBHOOK
                                        discord.messages   what a person would see in the channel, oldest first
    with FakeWandb() as wandb:          wandb.url          for WANDB_BASE_URL; with WANDB_KEY as WANDB_API_KEY
                                        wandb.runs[id]     .history is a list of rows, .exit_code, .summary, .config

Both keep `requests` (all that came in) and `wait_for(condition)`, which returns as soon as a request made it true.
"""

from __future__ import annotations

import base64
import contextlib
import email
import email.policy
import functools
import gzip
import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

from jobs.text.units import format_duration

DISCORD_SCHEMA = Path(__file__).parents[3] / "shared" / "specs" / "discord_webhook.schema.json"
WANDB_KEY = "f" * 40


@dataclass(frozen=True)
class SeenRequest:
    """One request that came in."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    status: int


@dataclass
class Reply:
    """What a fake answers."""

    status: int
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)


class FakeServer:
    """An HTTP server on a free loopback port. Subclasses answer in `respond`, which runs under `changed`."""

    def __init__(self) -> None:
        self.requests: list[SeenRequest] = []
        self.changed = threading.Condition()
        self._released = threading.Event()
        self._hang = False
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 30
            wbufsize = -1  # head and body in one packet: two would wait 40 ms for each other

            def _any(self) -> None:
                fake._serve(self)

            do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = _any

            def log_message(self, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # clients that give up are part of what is tested

        self._server = Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    @property
    def origin(self) -> str:
        """Scheme, host and port."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def wait_for(self, condition: Callable[[], Any], timeout_s: float = 300.0) -> Any:
        """The first true value of `condition`, looked at after each request; AssertionError after `timeout_s`."""
        with self.changed:
            value = self.changed.wait_for(condition, timeout_s)
        requests = [(seen.method, seen.path, seen.status) for seen in self.requests]
        assert value, f"not so after {format_duration(timeout_s)}; requests: {requests}"
        return value

    def hang(self) -> None:
        """From now on take requests and do not answer, until `release`."""
        self._hang = True
        self._released.clear()

    def release(self) -> None:
        """Answer again; whoever still waits is hung up on."""
        self._hang = False
        self._released.set()

    def respond(
        self, method: str, path: str, query: dict[str, list[str]], headers: dict[str, str], body: bytes
    ) -> Reply:
        raise NotImplementedError

    def _serve(self, handler: BaseHTTPRequestHandler) -> None:
        body = _body_of(handler)
        headers = {key.lower(): value for key, value in handler.headers.items()}
        if self._hang:
            with self.changed:
                self.requests.append(SeenRequest(handler.command, handler.path, headers, body, 0))
                self.changed.notify_all()
            self._released.wait(60)
            handler.close_connection = True
            return
        parts = urlsplit(handler.path)
        with self.changed:
            reply = self.respond(handler.command, parts.path, parse_qs(parts.query), headers, body)
            self.requests.append(SeenRequest(handler.command, handler.path, headers, body, reply.status))
            self.changed.notify_all()
        raw = b"" if reply.body is None else json.dumps(reply.body).encode()
        with contextlib.suppress(ConnectionError):
            handler.send_response(reply.status)
            for key, value in {
                "Content-Type": "application/json",
                **reply.headers,
                "Content-Length": str(len(raw)),
            }.items():
                handler.send_header(key, value)
            handler.end_headers()
            handler.wfile.write(raw)


def _body_of(handler: BaseHTTPRequestHandler) -> bytes:
    if handler.headers.get("Transfer-Encoding") == "chunked":
        body = b""
        while size := int(handler.rfile.readline(), 16):
            body += handler.rfile.read(size)
            handler.rfile.readline()
        handler.rfile.readline()
    else:
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
    return gzip.decompress(body) if handler.headers.get("Content-Encoding") == "gzip" else body


# -- Discord ---------------------------------------------------------------------------------------------------------


@dataclass
class Message:
    """One message in the channel."""

    id: str
    versions: list[dict[str, Any]]
    """The payload posted, then one for each edit."""
    attachments: dict[str, bytes]
    posted_at: float

    @property
    def payload(self) -> dict[str, Any]:
        """What is shown now."""
        return self.versions[-1]

    @property
    def title(self) -> str:
        """Title of the first embed."""
        return str(self.payload["embeds"][0].get("title", ""))

    @property
    def footer(self) -> str:
        """Footer of the first embed, which names job, attempt and event."""
        return str(self.payload["embeds"][0].get("footer", {}).get("text", ""))

    @property
    def text(self) -> str:
        """All texts of all embeds."""
        return "\n".join(_texts(self.payload))


class FakeDiscord(FakeServer):
    """A webhook: POST (with `?wait=true`), PATCH and GET of messages, multipart attachments.

    Every payload is checked against Discord's schema, where the file is at hand, and against the limits written down
    in `discord_problems`. What breaks one is answered 400 as Discord would, noted in `problems`, and fails the `with`
    block.

    Scripts: `answer_next(429, retry_after=0.2)`, `answer_next(404)`, `answer_next(400, code=30046)`, one per coming
    request; `hang()`; `limit = (0, 1.5)` sends the rate-limit headers (remaining, reset after) with every answer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[Message] = []
        self.problems: list[str] = []
        self._posted = 0
        self.limit: tuple[int, float] | None = None
        self.token = "fake-token_NEVER-TO-BE-SEEN"
        self._script: list[Reply] = []

    @property
    def url(self) -> str:
        """The webhook."""
        return f"{self.origin}/api/webhooks/112233445566778899/{self.token}"

    @property
    def titles(self) -> list[str]:
        """Titles of the messages as they are now, oldest first."""
        return [message.title for message in self.messages]

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        if exc[0] is None:
            assert not self.problems, self.problems

    def answer_next(
        self, status: int, *, code: int | None = None, retry_after: float | None = None, header_only: bool = False
    ) -> None:
        """Answer one coming request with this status instead of serving it."""
        body: dict[str, Any] = {
            "message": f"scripted {status}",
            "code": code if code is not None else _usual_code(status),
        }
        headers = {}
        if retry_after is not None:
            headers["Retry-After"] = f"{retry_after:.3f}" if header_only else str(int(retry_after) + 1)
            if not header_only:
                body |= {"retry_after": retry_after, "global": False}
        with self.changed:
            self._script.append(Reply(status, body, headers))

    def respond(
        self, method: str, path: str, query: dict[str, list[str]], headers: dict[str, str], body: bytes
    ) -> Reply:
        if self._script:
            return self._script.pop(0)
        reply = self._route(method, path, query, headers, body)
        if self.limit is not None:
            remaining, reset_after = self.limit
            reply.headers |= {
                "X-RateLimit-Limit": "5",
                "X-RateLimit-Remaining": str(remaining),
                "X-RateLimit-Bucket": "fake",
            }
            reply.headers |= {"X-RateLimit-Reset-After": f"{reset_after:.3f}"}
        return reply

    def _route(
        self, method: str, path: str, query: dict[str, list[str]], headers: dict[str, str], body: bytes
    ) -> Reply:
        base = urlsplit(self.url).path
        if path == base and method == "POST":
            payload, files = _parts(headers, body)
            problems = discord_problems(payload, files, edit=False)
            if not headers.get("user-agent", "").startswith("DiscordBot ("):
                problems.append("no User-Agent of the form DiscordBot (url, version)")
            if problems:
                return self._refuse(problems)
            self._posted += 1
            message = Message(str(10**18 + self._posted), [payload], files, time.time())
            self.messages.append(message)
            return Reply(200, self._shown(message)) if query.get("wait") == ["true"] else Reply(204)
        name = path.removeprefix(f"{base}/messages/")
        message_or_none = next((each for each in self.messages if each.id == name), None)
        if not path.startswith(f"{base}/messages/"):
            return Reply(404, {"message": "Unknown Webhook", "code": 10015})
        if message_or_none is None:
            return Reply(404, {"message": "Unknown Message", "code": 10008})
        if method == "PATCH":
            payload, files = _parts(headers, body)
            if problems := discord_problems(payload, files, edit=True):
                return self._refuse(problems)
            message_or_none.versions.append({**message_or_none.payload, **payload})
            kept = payload.get("attachments")
            if kept is not None:  # those that it names stay; of new files each has its place as id
                names = {each.get("filename") for each in kept}
                message_or_none.attachments = {k: v for k, v in message_or_none.attachments.items() if k in names}
            message_or_none.attachments |= files
        elif method == "DELETE":
            self.messages.remove(message_or_none)
            return Reply(204)
        return Reply(200, self._shown(message_or_none))

    def _refuse(self, problems: list[str]) -> Reply:
        self.problems += problems
        return Reply(400, {"message": "Invalid Form Body", "code": 50035, "errors": {"_errors": problems}})

    @staticmethod
    def _shown(message: Message) -> dict[str, Any]:
        files = [
            {"id": str(i), "filename": name, "size": len(raw)}
            for i, (name, raw) in enumerate(message.attachments.items())
        ]
        return {"id": message.id, "attachments": files, **message.payload}


def _usual_code(status: int) -> int:
    return {404: 10015, 401: 50027, 403: 50013, 429: 0, 413: 40005}.get(status, 0)


def _parts(headers: dict[str, str], body: bytes) -> tuple[dict[str, Any], dict[str, bytes]]:
    """JSON payload and attached files of a request."""
    kind = headers.get("content-type", "")
    if not kind.startswith("multipart/form-data"):
        return json.loads(body), {}
    head = f"Content-Type: {kind}\r\n\r\n".encode()
    form = email.message_from_bytes(head + body, policy=email.policy.HTTP)
    payload: dict[str, Any] = {}
    files: dict[str, bytes] = {}
    for part in form.iter_parts():
        field_name: Any = part.get_param("name", header="content-disposition")
        content: Any = part.get_payload(decode=True)
        if field_name == "payload_json":
            payload = json.loads(content)
        else:
            assert field_name.startswith("files["), f"unexpected form field {field_name}"
            files[str(part.get_filename())] = content
    return payload, files


def discord_problems(payload: dict[str, Any], files: dict[str, bytes], *, edit: bool) -> list[str]:
    """What Discord would refuse about a payload: its documented limits, and its schema where that file is at hand."""
    problems = []
    embeds = payload.get("embeds") or []

    def within(what: str, text: Any, limit: int, least: int = 0) -> None:
        # UTF-16 units, the stricter reading of "characters".
        size = len(str(text).encode("utf-16-le")) // 2
        if not least <= size <= limit:
            problems.append(f"{what}: {size} characters, allowed are {least} to {limit}")

    within("content", payload.get("content") or "", 2000)
    mentioned = re.findall(r"<@(&?)(\d+)>", payload.get("content") or "")
    allowed = {"parse": []} | {"roles" if role else "users": [number] for role, number in mentioned}
    if payload.get("allowed_mentions") != allowed:
        problems.append(f"allowed_mentions is {payload.get('allowed_mentions')}")
    if not edit and not (payload.get("content") or embeds or files):
        problems.append("empty message")
    if len(embeds) > 10:
        problems.append(f"{len(embeds)} embeds")
    for embed in embeds:
        within("title", embed.get("title", ""), 256)
        within("description", embed.get("description", ""), 4096)
        within("footer", (embed.get("footer") or {}).get("text", ""), 2048)
        within("author", (embed.get("author") or {}).get("name", ""), 256)
        fields = embed.get("fields") or []
        if len(fields) > 25:
            problems.append(f"{len(fields)} fields")
        for each in fields:
            within("field name", each["name"].strip(), 256, 1)
            within("field value", each["value"].strip(), 1024, 1)
        image = (embed.get("image") or {}).get("url", "")
        if image.startswith("attachment://") and image.removeprefix("attachment://") not in files:
            problems.append(f"{image} is not attached")
    total = sum(len(text.encode("utf-16-le")) // 2 for text in _texts(payload))
    if total > 6000:
        problems.append(f"{total} characters over all embeds")
    return problems + _schema_problems(payload, edit)


def _texts(payload: dict[str, Any]) -> list[str]:
    texts = []
    for embed in payload.get("embeds") or []:
        texts += [embed.get("title", ""), embed.get("description", "")]
        texts += [(embed.get("footer") or {}).get("text", ""), (embed.get("author") or {}).get("name", "")]
        texts += [text for each in embed.get("fields") or [] for text in (each["name"], each["value"])]
    return [text for text in texts if text]


def _schema_problems(payload: dict[str, Any], edit: bool) -> list[str]:
    if not DISCORD_SCHEMA.exists():
        return []
    errors = _validator(edit).iter_errors(payload)
    return [f"schema: {'.'.join(map(str, error.absolute_path))}: {error.message[:200]}" for error in errors]


@functools.cache
def _validator(edit: bool) -> Any:
    import jsonschema

    schema = json.loads(DISCORD_SCHEMA.read_text())
    schema["$ref"] = "#/$defs/EditWebhookMessageRequest" if edit else "#/$defs/ExecuteWebhookRequestStrict"
    return jsonschema.Draft202012Validator(schema)


# -- Weights & Biases ------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """One run on the server."""

    id: str
    project: str
    entity: str = "tester"
    name: str | None = None
    group: str | None = None
    job_type: str | None = None
    tags: list[str] = field(default_factory=list)
    notes: str | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
    """Rows as logged, plus W&B's own `_step`, `_runtime`, `_timestamp`."""
    summary: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    """As uploaded: each key holds `{"value": …}`; the key `_wandb` is W&B's own."""
    complete: bool = False
    exit_code: int | None = None
    starts: int = 0
    """Times that a process opened it (the first, and each resume or sync)."""
    lines: int = 0
    """Lines of history taken; more than rows, when a sync sent some again."""
    files: dict[str, bytes] = field(default_factory=dict)
    """Uploads by name."""
    alerts: list[tuple[str, str, str]] = field(default_factory=list)
    """Level, title, text."""
    artifacts: list[tuple[str, str, str]] = field(default_factory=list)
    """Type, name, digest, whenever one is logged; the server takes each for one that it has."""

    def tables(self, key: str) -> list[tuple[int, list[list[Any]]]]:
        """(train/step, rows of the table) of each table of that key, as uploaded."""
        shown = [(step, value["path"]) for step, value in self.rows("train/step", key)]
        return [(step, json.loads(self.files[path])["data"]) for step, path in shown if path in self.files]

    def rows(self, *keys: str) -> list[tuple[Any, ...]]:
        """The values of these keys, from the rows that have all of them."""
        return [tuple(row[key] for key in keys) for row in self.history if all(key in row for key in keys)]


class FakeWandb(FakeServer):
    """Enough of W&B's server for an online run of wandb 0.31: GraphQL (upsert, resume status, file URLs), file stream,
    uploads, alerts. `runs` are by run id; `keys` are the API keys that came in. `failing = 500` answers all so.

    History is kept by W&B's own `_step`. `wandb sync` of a run that was sent in part counts on that: it sends all rows
    again, with the same `_step`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.runs: dict[str, Run] = {}
        self.keys: set[str] = set()
        self.failing: int | None = None

    @property
    def url(self) -> str:
        """For WANDB_BASE_URL."""
        return self.origin

    def respond(
        self, method: str, path: str, query: dict[str, list[str]], headers: dict[str, str], body: bytes
    ) -> Reply:
        scheme, _, credentials = headers.get("authorization", "").partition(" ")
        if scheme == "Basic":
            self.keys.add(base64.b64decode(credentials).decode().partition(":")[2])
        if self.failing is not None:
            return Reply(self.failing, {"error": "scripted"})
        if path == "/graphql":
            asked = json.loads(body)
            return Reply(200, {"data": self._graphql(asked["query"], asked.get("variables") or {})})
        if path.endswith("/file_stream"):
            self._stream(self.runs[path.split("/")[-2]], json.loads(body))
            return Reply(200, {})
        if path.startswith("/upload/"):
            _, _, name, file = path.split("/", 3)
            self.runs[name].files[file] = body
            return Reply(200, {})
        return Reply(404, {})

    def _graphql(self, query: str, given: dict[str, Any]) -> dict[str, Any]:
        if "RunResumeStatus" in query:
            run = self.runs.get(given["name"])
            if run is None:
                return {"model": None}
            return {
                "model": {"id": "project", "name": run.project, "entity": _entity(run), "bucket": _resume_status(run)}
            }
        if "UpsertBucket" in query:
            new = given["name"] not in self.runs
            run = self.runs.setdefault(given["name"], Run(given["name"], given.get("project") or "uncategorized"))
            run.entity = given.get("entity") or run.entity
            run.name = given.get("displayName") or run.name
            run.group = given.get("groupName") or run.group
            run.job_type = given.get("jobType") or run.job_type
            run.tags = given.get("tags") or run.tags
            run.notes = given.get("notes") or run.notes
            run.config |= json.loads(given.get("config") or "{}")
            if given.get("host"):  # sent when a run is opened, not when its config changes
                run.starts += 1
                run.complete, run.exit_code = False, None
            bucket = {
                "id": run.id,
                "name": run.id,
                "displayName": run.name or run.id,
                "description": "",
                "config": "{}",
            }
            project = {"id": "project", "name": run.project, "entity": _entity(run)}
            bucket |= {"sweepName": None, "historyLineCount": run.lines, "project": project}
            return {"upsertBucket": {"bucket": bucket, "inserted": new}}
        if "CreateRunFiles" in query:
            files = [
                {"name": name, "uploadUrl": f"{self.origin}/upload/{given['run']}/{name}"} for name in given["files"]
            ]
            return {"createRunFiles": {"runID": given["run"], "uploadHeaders": [], "files": files}}
        if "query Viewer" in query:
            return {"viewer": {"id": "viewer", "entity": "tester", "username": "tester", "teams": {"edges": []}}}
        if "query ArtifactType" in query:
            return {"project": {"artifact": None}}
        if "mutation CreateArtifact " in query:
            told = given["input"]
            logged = (told["artifactTypeName"], told["artifactCollectionName"], told["digest"])
            self.runs[told["runName"]].artifacts.append(logged)
            known = {"id": told["digest"]}
            artifact = {**known, "state": "COMMITTED", "artifactSequence": {"latestArtifact": known}}
            return {"createArtifact": {"artifact": artifact}}
        if "NotifyScriptableRunAlert" in query:
            self.runs[given["runName"]].alerts.append((given["severity"], given["title"], given["text"]))
            return {"notifyScriptableRunAlert": {"success": True}}
        return {}

    @staticmethod
    def _stream(run: Run, sent: dict[str, Any]) -> None:
        files = sent.get("files") or {}
        if history := files.get("wandb-history.jsonl"):
            start = history["offset"]
            rows = [json.loads(line) for line in history["content"]]
            assert start <= run.lines, f"a gap in the history: {start} after {run.lines}"
            run.lines = max(run.lines, start + len(rows))
            by_step = {row["_step"]: row for row in [*run.history, *rows]}
            run.history = [by_step[step] for step in sorted(by_step)]
        if summary := files.get("wandb-summary.json"):
            run.summary = json.loads(summary["content"][-1])
        if sent.get("complete"):
            run.complete, run.exit_code = True, sent.get("exitcode")


def _entity(run: Run) -> dict[str, str]:
    return {"id": "entity", "name": run.entity}


def _resume_status(run: Run) -> dict[str, Any]:
    return {
        "id": run.id,
        "name": run.id,
        "displayName": run.name or run.id,
        "summaryMetrics": json.dumps(run.summary),
        "logLineCount": 0,
        "historyLineCount": run.lines,
        "eventsLineCount": 0,
        "historyTail": json.dumps([json.dumps(row) for row in run.history[-1:]]),
        "eventsTail": "[]",
        "config": json.dumps(run.config),
        "tags": [],
        "notes": None,
        "wandbConfig": json.dumps({"t": 1}),
    }
