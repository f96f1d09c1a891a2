"""The prepared model and data of a job on their way through a bucket: by content, each once for all jobs.

    URL/.stores/<kind>/<name>/…     complete once its `.listing.json` is there

A node keeps them in `.stores` beside the run directory, and its plan.json names them there.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from jobs.disk.rundir import RunDir
from worker.engines.bucket import Bucket
from worker.engines.bucket_copies import get_file
from worker.engines.copied_file import BucketListing, files_in
from worker.engines.engine import EngineUnavailable


def send_stores(bucket: Bucket, run: RunDir) -> None:
    """What is not there (any more)."""
    for folder in _stores(run):
        listing, files = f"{_name(folder)}/.listing.json", files_in(folder)
        for each, file in files.items():
            if bucket.size(f"{_name(folder)}/{each}") != file.bytes:
                bucket.put(folder / each, f"{_name(folder)}/{each}")
        if bucket.read(listing) is None:
            bucket.write(listing, BucketListing(attempt=0, token="store", files=files).model_dump_json().encode())


def receive_stores(bucket: Bucket, run: RunDir) -> None:
    """What is not here yet; the trainer compares its content with its manifest."""
    plan = run.plan()
    model, prepared = (_receive(bucket, _name(folder), run.path.parent, run.id) for folder in _stores(run))
    change = {
        "model": plan.model.model_copy(update={"folder": str(model)}),
        "data": plan.data.model_copy(update={"prepared": str(prepared)}),
    }
    run.write_plan(plan.model_copy(update=change))


def _receive(bucket: Bucket, name: str, place: Path, job: str) -> Path:
    folder = place / name
    if not folder.exists():
        if (listing := bucket.read(f"{name}/.listing.json")) is None:
            raise EngineUnavailable(f"{name} is not in the bucket")
        partial = folder.with_name(f"tmp-{folder.name}-{job}")
        here = files_in(partial)
        for each, file in BucketListing.model_validate_json(listing).files.items():
            if not file.same(here.get(each)):  # else from a download that was interrupted
                try:
                    get_file(bucket, f"{name}/{each}", file, partial / each)
                except FileNotFoundError:
                    raise EngineUnavailable(f"{name}/{each} is not in the bucket") from None
        try:
            os.rename(partial, folder)
        except OSError:
            if not folder.exists():
                raise
            shutil.rmtree(partial)  # another job has just received the same
    return folder


def _stores(run: RunDir) -> tuple[Path, Path]:
    """The folders of the prepared model and data."""
    plan = run.plan()
    assert plan.model.folder is not None and plan.data.prepared is not None, "an attempt follows *prepare*"
    return Path(plan.model.folder), Path(plan.data.prepared)


def _name(folder: Path) -> str:
    return f".stores/{folder.parent.name}/{folder.name}"
