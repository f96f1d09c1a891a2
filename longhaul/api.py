"""Longhaul over HTTP, for programs: every call has a timeout, every refusal is an ApiError.

from longhaul import Longhaul

with Longhaul("http://127.0.0.1:8000") as longhaul:
    longhaul.upload("recipes.jsonl")
    job = longhaul.submit({"data": {"train": "dataset:recipes.jsonl"}})
    for event in longhaul.events(job["id"]):
        print(event["message"])
    longhaul.download(job["id"], "model", to="my-model")

Answers are the service's own (docs/openapi.json), typed in `jobs.answers`. Raises ApiError when it refuses,
Unreachable when there is no answer.
"""

from __future__ import annotations

import codecs
import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, cast

import requests

from jobs.answers import (
    Checkpoint,
    Dataset,
    DatasetDetail,
    DeletedDataset,
    DeletedJob,
    DeletedSweep,
    Export,
    ExportList,
    Generation,
    Job,
    JobList,
    JsonObject,
    MetricList,
    Push,
    Repaired,
    RunFile,
    ShownEvent,
    Sweep,
    Trial,
    TrialList,
    WorkerList,
)
from jobs.state import Status, is_open
from longhaul import transfer
from longhaul.connection import CONNECT_S, DEFAULT_URL, ApiError, Connection, RetryPolicy, Unreachable, part
from longhaul.transfer import Progress

__all__ = ["DEFAULT_URL", "ApiError", "Longhaul", "Unreachable"]
PAGE = 100
Item = TypeVar("Item")


def _quiet(*_: object) -> None:
    """Nobody is notified."""


def _boolean(value: bool | None) -> str | None:
    return None if value is None else str(value).lower()


