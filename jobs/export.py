"""A finished model in the format of another program: what can be asked for, and what was made (`exports/FORMAT/`)."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from jobs.frozen import Frozen
from jobs.spec import Part

EXPORTS = "exports"
"""Folder of a run directory."""
REPOSITORY = r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$"
LICENSE = r"^[a-z0-9][a-z0-9.-]{0,63}$"
REPORT = "export.json"
"""In the folder of an export; written last."""


class ExportFormat(StrEnum):
    """What a model can be exported to."""

    MERGED = "merged"
    ADAPTER = "adapter"
    CTRANSLATE2 = "ctranslate2"
    GGUF = "gguf"


DType = Literal["bfloat16", "float16", "float32", "int8", "bf16", "f32", "q8_0"]
DTYPES: dict[ExportFormat, tuple[DType, ...]] = {
    ExportFormat.CTRANSLATE2: ("bfloat16", "float32", "int8"),
    ExportFormat.GGUF: ("bf16", "f32", "q8_0"),
}
"""By format, the types in which it has any model's weights."""


def dtypes_of(format: ExportFormat, dtype: str) -> tuple[str, ...]:
    """The types in which a format can have the weights of a model of this type; none: as they were trained."""
    match format:
        case ExportFormat.MERGED:
            return tuple(dict.fromkeys((dtype, "float32")))
        case ExportFormat.ADAPTER:
            return ()
        case _:
            return DTYPES[format]


def wrong_dtype(format: ExportFormat, dtype: str, asked: str | None) -> str | None:
    """Why a model of this type cannot be written so; None: it can."""
    known = dtypes_of(format, dtype)
    if asked is None or asked in known:
        return None
    written = f"is written in {' or '.join(known)}" if known else "has the adapters as they were trained"
    return f"{format} of this model {written}, not in {asked}"


class ExportRequest(Part):
    """What is asked for."""

    format: Annotated[ExportFormat, Field(strict=False)]
    """`merged` (the model with its LoRA adapters in it), `adapter`, `ctranslate2` or `gguf`."""
    dtype: DType | None = None
    """Of the weights; null: that of the model, where the format has it. `merged` has that of the model and `float32`,
    `ctranslate2` has `bfloat16`, `float32` and `int8`, `gguf` has `bf16`, `f32` and `q8_0`."""


class PushRequest(Part):
    """What is uploaded to the hub."""

    repository: Annotated[str, Field(pattern=REPOSITORY, max_length=96)]
    """`organisation/name`; the organisation may be a user."""
    license: Annotated[str, Field(pattern=LICENSE)]
    """Of the model, as the hub names it: `apache-2.0`, `mit`, `cc-by-4.0`, `other`."""
    public: bool = False
    """Whether a repository that is made is public; one that exists stays as it is."""
    export: Annotated[ExportFormat, Field(strict=False)] | None = None
    """This export, in place of `model/`."""

    @field_validator("repository", mode="before")
    @classmethod
    def _in_words(cls, given: object) -> object:
        """Before the regular expression, which tells people less."""
        if isinstance(given, str) and re.fullmatch(REPOSITORY, given) is None:
            raise ValueError(
                "must be organisation/name, as the hub has it, such as acme/recipes: letters, digits, dots, _ and -"
            )
        return given

    @field_validator("license", mode="before")
    @classmethod
    def _license_in_words(cls, given: object) -> object:
        """As above."""
        if isinstance(given, str) and re.fullmatch(LICENSE, given) is None:
            raise ValueError(
                "must be a licence as the hub names it, in small letters, such as apache-2.0, mit or other"
            )
        return given


class ExportedFile(Frozen):
    """A file of an export."""

    name: str
    """Relative to the folder of the export."""
    bytes: int
    """Its size."""
    sha256: str
    """Of its content, in hex digits."""


class Verification(Frozen):
    """How the export differs from the trained model: of held-out tokens, by their log-probabilities (nats)."""

    runtime: str
    """The program that opened the export, with its version."""
    computed_in: str
    """How that program computed."""
    rows: int
    """Held-out rows that were compared."""
    tokens: int
    """Of the targets of these rows, without those of which the runtime says nothing; of a classifier, their labels."""
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
    """`merged`, `adapter`, `ctranslate2` or `gguf`."""
    dtype: str
    """Of the weights; of adapters `as trained`."""
    job: str
    """Whose model it is."""
    made_at: float
    """Seconds since 1970."""
    versions: dict[str, str] = Field(default_factory=dict)
    """Of Longhaul, torch and the packages that made and opened it."""
    verification: Verification
    """How it was compared with the trained model."""
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
