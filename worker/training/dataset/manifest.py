"""What lies in the folder of a prepared dataset: `manifest.json`, written last."""

from __future__ import annotations

from jobs.dataset_report import DatasetSummary
from jobs.frozen import Frozen


class PreparedFile(Frozen):
    """One file of the folder."""

    bytes: int
    sha256: str


class Manifest(Frozen):
    """manifest.json, written last."""

    format: int
    dtype: str
    """Of a token, as numpy writes it."""
    report: DatasetSummary
    ends: tuple[int, ...] = ()
    """Rows kept up to the end of each source. Earlier versions did not say."""
    files: dict[str, PreparedFile]