class Longhaul:
    """A connection to one service. For one thread; threads that share a service take one each."""

    def __init__(
        self, url: str = DEFAULT_URL, api_key: str | None = None, *, on_wait: Callable[[str], object] = _quiet
    ) -> None:
        """`on_wait` is called with the reason why an answer takes longer: the service is recovering.

        Raises ValueError for what is no http or https URL.
        """
        self._connection = Connection(url, api_key, on_wait)
        self.url = self._connection.url

    def __repr__(self) -> str:
        return f"Longhaul({self.url!r}, key {'set' if self._connection.key else 'none'})"

    def __enter__(self) -> Longhaul:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.session.close()

    def another(self) -> Longhaul:
        """The same service, for another thread."""
        return Longhaul(self.url, self._connection.key, on_wait=self._connection.on_wait)

    # -- jobs ----------------------------------------------------------------------------------------------------------

    def submit(self, job: Mapping[str, Any], *, idempotency_key: str | None = None, dry_run: bool = False) -> Job:
        """A new job. Sent again when the answer is lost: a key of its own sees to it that it stays one job."""
        return self._made(Job, "/jobs", job, idempotency_key, dry_run=dry_run)

    def clone(
        self,
        job: str,
        changes: Mapping[str, Any] = {},
        *,
        idempotency_key: str | None = None,
        dry_run: bool = False,
    ) -> Job:
        """A new job with that one's specification, changed by a JSON merge patch (RFC 7396: null removes a key)."""
        return self._made(Job, f"/jobs/{part(job)}/clone", changes, idempotency_key, dry_run=dry_run)

    def _made(
        self, kind: type[Item], path: str, body: Mapping[str, Any], key: str | None, *, dry_run: bool = False
    ) -> Item:
        headers = {"Idempotency-Key": key or uuid.uuid4().hex}
        params = {"dry_run": "true"} if dry_run else {}
        return self._connection.json(kind, "POST", path, json=body, headers=headers, params=params, repeatable=True)

    def get(self, job: str) -> Job:
        """One job."""
        return self._connection.json(Job, "GET", f"/jobs/{part(job)}")

    def list(
        self,
        *,
        after: str | None = None,
        limit: int = 20,
        status: str | Sequence[str] | None = None,
        metadata: Mapping[str, str] | None = None,
        dry_run: bool | None = None,
        dry_runs: bool = False,
        sweep: str | None = None,
        trials: bool = False,
    ) -> JobList:
        """A page of jobs in one of these states with all these labels, newest first: `data`, `has_more`, `last_id`.

        `dry_run`: only dry runs, or only others; `dry_runs`: dry runs, too. `sweep`: only trials of this sweep;
        `trials`: trials of sweeps, too.
        """
        labels = {f"metadata[{key}]": value for key, value in (metadata or {}).items()}
        given = {"after": after, "limit": limit, "status": status, "dry_run": _boolean(dry_run), **labels}
        given |= {"dry_runs": _boolean(dry_runs), "sweep": sweep, "trials": _boolean(trials)}
        return self._connection.json(JobList, "GET", "/jobs", params=given)

    def all(
        self,
        *,
        status: str | Sequence[str] | None = None,
        metadata: Mapping[str, str] | None = None,
        dry_runs: bool = False,
    ) -> Iterator[Job]:
        """Every job that `list` would show, page after page."""
        labels = {f"metadata[{key}]": value for key, value in (metadata or {}).items()}
        return self._walk(Job, "/jobs", limit=PAGE, status=status, dry_runs=_boolean(dry_runs), **labels)

    def _walk(self, kind: type[Item], path: str, **given: Any) -> Iterator[Item]:
        """The items of a list, page after page."""
        while True:
            page = self._connection.json(JsonObject, "GET", path, params=given)
            yield from page["data"]
            if not page["has_more"]:
                return
            given["after"] = page["last_id"]

    def set_priority(self, job: str, priority: int) -> Job:
        """Higher runs first; −100 to 100."""
        wanted = {"priority": priority}
        return self._connection.json(Job, "PATCH", f"/jobs/{part(job)}", json=wanted, repeatable=True)

    def cancel(self, job: str) -> Job:
        """Stop for good."""
        return self._connection.json(Job, "POST", f"/jobs/{part(job)}/cancel")

    def pause(self, job: str) -> Job:
        """Give the GPU back until resumed."""
        return self._connection.json(Job, "POST", f"/jobs/{part(job)}/pause")

    def resume(self, job: str, *, from_scratch: bool = False) -> Job:
        """Go on from the newest checkpoint; or begin again at step 0, which removes every checkpoint of the job."""
        return self._connection.json(Job, "POST", f"/jobs/{part(job)}/resume", json={"from_scratch": from_scratch})

    def repair(self, job: str) -> Repaired:
        """Cut a damaged job back to its last whole event, after a backup: `message`, `backups`, and the `job`."""
        return self._connection.json(Repaired, "POST", f"/jobs/{part(job)}/repair")

    def delete(self, job: str) -> DeletedJob:
        """Remove an ended or damaged job with its run directory: model, checkpoints and all."""
        return self._connection.json(DeletedJob, "DELETE", f"/jobs/{part(job)}")

    # -- what happened -------------------------------------------------------------------------------------------------

    def past_events(self, job: str, *, after: int = 0) -> Iterator[ShownEvent]:
        """Events above number `after` that have happened until now."""
        return self._walk(ShownEvent, f"/jobs/{part(job)}/events", after=after, limit=1000)

    def events(self, job: str, *, after: int = 0, on_trouble: Callable[[str], None] = _quiet) -> Iterator[ShownEvent]:
        """Events above number `after`, live, to the job's last. Connects again, for ever, when the service goes away.

        `on_trouble` is told once per outage. Raises ApiError when the service refuses (no such job, wrong key),
        Unreachable when nobody answers to begin with.
        """
        return follow_events(self._connection, job, after=after, on_trouble=on_trouble)

    def metrics(
        self,
        job: str,
        *,
        points: int | None = None,
        fields: Sequence[str] | None = None,
        after_step: int | None = None,
        limit: int | None = None,
    ) -> MetricList:
        """Rows in order of step: a page of those above `after_step`; or at most `points`, each the mean of its stretch.

        With points, `fields` says which ones.
        """
        given = {
            "points": points,
            "fields": ",".join(fields) if fields else None,
            "after_step": after_step,
            "limit": limit,
        }
        return self._connection.json(MetricList, "GET", f"/jobs/{part(job)}/metrics", params=given)

    def logs(self, job: str, *, tail: int = 200, offset: int | None = None) -> tuple[str, int]:
        """The end of the trainer's log, or what follows byte `offset`; and the offset to resume from."""
        params = {"tail": tail} if offset is None else {"offset": offset}
        answer = self._connection.answer("GET", f"/jobs/{part(job)}/logs", params=params)
        return answer.content.decode(errors="replace"), int(answer.headers["X-Next-Offset"])

    def follow_logs(self, job: str, *, tail: int = 200, on_trouble: Callable[[str], None] = _quiet) -> Iterator[str]:
        """The end of the trainer's log and what is added to it, live, to the job's end; across outages, as `events`."""
        return follow_log(self._connection, job, tail=tail, on_trouble=on_trouble)

    def plan(self, job: str) -> JsonObject:
        """plan.json: what check or prepare found out. ApiError `no_plan` before that."""
        return self._connection.json(JsonObject, "GET", f"/jobs/{part(job)}/plan")

    def plan_picture(self, job: str) -> bytes:
        """A PNG of the memory plan. ApiError `no_plan` where there is none, as of a trial that fits."""
        return self._connection.answer("GET", f"/jobs/{part(job)}/plan.png").content

    def preview(self, job: str) -> JsonObject:
        """Three rows as the model gets them. ApiError `no_plan` before check has read them."""
        return self._connection.json(JsonObject, "GET", f"/jobs/{part(job)}/preview")

    def compare(self, jobs: Sequence[str]) -> JsonObject:
        """What differs between two to ten jobs, by their ids; what it costs; why the memory of one did not suffice."""
        return self._connection.json(JsonObject, "GET", "/compare", params={"jobs": ",".join(jobs)})

    # -- results -------------------------------------------------------------------------------------------------------

    def checkpoints(self, job: str) -> Iterator[Checkpoint]:
        """Its complete checkpoints, newest first, with their validation losses."""
        return self._walk(Checkpoint, f"/jobs/{part(job)}/checkpoints")

    def files(self, job: str) -> Iterator[RunFile]:
        """The files of its run directory in order of path: `path`, `bytes`, `modified_at`."""
        return self._walk(RunFile, f"/jobs/{part(job)}/files")

    def report(self, job: str) -> bytes:
        """One HTML page that needs no network: the job as it is now, for keeping and sending."""
        return self._connection.answer("GET", f"/jobs/{part(job)}/report").content

    def download(
        self,
        job: str,
        path: str = "model",
        to: str | Path = ".",
        *,
        on_progress: Callable[[str, int, int], None] = _quiet,
    ) -> Sequence[Path]:
        """A file, or every file of a folder, under the same names in `to`. Returns them. What is there is replaced.

        The files of `model` lie in `to` itself if that is new or empty, and not the current folder; else in `to`/model.
        One that broke off resumes where it was. `on_progress` is called with (path, bytes done, bytes of that file).
        `trainer.log` comes without what looks like a secret. Raises OSError where it cannot be written.
        """
        if path == "trainer.log":
            transfer.save_log(lambda offset: self.logs(job, offset=offset), Path(to) / path)
            return [Path(to) / path]
        return transfer.download(self._connection, job, path, self.files(job), Path(to), on_progress)

    def generate(
        self, job: str, body: Mapping[str, Any], *, on_part: Callable[[str, Mapping[str, Any]], object] = _quiet
    ) -> Generation:
        """Let its model answer, such as `{"input": "Peach Ice Cream"}`; schema `GenerateBody` has all keys.

        `on_part` is called with (type, data) of the parts as they come: `waiting`, `loading`, `loaded`, `text` (a piece
        of `text` by `model`), `output`. Raises ApiError, also in the middle, and Unreachable: ask again.
        """
        return generate(self._connection, job, body, on_part)

    def exports(self, job: str) -> Sequence[Export]:
        """Formats that are there, complete and verified, and what was asked for in the last minutes."""
        return self._connection.json(ExportList, "GET", f"/jobs/{part(job)}/exports")["data"]

    def export(self, job: str, format: str, *, dtype: str | None = None) -> Export:
        """Have its model written as `merged`, `adapter`, `ctranslate2` or `gguf`. Follow it with `exports`, then
        `download` its `path`. `dtype` None: the type of the model, where the format has it.
        """
        body = {"format": format, "dtype": dtype}
        return self._connection.json(Export, "POST", f"/jobs/{part(job)}/exports", json=body, repeatable=True)

    def cancel_export(self, job: str, format: str) -> None:
        """End an export that waits or is being made; a complete one of that format stays."""
        self._connection.json(ExportList, "DELETE", f"/jobs/{part(job)}/exports/{part(format)}")

    def push(self, job: str, repository: str, *, license: str, public: bool = False, export: str | None = None) -> Push:
        """Have its model, or an export of it, uploaded to the hub as `org/name`. Follow it with `pushed`."""
        body = {"repository": repository, "license": license, "public": public, "export": export}
        return self._connection.json(Push, "POST", f"/jobs/{part(job)}/push", json=body, repeatable=True)

    def pushed(self, job: str) -> Push:
        """The newest upload. ApiError `no_push` where there was none in the last minutes."""
        return self._connection.json(Push, "GET", f"/jobs/{part(job)}/push")

    # -- sweeps --------------------------------------------------------------------------------------------------------

    def submit_sweep(self, sweep: Mapping[str, Any], *, idempotency_key: str | None = None) -> Sweep:
        """A new sweep, `{"job": {…}, "space": {…}}`. Sent again when the answer is lost, and still one sweep."""
        return self._made(Sweep, "/sweeps", sweep, idempotency_key)

    def sweeps(self) -> Iterator[Sweep]:
        """All sweeps, newest first."""
        return self._walk(Sweep, "/sweeps", limit=PAGE)

    def sweep(self, sweep: str) -> Sweep:
        """One sweep, with its best trial so far."""
        return self._connection.json(Sweep, "GET", f"/sweeps/{part(sweep)}")

    def sweep_trials(self, sweep: str) -> Sequence[Trial]:
        """All its trials, by number."""
        return self._connection.json(TrialList, "GET", f"/sweeps/{part(sweep)}/trials")["data"]

    def sweep_csv(self, sweep: str) -> str:
        """All its trials as CSV, with a column for each parameter."""
        return self._connection.answer("GET", f"/sweeps/{part(sweep)}/trials.csv").content.decode()

    def cancel_sweep(self, sweep: str) -> Sweep:
        """No more trials; those that are open are cancelled."""
        return self._connection.json(Sweep, "POST", f"/sweeps/{part(sweep)}/cancel")

    def repeat_trial(
        self, sweep: str, *, trial: int | None = None, seeds: int = 5, idempotency_key: str | None = None
    ) -> Sweep:
        """A new sweep that trains one trial, the best where none is named, with so many other seeds."""
        body = {"trial": trial, "seeds": seeds}
        return self._made(Sweep, f"/sweeps/{part(sweep)}/repeat", body, idempotency_key)

    def delete_sweep(self, sweep: str) -> DeletedSweep:
        """Remove an ended sweep and the jobs of its trials, with their models and checkpoints."""
        return self._connection.json(DeletedSweep, "DELETE", f"/sweeps/{part(sweep)}")

    # -- data sets -----------------------------------------------------------------------------------------------------

    def upload(self, file: str | Path, name: str | None = None, *, on_progress: Progress = _quiet) -> Dataset:
        """Make a file of rows a data set (by its own name, unless another is given): a job names it `dataset:<name>`.

        Streamed, with a checksum. `on_progress` is called with (bytes done, bytes in all). ApiError 409 when other
        content has the name, OSError when the file cannot be read.
        """
        file = Path(file)
        return transfer.upload(self._connection, name or file.name, file, transfer.sha256_of(file), on_progress)

    def datasets(self) -> Iterator[Dataset]:
        """All data sets, in order of name."""
        return self._walk(Dataset, "/datasets")

    def dataset(self, name: str) -> DatasetDetail:
        """One, with what the newest job that read it found in it."""
        return self._connection.json(DatasetDetail, "GET", f"/datasets/{part(name)}")

    def delete_dataset(self, name: str) -> DeletedDataset:
        """Remove it. ApiError 409 while an open job names it."""
        return self._connection.json(DeletedDataset, "DELETE", f"/datasets/{part(name)}")

    # -- the service ---------------------------------------------------------------------------------------------------

    def workers(self) -> WorkerList:
        """Workers heard of in the last minute."""
        return self._connection.json(WorkerList, "GET", "/workers")

    def ready(self) -> bool:
        """Whether the service and its Redis answer now."""
        try:
            return bool(self._connection.json(dict, "GET", "/health/ready", repeatable=False))
        except (ApiError, Unreachable):
            return False


