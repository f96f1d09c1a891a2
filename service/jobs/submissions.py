"""New jobs: from a specification, or as a changed clone of another job.

Order of a submission: reserve id and key in Redis (fails: nothing on disk), the run directory, the record
in Redis (fails: reconcile does it), a ticket.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from jobs.data_names import UPLOADED, dataset_file, is_dataset_name, uploaded_name
from jobs.disk import rundir
from jobs.disk.rundir import RunDir
from jobs.errors import Conflict, UserError
from jobs.process.secrets import where_secret
from jobs.record import JobRecord
from jobs.redis.connection import Tickets
from jobs.redis.store import Store, make_id, make_job, submitted_of
from jobs.spec import JobSpec, parse_spec

_KEY = re.compile(r"[\x21-\x7e]{1,255}")
_NO_NAME = re.compile(r"last|(job|sweep)-.{20,}", re.DOTALL)
"""What the command line takes for the newest job or sweep, or for an id."""


class Submissions:
    """Makes jobs. Raises the errors of `jobs.errors`."""

    def __init__(self, *, runs: Path, data: Path, uploads: Path, store: Store, tickets: Tickets) -> None:
        self._runs = runs
        self._data = data
        self._uploads = uploads
        self._store = store
        self._tickets = tickets

    def submit(self, body: object, *, key: str | None, dry_run: bool) -> tuple[RunDir, JobRecord]:
        """A new job; or, with an Idempotency-Key that came before with this body, the job of that time."""
        return self._make(parse_spec(body), asked={"body": body, "dry_run": dry_run}, key=key, dry_run=dry_run)

    def clone(self, source: RunDir, patch: object, *, key: str | None, dry_run: bool) -> tuple[RunDir, JobRecord]:
        """A new job with the specification of another, changed by a JSON merge patch (RFC 7396)."""
        try:
            spec = parse_spec(merge_patch(source.spec_json(), patch))
        except RecursionError:
            raise UserError("the patch is nested too deeply: a specification has three levels") from None
        asked = {"clone": source.id, "body": patch, "dry_run": dry_run}
        return self._make(spec, asked=asked, key=key, dry_run=dry_run, cloned_from=source.id)

    def _make(
        self, spec: JobSpec, *, asked: object, key: str | None, dry_run: bool, cloned_from: str | None = None
    ) -> tuple[RunDir, JobRecord]:
        self.check(spec)
        checked_key(key)
        body_sha256 = sha256(asked)
        new_id = make_id()
        if key is None:
            job, first_body = self._store.reserve(f"id:{new_id}", new_id, body_sha256)
        else:
            on_disk = partial(rundir.submitted_under, self._runs, key)
            job, first_body = self._store.reserve(key, new_id, body_sha256, on_disk=on_disk)
        if first_body != body_sha256:
            raise Conflict(f"Idempotency-Key {key!r} was used before with another body (job {job}); take a new key")
        submitted = submitted_of(
            spec, dry_run=dry_run, idempotency_key=key, body_sha256=body_sha256, cloned_from=cloned_from
        )
        # A key whose first submission died half-way: a repeated request completes it under the same id.
        return make_job(self._runs, self._store, self._tickets, job, spec, submitted)

    def check(self, spec: JobSpec) -> None:
        """Refuse what no job may name: itself as another one, secrets, paths outside the data directory, uploads that
        there are not.
        """
        check_name(spec.name)
        _check_secrets(spec)
        self._check_paths(spec)

    def _check_paths(self, spec: JobSpec) -> None:
        """Refuse paths whose spelling leaves the data directory; what is on disk is for the check stage to see.

        And uploads that there are not: they came through here.
        """
        paths = spec.data.names
        if spec.model.startswith(("./", "/")):
            paths["model"] = spec.model
        base = os.path.abspath(self._data)
        for param, path in paths.items():
            if any(ord(character) < 32 for character in path):
                raise UserError(f"{param} = {path!r} holds a control character", param=param)
            if (dataset := uploaded_name(path)) is not None:
                if not is_dataset_name(dataset) or not dataset_file(self._uploads, dataset).is_file():
                    raise UserError(
                        f"{param} = {path!r}: there is no uploaded data set {dataset!r}",
                        param=param,
                        hint="upload it first: `longhaul datasets add FILE`, or PUT /datasets/NAME"
                        + self._alike(dataset),
                    )
                continue
            if os.path.commonpath([base, os.path.abspath(os.path.join(base, path))]) != base:
                raise UserError(
                    f"{param} = {path!r} is outside the data directory",
                    param=param,
                    hint="put it into the data directory and give the path inside that",
                )

    def _alike(self, dataset: str) -> str:
        """What may have been meant, for the end of a hint."""
        try:
            there = [name for name in os.listdir(self._uploads) if is_dataset_name(name)]
        except FileNotFoundError:  # nothing was ever uploaded
            return ""
        near = get_close_matches(dataset, there, n=1)
        return f"; did you mean {UPLOADED}{near[0]}?" if near else ""


def merge_patch(target: object, patch: object) -> Any:
    """The target after a JSON merge patch (RFC 7396): objects are merged key by key, null takes a key away."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merge_patch(result.get(key), value)
    return result


def _check_secrets(spec: JobSpec) -> None:
    """A specification is shown to everyone with a key, and sent to Discord and W&B."""
    if (param := where_secret(spec.model_dump(mode="json"))) is not None:
        raise UserError(
            f"{param} looks like a secret, and everyone who can read this job could read it",
            param=param,
            hint="take it out; what workers need to know stands in .env",
        )


def check_name(name: str) -> None:
    """Raise UserError for a name by which the command line would find something else."""
    if _NO_NAME.fullmatch(name):
        means = "the newest one" if name == "last" else "an id"
        raise UserError(f"name: {name!r} means {means} to the command line; choose another name", param="name")


def checked_key(key: str | None) -> None:
    """Raise UserError for an Idempotency-Key that is none."""
    if key is not None and not _KEY.fullmatch(key):
        raise UserError("Idempotency-Key: it is 1 to 255 visible ASCII characters", param="Idempotency-Key")


def sha256(content: object) -> str:
    """Hash of what was asked, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
