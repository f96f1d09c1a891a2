"""Files of a run directory that go through a bucket: which they are, who writes them, and when a copy is the same."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field

from jobs.frozen import Frozen

MANIFEST = "manifest.json"
BLOCK = 2**20
_STAYS = re.compile(r"(lock|events\.lock|sinks|wandb|exports|attempts/\d+\.task\.json)(/|$)|(.*/)?(\.|tmp-|rejected-)")
"""Names that are not copied: locks, what only the box works with, and what is not whole."""
_BY_NODE = re.compile(
    r"attempts/\d+(-rank-\d+)?\.(jsonl|node\.json)|metrics\.jsonl|trainer\.log|from_scratch\.json|confusion\.json"
    r"|evaluations/[^/]+|oom_reports/.+|checkpoints/step-\d+/[^/]+|model/.+"
)
_STAY_EMPTY = ("checkpoints", "evaluations")
_SEALED = re.compile(r"(checkpoints/step-\d+|model)/.+")


class CopiedFile(Frozen):
    """A file as it was when it was copied."""

    bytes: int
    modified_ns: int
    place: Annotated[str, Field(pattern=r"^(\d+-\w+(-\w+)?)?$")] = ""
    """The folder of its object, in that of the job."""

    def same(self, other: CopiedFile | None) -> bool:
        """One with the same size and time is the same, wherever it is."""
        return other is not None and (self.bytes, self.modified_ns) == (other.bytes, other.modified_ns)


Files = dict[str, CopiedFile]
"""By name, relative to their folder."""


class _SealedFile(Frozen, extra="ignore"):
    sha256: str


class _Manifest(Frozen, extra="ignore"):
    files: dict[str, _SealedFile]


class BucketListing(Frozen):
    """What one side has in the bucket."""

    attempt: Annotated[int, Field(ge=0)]
    token: Annotated[str, Field(pattern=r"^\w+$")]
    """Of the task."""
    start: Annotated[str, Field(pattern=r"^\w*$")] = ""
    """Of a node: which start of the task it is; of the box empty."""
    files: Files

    @property
    def of_box(self) -> str:
        """The folder of the box's objects for this attempt."""
        return f"{self.attempt}-{self.token}"

    @property
    def place(self) -> str:
        """The folder of the objects of this side."""
        return f"{self.of_box}-{self.start}" if self.start else self.of_box


def files_in(folder: Path) -> Files:
    """Those in it that are copied."""
    found: Files = {}
    for parent, _, names in os.walk(folder):
        for file in (Path(parent, name) for name in names):
            name = file.relative_to(folder).as_posix()
            if _STAYS.match(name) is None and file.is_file() and not file.is_symlink():
                try:
                    status = file.stat()
                except FileNotFoundError:  # removed meanwhile
                    continue
                found[name] = CopiedFile(bytes=status.st_size, modified_ns=status.st_mtime_ns)
    return found


def by_node(name: str) -> bool:
    """Whether the node writes the file of this name, and the box only reads it. What leads elsewhere is nobody's."""
    return _BY_NODE.fullmatch(name) is not None and not {"", ".", ".."} & set(name.split("/"))


def sealed_folder(name: str) -> str | None:
    """The folder of this file if it has a manifest, and so is there whole or not at all."""
    found = _SEALED.fullmatch(name)
    return found[1] if found is not None else None


def in_folder(folder: str, files: Mapping[str, CopiedFile]) -> Files:
    """What lies in a folder with a manifest, the manifest last."""
    inside = [name for name in files if name.startswith(f"{folder}/")]
    return {name: files[name] for name in sorted(inside, key=lambda each: each == f"{folder}/{MANIFEST}")}


def difference(folder: Path) -> str | None:
    """The first thing that is not as the manifest of the folder says; None: it is whole."""
    try:
        for name, entry in _Manifest.model_validate_json((folder / MANIFEST).read_bytes()).files.items():
            with open(folder / name, "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != entry.sha256:
                    return f"{name} has another sha256 than its manifest says"
    except (OSError, ValueError) as error:
        return f"{MANIFEST}: {error}"
    return None


def append_rest(new: Path, old: Path) -> bool:
    """Append to a file what it has become longer by: who follows it reads on. False, and nothing done: it differs."""
    if not old.exists():
        return False
    with open(new, "rb") as source, open(old, "r+b") as target:
        while block := target.read(BLOCK):
            if source.read(len(block)) != block:
                return False
        while block := source.read(BLOCK):
            target.write(block)
    return True


def remove(folder: Path, names: Iterable[str]) -> None:
    """Files, and the folders that they leave empty; of a folder with a manifest, the manifest goes first."""
    for name in sorted(names, key=lambda each: not each.endswith(f"/{MANIFEST}")):
        file = folder / name
        file.unlink(missing_ok=True)
        for parent in file.relative_to(folder).parents[:-1]:
            if parent.name not in _STAY_EMPTY and (folder / parent).exists() and not any((folder / parent).iterdir()):
                (folder / parent).rmdir()
