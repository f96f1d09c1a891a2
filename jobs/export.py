"""A finished model in the format of another program: what can be asked for, and what was made (`exports/FORMAT/`)."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from pydantic import Field

from jobs.frozen import Frozen

EXPORTS = "exports"
"""Folder of a run directory."""
REPORT = "export.json"
"""In the folder of an export; written last."""


class ExportFormat(StrEnum):
    """What a model can be exported to."""

    MERGED = "merged"
    ADAPTER = "adapter"
    CTRANSLATE2 = "ctranslate2"
    GGUF = "gguf"


DTYPES: dict[ExportFormat, tuple[str, ...]] = {
    ExportFormat.MERGED: ("bfloat16", "float16", "float32"),
    ExportFormat.ADAPTER: (),
    ExportFormat.CTRANSLATE2: ("bfloat16", "float32", "int8"),
    ExportFormat.GGUF: ("bf16", "f32", "q8_0"),
}
"""By format, the types in which its weights can be written; of adapters only their own."""


class ExportedFile(Frozen):
    """A file of an export."""

    name: str
    """Relative to the folder of the export."""
    bytes: int
    sha256: str


class Verification(Frozen):
    """How the export differs from the trained model: of held-out tokens, by their log-probabilities (nats)."""

    runtime: str
    """The program that opened the export, with its version."""
    computed_in: str
    """How that program computed."""
    rows: int
    tokens: int
    """Of the targets of these rows; of a classifier, their labels."""
    log_probability: float
    """Mean of a token under the trained model, computed in float32."""
    difference: float
    """Mean of the absolute differences, token by token."""
    worst: float
    """The largest of them."""
    limit: float
    """What `difference` must not exceed."""
    rounding: float | None = None
    """Mean absolute difference that comes of rounding merged weights to `dtype`, which is not in `difference`; null: no
    weights were merged, or they were not rounded."""
    tokenizer_texts: int | None = None
    """Held-out texts that the runtime's own tokenizer cuts into the same tokens; null: it has none."""


class ExportReport(Frozen):
    """export.json: an export that is complete and verified."""

    format: ExportFormat
    dtype: str
    """Of the weights; of adapters `as trained`."""
    job: str
    made_at: float
    """Seconds since 1970."""
    versions: dict[str, str] = Field(default_factory=dict)
    verification: Verification
    files: list[ExportedFile]
    """All but export.json itself."""

    @property
    def bytes(self) -> int:
        """Of all files."""
        return sum(file.bytes for file in self.files)


def exports_of(run: Path) -> list[ExportReport]:
    """What a run directory has. Raises OSError, ValueError (pydantic's) where one cannot be read."""
    files = sorted(run.glob(f"{EXPORTS}/*/{REPORT}"))
    return [
        ExportReport.model_validate_json(file.read_bytes()) for file in files if file.parent.name in set(ExportFormat)
    ]
