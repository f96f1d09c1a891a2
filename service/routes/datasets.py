"""Uploaded data sets."""

from __future__ import annotations

import base64
import re
from typing import Annotated

from fastapi import APIRouter, Header, Path, Query, Request, Response
from pydantic import ValidationError

from jobs import answers
from jobs.data_names import DATA_SUFFIXES, UPLOADED, data_format
from jobs.dataset_report import DatasetReport
from jobs.errors import Conflict, UserError
from jobs.state import Status
from service.answers.conversion import page
from service.files.confined import NoFile, content
from service.files.uploads import Uploaded, Uploads
from service.jobs.actions import Actions
from service.openapi.documented import LOCATION, UPLOAD_BODY, documented

_SHOWN_JOBS = 10
_ENDINGS = "|".join(map(re.escape, DATA_SUFFIXES))
DatasetName = Annotated[
    str,
    Path(
        description="Letters, digits, `.`, `_` and `-`, at most 128; the ending says the format.",
        examples=["recipes.jsonl"],
        json_schema_extra={"pattern": f"^[A-Za-z0-9][A-Za-z0-9._-]*({_ENDINGS})$", "maxLength": 128},
    ),
]


class DatasetInUse(Conflict):
    """An open job names it."""

    code = "dataset_in_use"


def routes(actions: Actions, uploads: Uploads) -> APIRouter:
    """`/datasets`."""
    router = APIRouter(prefix="/datasets", tags=["datasets"])

    def needed_by(users: list[tuple[str, Status]]) -> list[str]:
        """Those that are open; but for the paused ones whose rows it does not hold any more."""
        return [job for job, status in users if not (status.terminal or (status is Status.PAUSED and has_changed(job)))]

    def has_changed(job: str) -> bool:
        error = actions.find(job).record.error
        return error is not None and error.code == "content_changed" and (error.param or "").startswith("data.")

    def detailed(dataset: Uploaded) -> answers.DatasetDetail:
        users = actions.store.using(dataset.name)
        report, report_job = _newest_report(actions, [job for job, _ in users])
        return answers.DatasetDetail(
            **_answer(dataset),
            jobs=[job for job, _ in users[:_SHOWN_JOBS]],
            in_use=bool(needed_by(users)),
            report=report,
            report_job=report_job,
        )

    @router.put(
        "/{name}",
        status_code=201,
        responses=documented(408, 409, 413, 422)
        | {
            200: {
                "model": answers.Dataset,
                "description": "It was there already, with this very content.",
                "headers": LOCATION,
            },
            201: {"headers": LOCATION},
        },
        openapi_extra=UPLOAD_BODY,
    )
    async def upload_dataset(
        request: Request,
        response: Response,
        name: DatasetName,
        content_digest: Annotated[
            str | None,
            Header(
                alias="Content-Digest",
                description="Checksum of the body, to be compared: `sha-256=:<base64>:` (RFC 9530).",
                json_schema_extra={"pattern": "^sha-256=:[A-Za-z0-9+/]{43}=:$"},
            ),
        ] = None,
    ) -> answers.Dataset:
        """The body is the file: `curl -T recipes.jsonl URL/datasets/`. It is there whole or not at all.

        A job then names it `dataset:recipes.jsonl` in `data.train` or `data.validation`. Doing it twice does no harm;
        other content needs another name."""
        if "content-range" in request.headers:
            message = "a part of a file cannot be taken in"
            raise UserError(message, param="Content-Range", hint="send the whole file: nothing is left of an attempt")
        sha256 = _sha256(content_digest)
        length = request.headers.get("content-length", "")
        dataset, new = await uploads.receive(
            name, request.stream(), length=int(length) if length.isdecimal() else None, sha256=sha256
        )
        response.status_code = 201 if new else 200
        response.headers["Location"] = f"/datasets/{dataset.name}"
        return _answer(dataset)

    @router.get("", responses=documented(422))
    def list_datasets(
        after: Annotated[str, Query(description="Name of the last data set of the page before.")] = "",
        limit: Annotated[int, Query(ge=1, le=1000, description="Data sets at most.")] = 100,
    ) -> answers.DatasetList:
        """In order of name."""
        found, has_more = uploads.page(after, limit)
        return page(answers.DatasetList, [_answer(dataset) for dataset in found], has_more=has_more, by="name")

    @router.get("/{name}", responses=documented(404))
    def get_dataset(name: DatasetName) -> answers.DatasetDetail:
        """One data set, the jobs that name it, and what the newest of them found in its rows."""
        return detailed(uploads.get(name))

    @router.delete("/{name}", responses=documented(404, 409))
    def delete_dataset(name: DatasetName) -> answers.DeletedDataset:
        """Permanently. Refused while an open job needs it; one that paused with `content_changed` does not. (A job that
        is submitted at the same moment is rejected when it is checked.)"""
        dataset = uploads.get(name)
        open_jobs = needed_by(actions.store.using(dataset.name))
        if open_jobs:
            named = ", ".join(open_jobs[:_SHOWN_JOBS]) + (" …" if len(open_jobs) > _SHOWN_JOBS else "")
            jobs = "job" if len(open_jobs) == 1 else "jobs"
            raise DatasetInUse(
                f"data set {name} is needed by {len(open_jobs)} open {jobs} ({named}): cancel them first, or wait"
            )
        uploads.remove(name)
        return answers.DeletedDataset(name=name, object="dataset", deleted=True)

    return router


def _answer(dataset: Uploaded) -> answers.Dataset:
    format = data_format(dataset.name)
    assert format is not None, "nothing else is taken in"
    return answers.Dataset(
        object="dataset",
        name=dataset.name,
        uri=UPLOADED + dataset.name,
        format=format,
        bytes=dataset.bytes,
        sha256=dataset.sha256,
        created_at=dataset.created_at,
    )


def _newest_report(actions: Actions, users: list[str]) -> tuple[DatasetReport | None, str | None]:
    """dataset.json of the newest of these jobs that has one, and which that is."""
    for job in users:
        try:
            return DatasetReport.model_validate_json(content(actions.runs / job, "dataset.json")), job
        except (NoFile, ValidationError):  # not prepared yet, refused before, deleted since; of another version
            continue
    return None, None


def _sha256(given: str | None) -> bytes | None:
    """What a Content-Digest says. Raises UserError for one that cannot be compared: it would only seem to protect."""
    if given is None:
        return None
    found = re.search(r"(?:^|,)\s*sha-256=:([A-Za-z0-9+/]{43}=):\s*(?:$|,)", given)
    if found is None:
        raise UserError(
            f"Content-Digest: {given[:200]!r} has no sha-256",
            param="Content-Digest",
            hint="send `sha-256=:BASE64:`, what `openssl dgst -sha256 -binary FILE | base64` prints, or leave it out",
        )
    return base64.b64decode(found[1])