# -- following -----------------------------------------------------------------------------------------------


SILENCE_S = 60.0
"""The service sends a comment every 15 s; a stream of events that is silent for longer than this is dead."""
LAST_EVENTS = frozenset(f"job.{status}" for status in Status if status.terminal)


def follow_events(
    connection: Connection, job: str, *, after: int, on_trouble: Callable[[str], None]
) -> Iterator[ShownEvent]:
    """Events above number `after`, to the job's last. Raises Unreachable when nobody answers to begin with."""
    address, patience = f"/jobs/{part(job)}", RetryPolicy(on_trouble)
    connection.answer("GET", address)
    while True:
        try:
            headers = {"Accept": "text/event-stream", "Last-Event-ID": str(after)}
            with connection.stream(f"{address}/events", silence_s=SILENCE_S, headers=headers) as answer:
                if answer.status_code == 204:
                    return
                for event in _frames(answer):
                    patience.well()
                    after = event["number"]
                    yield event
                    if event["type"] in LAST_EVENTS:
                        return
            # Closed before the job's last event: the service stops, or a proxy did not want to wait.
        except (requests.RequestException, Unreachable, ApiError) as error:
            patience.trouble(error)
        patience.pause()


def follow_log(connection: Connection, job: str, *, tail: int, on_trouble: Callable[[str], None]) -> Iterator[str]:
    """The last `tail` lines of the trainer's log, then what is added to it, to the end of the job.

    Pages say where in the file they end; a log that is followed does not, and secrets are left out of both. So after a
    break it is read again from the last place that is known, and what was shown is passed over. Raises Unreachable when
    nobody answers to begin with.
    """
    patience = RetryPolicy(on_trouble)
    text = codecs.getincrementaldecoder("utf-8")("replace")  # a character may be cut in two
    address, place, shown = f"/jobs/{part(job)}", {"tail": tail}, 0
    connection.answer("GET", address)
    while True:
        try:
            # Asked first: what was written until then is read below.
            ended = not is_open(connection.json(Job, "GET", address)["status"])
            before = None
            while place != before:
                page = connection.answer("GET", f"{address}/logs", params=place)
                before, place = place, {"offset": int(page.headers["X-Next-Offset"])}
                yield text.decode(page.content[shown:])
                shown = max(0, shown - len(page.content))
            if ended:
                return
            shown = 0
            follow = {**place, "follow": "true"}
            with connection.stream(f"{address}/logs", silence_s=SILENCE_S, params=follow) as answer:
                for content in _until_lost(answer):
                    patience.well()
                    shown += len(content)
                    yield text.decode(content)
        except (requests.RequestException, Unreachable, ApiError) as error:
            patience.trouble(error)
        patience.pause()


