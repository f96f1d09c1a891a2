"""manifest.json: bytes and sha256 of each file of a folder, by which it is later found to be as it was made, or not."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TypedDict

from pydantic import ValidationError

from jobs.disk.files import write_synced
from jobs.disk.rundir import RunDir
from jobs.errors import Rejected
from jobs.export import EXPORTS, REPORT, ExportFormat, ExportReport
from jobs.text.units import format_number
from worker.training.store import fingerprint

MANIFEST = "manifest.json"
README = "README.md"
"""The page of a model, which is its model card on the hub."""


class SealedFile(TypedDict):
    """What a manifest says of a file."""

    bytes: int
    sha256: str


def describe(
    folder: Path, known: Mapping[str, SealedFile] = {}, progress: Callable[[], object] = lambda: None
) -> dict[str, SealedFile]:
    """All files but the manifest, by name relative to the folder; computed unless `known`, and synced."""
    found: dict[str, SealedFile] = {}
    for name in _names(folder):
        file = folder / name
        found[name] = known.get(name) or {"bytes": file.stat().st_size, "sha256": fingerprint(file, progress)}
        with open(file, "rb") as handle:
            os.fsync(handle.fileno())
    return found


def write_manifest(folder: Path, files: Mapping[str, SealedFile], **facts: object) -> None:
    """The manifest, with whatever else is to be known of the folder."""
    write_synced(folder / MANIFEST, json.dumps({**facts, "files": files}, indent=1).encode())


def read_manifest(folder: Path) -> dict[str, SealedFile]:
    """Raises OSError, ValueError, LookupError, TypeError where it is gone or damaged."""
    files: dict[str, SealedFile] = json.loads((folder / MANIFEST).read_bytes())["files"]
    return files


def difference(
    folder: Path,
    files: Mapping[str, SealedFile],
    progress: Callable[[], object] = lambda: None,
    *,
    beside: Collection[str] = (),
) -> str | None:
    """The first thing that is not as `files` say: a file that is gone, new, or has another content; None: nothing.

    `beside`: files that are not compared.
    """
    for name in sorted(files.keys() ^ (set(_names(folder)) - set(beside))):
        return f"{name} is gone" if name in files else f"{name} has been added"
    for name, entry in files.items():
        if (size := (folder / name).stat().st_size) != entry["bytes"]:
            return f"{name} has {size} bytes, not {entry['bytes']}"
        if fingerprint(folder / name, progress) != entry["sha256"]:
            return f"the content of {name} has changed: its sha256 is another"
    return None


def delivered(run: RunDir, progress: Callable[[], object] = lambda: None) -> Path:
    """`model/` of a job, every byte compared with what training wrote there; one of an older version has no manifest.

    Raises Rejected (`no_model`, `model_damaged`).
    """
    if not run.has_model():
        raise Rejected(
            f"job {run.id} has no model",
            code="no_model",
            hint=f"longhaul show {run.id} says what became of it, and longhaul checkpoints {run.id} what else there is",
        )
    if not (run.model / MANIFEST).exists():
        return run.model
    try:
        wrong = difference(run.model, read_manifest(run.model), progress)
    except (OSError, ValueError, LookupError, TypeError) as error:
        wrong = f"{MANIFEST} cannot be read: {error}"
    if wrong is not None:
        raise Rejected(
            f"model/ of job {run.id} is no longer what training delivered: {wrong}",
            code="model_damaged",
            hint=f"bring it back as it was, from a backup; or train it again: longhaul clone {run.id}",
        )
    return run.model


def verified_export(run: RunDir, format: ExportFormat, progress: Callable[[], object] = lambda: None) -> Path:
    """An export of a job, every byte compared with what export.json says of it.

    Raises Rejected (`no_export`, `export_damaged`).
    """
    folder, again = run.path / EXPORTS / format, f"longhaul export {run.id} --to {format}"
    if folder.is_symlink() or folder.parent.is_symlink() or not (folder / REPORT).exists():
        raise Rejected(f"job {run.id} has no export {format}", code="no_export", hint=again)
    if (wrong := _unverified(run, folder, format, progress)) is not None:
        raise Rejected(
            f"{EXPORTS}/{format} of job {run.id} is not the export that was verified: {wrong}",
            code="export_damaged",
            hint=f"make it again: {again}",
        )
    return folder


def _unverified(run: RunDir, folder: Path, format: ExportFormat, progress: Callable[[], object]) -> str | None:
    """Why the folder is not what export.json of a verified export of this job says; None: it is."""
    try:
        report = ExportReport.model_validate_json((folder / REPORT).read_bytes())
    except ValidationError as error:
        return f"{REPORT} cannot be read: {error.errors()[0]['msg']}"
    if (report.job, report.format) != (run.id, format):
        return f"{REPORT} is of {report.format} of job {report.job}"
    found = report.verification
    if not found.difference <= found.limit:
        by = format_number(found.difference, 2)
        return f"by {REPORT} it differs from the model by {by}, and {found.limit:g} is allowed"
    files: dict[str, SealedFile] = {each.name: {"bytes": each.bytes, "sha256": each.sha256} for each in report.files}
    return difference(folder, files, progress, beside=(REPORT,))


def _names(folder: Path) -> list[str]:
    """Of its files, also in folders within."""
    found = (file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    return sorted(name for name in found if name != MANIFEST)
