"""The prepared model and data of a job on their way through a bucket: by content, each once for all jobs.

    URL/.stores/<kind>/<name>/…     complete once its `.listing.json` is there

A node keeps them in `.stores` beside the run directory, and its plan.json names them there.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from jobs.disk.rundir import RunDir
from worker.engines.bucket import Bucket
from worker.engines.copied_file import BucketListing, files_in
from worker.engines.engine import EngineUnavailable


def send_stores(bucket: Bucket, run: RunDir) -> None:
    """What is not there yet."""
    for folder in _stores(run):
        listing = f"{_name(folder)}/.listing.json"
        if bucket.read(listing) is None:
            files = files_in(folder)
            for each in files:
                bucket.put(folder / each, f"{_name(folder)}/{each}")
            bucket.write(listing, BucketListing(attempt=0, files=files).model_dump_json().encode())


def receive_stores(bucket: Bucket, run: RunDir) -> None:
    """What is not here yet; the trainer compares its content with its manifest."""
    plan = run.plan()
    model, prepared = (_receive(bucket, _name(folder), run.path.parent) for folder in _stores(run))
    change = {
        "model": plan.model.model_copy(update={"folder": str(model)}),
        "data": plan.data.model_copy(update={"prepared": str(prepared)}),
    }
    run.write_plan(plan.model_copy(update=change))


def _receive(bucket: Bucket, name: str, place: Path) -> Path:
    folder = place / name
    if not folder.exists():
        if (listing := bucket.read(f"{name}/.listing.json")) is None:
            raise EngineUnavailable(f"{name} is not in the bucket")
        temporary = folder.with_name(f"tmp-{folder.name}-{uuid.uuid4().hex[:8]}")
        for each in BucketListing.model_validate_json(listing).files:
            (temporary / each).parent.mkdir(parents=True, exist_ok=True)
            bucket.get(f"{name}/{each}", temporary / each)
        os.rename(temporary, folder)
    return folder


def _stores(run: RunDir) -> tuple[Path, Path]:
    """The folders of the prepared model and data."""
    plan = run.plan()
    assert plan.model.folder is not None and plan.data.prepared is not None, "an attempt follows *prepare*"
    return Path(plan.model.folder), Path(plan.data.prepared)


def _name(folder: Path) -> str:
    return f".stores/{folder.parent.name}/{folder.name}"