def _until_lost(answer: requests.Response) -> Iterator[bytes]:
    """What comes, until it ends in whatever way: a log may be silent for longer than anybody listens."""
    try:
        yield from answer.iter_content(chunk_size=None)
    except requests.RequestException:
        return


def _frames(answer: requests.Response) -> Iterator[ShownEvent]:
    """Parsed `data` of each event. Lines as bytes: text would be split at every Unicode line separator, too."""
    for line in answer.iter_lines(chunk_size=None):
        if line.startswith(b"data:"):
            yield json.loads(line[5:])


# -- asking a model ------------------------------------------------------------------------------------------


ANSWER_SILENCE_S = 900.0
"""Until another byte: others may come first, and a large model takes a while to load."""
OnPart = Callable[[str, Mapping[str, Any]], object]


def generate(connection: Connection, job: str, body: Mapping[str, Any], on_part: OnPart) -> Generation:
    """The answer; `on_part` is told of its parts (`waiting`, `loading`, `loaded`, `text`, `output`) as they come: of a
    beam search, which cannot be streamed, `text` and `output` at the end.

    Raises ApiError, also in the middle; Unreachable where the connection breaks: ask again.
    """
    path = f"/jobs/{part(job)}/generate"
    if body.get("num_beams", 1) != 1:
        whole = connection.json(Generation, "POST", path, json=body, timeout=(CONNECT_S, ANSWER_SILENCE_S))
        for output in whole["outputs"]:
            if output["labels"] is None:
                on_part("text", {"model": output["model"], "index": output["index"], "text": output["text"]})
            on_part("output", output)
        return whole
    try:
        with connection.stream(
            path, silence_s=ANSWER_SILENCE_S, method="POST", json={**body, "stream": True}
        ) as answer:
            for type, data in _parts(answer):
                if type == "error":
                    error = data["error"]
                    raise ApiError(
                        error["message"], status=data["status"], code=error["code"], param=error["param"],
                        hint=error.get("hint"),
                    )  # fmt: skip
                if type == "done":
                    return cast(Generation, data)
                on_part(type, data)
    except requests.RequestException as error:
        raise Unreachable(f"no answer from {connection.url} ({error.__class__.__name__})") from error
    raise Unreachable(f"{connection.url} broke the answer off")


def _parts(answer: requests.Response) -> Iterator[tuple[str, dict[str, Any]]]:
    """Type and data of each event. Lines as bytes: text would be split at every Unicode line separator, too."""
    type = ""
    for line in answer.iter_lines(chunk_size=None):
        if line.startswith(b"event: "):
            type = line[7:].decode()
        elif line.startswith(b"data: "):
            yield type, json.loads(line[6:])
