"""Other revisions of this repository, as files."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def short(revision: str) -> str:
    """The abbreviated hash of a commit."""
    return _git("rev-parse", "--short", f"{revision}^{{commit}}").decode().strip()


def unpack(revision: str, folder: Path) -> None:
    """The files of a revision, without its history."""
    with tarfile.open(fileobj=io.BytesIO(_git("archive", revision))) as archive:
        archive.extractall(folder, filter="data")


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
