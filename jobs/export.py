"""A finished model in the format of another program: what can be asked for, and what was made (`exports/FORMAT/`)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from jobs.frozen import Frozen, Part
from jobs.spec import FullMethod, JobSpec

EXPORTS = "exports"
"""Folder of a run directory."""
REPOSITORY = r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$"
LICENSE = r"^[a-z0-9][a-z0-9.-]{0,63}$"
UNSUPPORTED = "export_unsupported"
REPORT = "export.json"
"""In the folder of an export; written last."""


class ExportFormat(StrEnum):
    """What a model can be exported to."""

    MERGED = "merged"
    ADAPTER = "adapter"
    CTRANSLATE2 = "ctranslate2"
    GGUF = "gguf"


GGUF_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "phi3")
"""`model_type` of the models that are written as GGUF."""
_WINDOWS = "the attention windows, which alternate between layers,"
NOT_WRITTEN = {
    "gemma2": f"{_WINDOWS} and the caps on logits",
    "gemma3_text": f"{_WINDOWS} and the two rotary bases",
}
"""Families that llama.cpp knows, and what of them is missing here."""


@dataclass(frozen=True)
class FinishedModel:
    """What of a finished model decides which formats it has."""

    job: str
    task: str
    family: str | None
    """`model_type` of its config.json; None: not known."""
    adapters: bool
    """Whether it has LoRA adapters."""
    whole: bool
    """Whether model/ is the whole model."""

    @classmethod
    def of(cls, job: str, spec: JobSpec, task: str, family: str | None) -> FinishedModel:
        """The model that a job delivers."""
        if isinstance(spec.method, FullMethod):
            return cls(job, task, family, adapters=False, whole=True)
        return cls(job, task, family, adapters=True, whole=spec.method.merge)

    def refusal(self, format: ExportFormat) -> tuple[str, str] | None:
        """Code and reason why it cannot have this format; None: it may, and the format's own program decides."""
        match format:
            case _ if self.task == "regression":
                return UNSUPPORTED, unsupported_text(format, "no export of a model that gives scores is verified yet")
            case ExportFormat.MERGED if self.whole:
                return "nothing_to_merge", f"model/ of job {self.job} is the whole model already"
            case ExportFormat.ADAPTER if not self.adapters:
                return "no_adapter", f"job {self.job} trained every weight: it has no adapter"
            case ExportFormat.CTRANSLATE2 if self.task == "classification":
                return UNSUPPORTED, unsupported_text(format, "it classifies")
            case ExportFormat.GGUF if self.family in NOT_WRITTEN:
                missing = NOT_WRITTEN[self.family]
                return UNSUPPORTED, unsupported_text(format, f"Longhaul does not write {missing} of {self.family}")
            case ExportFormat.GGUF if self.task != "causal":
                return UNSUPPORTED, unsupported_text(format, "it is not a causal model")
            case ExportFormat.GGUF if self.family not in (None, *GGUF_FAMILIES):
                return UNSUPPORTED, unsupported_text(format, f"{self.family} is none of {', '.join(GGUF_FAMILIES)}")
        return None

    @property
    def formats(self) -> tuple[ExportFormat, ...]:
        """Those that it may have."""
        return tuple(each for each in ExportFormat if self.refusal(each) is None)

    def instead_of(self, format: ExportFormat) -> str:
        """What to do where it does not have this one."""
        others = [f"`longhaul export {self.job} --to {each}`" for each in self.formats if each is not format]
        return " or ".join([*others, f"`longhaul download {self.job}` for model/ as it is"])


def unsupported_text(format: ExportFormat, why: str) -> str:
    """What is said of a model that has no such form."""
    return f"this model cannot be exported to {format}: {why}"


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


def _matching(pattern: str, said: str) -> BeforeValidator:
    """Before the pattern of the field, which tells people less."""

    def check(given: object) -> object:
        if isinstance(given, str) and re.fullmatch(pattern, given) is None:
            raise ValueError(said)
        return given

    return BeforeValidator(check)


class PushRequest(Part):
    """What is uploaded to the hub."""

    repository: Annotated[
        str,
        Field(pattern=REPOSITORY, max_length=96),
        _matching(
            REPOSITORY,
            "must be organisation/name, as the hub has it, such as acme/recipes: letters, digits, dots, _ and -",
        ),
    ]
    """`organisation/name`; the organisation may be a user."""
    license: Annotated[
        str,
        Field(pattern=LICENSE),
        _matching(LICENSE, "must be a licence as the hub names it, in small letters, such as apache-2.0, mit or other"),
    ]
    """Of the model, as the hub names it: `apache-2.0`, `mit`, `cc-by-4.0`, `other`."""
    public: bool = False
    """Whether a repository that is made is public; one that exists stays as it is."""
    export: Annotated[ExportFormat, Field(strict=False)] | None = None
    """This export, in place of `model/`."""


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
