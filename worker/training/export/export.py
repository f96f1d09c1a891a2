"""`python -m worker.training export RUN_DIR FORMAT [--dtype TYPE]`: a finished model in the format of another program.

What the trained model says of held-out tokens is computed first, then the format is made, then its own program says
the same or the export is refused. `exports/FORMAT/` is complete and verified, or absent: it is made as `tmp-…`.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from jobs.disk.files import replace_folder, restore_folder, write_synced
from jobs.disk.rundir import RunDir
from jobs.errors import DeviceBusy, DiskFull, NotPrepared, Rejected
from jobs.export import (
    EXPORTS,
    REPORT,
    UNSUPPORTED,
    ExportedFile,
    ExportFormat,
    ExportReport,
    FinishedModel,
    Verification,
    dtypes_of,
    unsupported_text,
    wrong_dtype,
)
from jobs.plan import Plan
from jobs.spec import FullMethod, JobSpec
from jobs.text.units import bytes_alike, format_figure, format_number
from jobs.version import VERSION
from worker.training.adapters.lora import Widened
from worker.training.adapters.merging import Merged, computed_merged
from worker.training.checkpoints.tensorfile import write_tensors
from worker.training.dataset.data import PreparedDataset
from worker.training.export import ctranslate2_folder, gguf_file
from worker.training.export.formats import EXACT, Format, Scores, Unsupported
from worker.training.export.held_out import (
    Float64,
    HeldOutRow,
    absolute_differences,
    held_out,
    log_probabilities,
)
from worker.training.journal import Journal
from worker.training.machine.locks import try_lock
from worker.training.machine.usage import Cache
from worker.training.models.manifest import MANIFEST, README, delivered, describe
from worker.training.models.model_files import GENERATION_CONFIG, SINGLE, SMALL, read_config
from worker.training.network.model import LoadedModel, write_model
from worker.training.readme import base_model, exported
from worker.training.result import check_merged
from worker.training.start import open_stores
from worker.training.tasks.registry import task_of
from worker.training.tasks.task import Config, Task
from worker.training.trained import adapters_of, load_delivered

CPU = torch.device("cpu")


# -- what is exported ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """A finished job, and what there is of its model."""

    run: RunDir
    spec: JobSpec
    plan: Plan
    data: PreparedDataset
    base: Path
    """The folder of the prepared model."""
    adapters: Path | None
    """Folder of the adapters that were trained; None: all weights were."""
    merged: bool
    """Whether model/ is the whole model."""

    @classmethod
    def of(cls, run: RunDir, journal: Journal) -> Subject:
        """Raises Rejected (`no_model`, `model_damaged`, `not_prepared`)."""
        delivered(run, journal.progress)
        spec, plan = run.spec(), run.plan()
        lora = not isinstance(spec.method, FullMethod)
        try:
            base, data = open_stores(run, plan, journal, weights=lora)
        except NotPrepared as error:
            raise Rejected(
                f"{error}; without them nothing can be compared",
                code="not_prepared",
                hint=f"`longhaul clone {run.id}` prepares the same again; cancel the new job once it is prepared",
            ) from error
        merged = (run.model / SINGLE).exists()
        return cls(run, spec, plan, data, base, adapters_of(run), merged)

    @property
    def finished(self) -> FinishedModel:
        """What decides which formats it has."""
        config = read_config(self.run.model if self.merged else self.base, "its model")
        return FinishedModel.of(self.run.id, self.spec, self.plan.task, config["model_type"])

    def opened(self, *, unmerged: bool) -> LoadedModel:
        """The trained model, loaded with the guards of training, and computed as transformers does."""
        return load_delivered(self.run, task_of(self.spec, self.plan.task, self.plan.data), CPU, unmerged=unmerged)


def merged_source(subject: Subject, loaded: LoadedModel, folder: Path, dtype: torch.dtype, journal: Journal) -> Path:
    """The whole model with its adapters merged, as a folder that `from_pretrained` opens."""
    merged, file = Merged(dtype), subject.run.model / GENERATION_CONFIG
    write_model(
        loaded,
        folder,
        {".": (merged, lambda to: write_tensors(to, loaded.delivered(merged), journal))},
        base=base_model(subject.plan),
        generation=None,
        readme="",
    )
    if file.exists():
        shutil.copyfile(file, folder / GENERATION_CONFIG)
    return folder


def adapter_source(subject: Subject, folder: Path) -> Path:
    """The adapters with the tokenizer and what else is beside them."""
    assert subject.adapters is not None
    shutil.copytree(subject.adapters, folder, ignore=shutil.ignore_patterns(README, MANIFEST))
    for name in SMALL[1:]:  # config.json only where the adapters have one
        if (subject.run.model / name).exists() and not (folder / name).exists():
            shutil.copyfile(subject.run.model / name, folder / name)
    return folder


# -- formats that transformers and peft open -----------------------------------------------------------------


class MergedFolder:
    """See `Format`. What it is made from is the export already."""

    packages: tuple[str, ...] = ("transformers", "safetensors")

    def __init__(self, task: Task, name: str) -> None:
        self._task, self._name = task, name

    @property
    def runtime(self) -> str:
        """See `Format`."""
        return f"transformers {version('transformers')}"

    def check(self, config: Config) -> None:
        """See `Format`: any model."""

    def write(self, source: Path, folder: Path, dtype: str, progress: Callable[[], None]) -> None:
        """See `Format`."""
        shutil.copytree(source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(MANIFEST))

    def scores(
        self, folder: Path, source: Path, dtype: str, rows: Sequence[HeldOutRow], progress: Callable[[], None]
    ) -> Scores:
        """See `Format`."""
        model = self._task.auto_class().from_pretrained(folder, dtype="auto", local_files_only=True)
        with Widened(torch.float32):
            return Scores(log_probabilities(model, self._name, rows, progress), EXACT, "float32")

    def usage(self, folder: Path) -> list[str]:
        """See `Format`: as the page of the model says."""
        return []


class AdapterFolder(MergedFolder):
    """See `Format`. `base`: the folder of the model beside which the adapters were trained."""

    packages = ("peft", "transformers", "safetensors")

    def __init__(self, task: Task, name: str, base: Path) -> None:
        super().__init__(task, name)
        self._base = base

    @property
    def runtime(self) -> str:
        """See `Format`."""
        return f"peft {version('peft')}"

    def scores(
        self, folder: Path, source: Path, dtype: str, rows: Sequence[HeldOutRow], progress: Callable[[], None]
    ) -> Scores:
        """See `Format`."""
        from peft import PeftModel

        base = self._task.auto_class().from_pretrained(self._base, dtype="auto", local_files_only=True)
        model = PeftModel.from_pretrained(base, str(folder), autocast_adapter_dtype=False)
        with Widened(torch.float32):
            return Scores(log_probabilities(model, self._name, rows, progress), EXACT, "float32")


LEAST_SHARE = 4
"""One in so many held-out tokens must be compared."""
AS_TRAINED = "as trained"
_ROUNDED = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float16": "float16"}
"""Types of weights that are written as torch rounds them, by its names; others are made from float32."""
log = logging.getLogger("longhaul.trainer")


# -- the export ----------------------------------------------------------------------------------------------


def export(run: RunDir, journal: Journal, format: ExportFormat, dtype: str | None) -> ExportReport:
    """Make and verify it. `dtype` None: that of the model. What was there of the same format is replaced.

    Raises Rejected (`no_model`, `model_damaged`, `not_prepared`, `nothing_to_merge`, `no_adapter`,
    `export_unsupported`, `export_differs`, `export_damaged`), DeviceBusy where the same is being made already,
    DiskFull.
    """
    folder = run.path / EXPORTS
    if folder.is_symlink():
        raise Rejected(
            f"{EXPORTS} of job {run.id} is a link, which is not followed",
            code="export_damaged",
            hint=f"remove {folder} on the server",
        )
    folder.mkdir(exist_ok=True)
    lock = try_lock(folder / f".{format}.lock")
    if lock is None:
        raise DeviceBusy(f"{format} of job {run.id} is being made already", hint="wait for it")
    temporary = folder / f"tmp-{format}"
    with lock:
        restore_folder(folder / format)
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            journal.phase("load")
            subject = Subject.of(run, journal)
            return _made(subject, journal, format, dtype, temporary)
        except Unsupported as error:
            raise Rejected(
                unsupported_text(format, str(error)), code=UNSUPPORTED, hint=subject.finished.instead_of(format)
            ) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _made(subject: Subject, journal: Journal, format: ExportFormat, dtype: str | None, temporary: Path) -> ExportReport:
    run = subject.run
    asked = dtype or default_dtype(format, subject.plan.resolved.dtype)
    with_adapters = subject.adapters is not None and (format is ExportFormat.ADAPTER or not subject.merged)
    check_asked(subject, format, dtype)
    loaded = subject.opened(unmerged=format is ExportFormat.ADAPTER)
    made = format_of(format, subject, loaded)
    made.check(loaded.config)
    check_room(run, temporary.parent, 3 * loaded.parameter_bytes)
    rows = held_out(subject.plan.task, subject.data)
    temporary.mkdir()

    journal.phase("evaluate")
    trained = said(loaded, subject.plan.task, rows, journal)
    expected, rounding = trained, None
    journal.phase("save")
    if format is ExportFormat.ADAPTER:
        source = adapter_source(subject, temporary / "source")
    elif with_adapters:
        check_merged(loaded, subject.data, journal, Cache(CPU))
        rounded = _ROUNDED.get(asked)
        if rounded is not None:
            with computed_merged(loaded.model, rounded=True):
                expected = said(loaded, subject.plan.task, rows, journal)
            rounding = float(absolute_differences(expected, trained).mean())
        source = merged_source(subject, loaded, temporary / "source", getattr(torch, rounded or "float32"), journal)
    else:
        source = run.model
    usage_of = loaded.task.auto_class().__name__, loaded.task.layout(loaded.config)
    del loaded

    target = temporary / "export"
    target.mkdir()
    made.write(source, target, asked, journal.progress)
    journal.phase("evaluate")
    found = made.scores(target, source, asked, rows, journal.progress)
    differences = absolute_differences(found.log_probabilities, expected)
    asked_tokens, differences = len(differences), differences[~np.isnan(differences)]
    if len(differences) * LEAST_SHARE < asked_tokens:
        raise Rejected(
            f"{made.runtime} gives the log-probability of only {len(differences)} of {asked_tokens} held-out tokens",
            code="export_differs",
            hint="export to ctranslate2, whose check reads every token",
        )
    verification = Verification(
        runtime=made.runtime,
        computed_in=found.computed_in,
        rows=len(rows),
        tokens=len(differences),
        log_probability=float(np.concatenate(trained).mean()),
        difference=float(differences.mean()),
        worst=float(differences.max()),
        limit=found.limit,
        rounding=rounding,
        tokenizer_texts=found.tokenizer_texts,
    )
    refuse_differing(verification, float(np.nanmean(np.concatenate(found.log_probabilities))), format)
    journal.phase("save")
    usage = made.usage(target)
    if format is ExportFormat.MERGED:
        usage = Merged(getattr(torch, asked)).opening(usage_of[0], base_model(subject.plan), usage_of[1])
    page = exported((run.model / README).read_text(), format, usage, sentence(verification, asked))
    write_synced(target / README, page.encode())
    report = ExportReport(
        format=format,
        dtype=asked,
        job=run.id,
        made_at=time.time(),
        versions={"longhaul": VERSION, "torch": version("torch")} | {name: version(name) for name in made.packages},
        verification=verification,
        files=[ExportedFile(name=name, **each) for name, each in describe(target, progress=journal.progress).items()],
    )
    write_synced(target / REPORT, report.model_dump_json(indent=1).encode() + b"\n")
    replace_folder(target, temporary.parent / format)
    log.info("exported to %s: %s", format, sentence(verification, asked))
    return report


def default_dtype(format: ExportFormat, dtype: str) -> str:
    """The type of the weights of a model of this type, where the format has it; else one that loses nothing."""
    match format:
        case ExportFormat.ADAPTER:
            return AS_TRAINED
        case ExportFormat.GGUF:
            return "bf16" if dtype == "bfloat16" else "f32"
        case _:
            return dtype if dtype in dtypes_of(format, dtype) else "float32"


def check_asked(subject: Subject, format: ExportFormat, dtype: str | None) -> None:
    """Raises Rejected (`no_adapter`, `nothing_to_merge`, `export_unsupported`)."""
    model = subject.finished
    if (refusal := model.refusal(format)) is not None:
        code, reason = refusal
        raise Rejected(reason, code=code, hint=model.instead_of(format))
    if (why := wrong_dtype(format, subject.plan.resolved.dtype, dtype)) is not None:
        raise Rejected(why, code=UNSUPPORTED, hint="leave the type out, or name one of these")


def format_of(format: ExportFormat, subject: Subject, loaded: LoadedModel) -> Format:
    """What makes it."""
    match format:
        case ExportFormat.MERGED:
            return MergedFolder(loaded.task, subject.plan.task)
        case ExportFormat.ADAPTER:
            return AdapterFolder(loaded.task, subject.plan.task, subject.base)
        case ExportFormat.CTRANSLATE2:
            return ctranslate2_folder.CTranslate2()
        case ExportFormat.GGUF:
            return gguf_file.Gguf()


def said(loaded: LoadedModel, task: str, rows: list[HeldOutRow], journal: Journal) -> list[Float64]:
    """By the trained model, in fp32."""
    with Widened(torch.float32):
        return log_probabilities(loaded.model, task, rows, journal.progress)


def check_room(run: RunDir, folder: Path, needed: int) -> None:
    """Raises DiskFull."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        size, room = bytes_alike(needed, free)
        raise DiskFull(f"the export may need {size}, and {room} are free", hint="make room in the runs directory")


def refuse_differing(found: Verification, said: float, format: str) -> None:
    """Raises Rejected (`export_differs`)."""
    if not found.difference <= found.limit:  # also where it is no number
        raise Rejected(
            f"{found.runtime} opens the export, but gives a held-out token {format_figure(said)} nats where the "
            f"trained model gives {format_figure(found.log_probability)}: the mean difference is "
            f"{format_number(found.difference, 2)}, and {found.limit:g} is allowed",
            code="export_differs",
            hint=f"nothing was kept; report it, with the versions of {format}'s packages",
        )


def sentence(found: Verification, dtype: str) -> str:
    """For people."""
    rounded = (
        ""
        if found.rounding is None
        else f" (rounding the merged weights to {dtype} changed {format_number(found.rounding, 2)})"
    )
    return (
        f"{found.runtime} gives the {found.tokens:,} tokens of {found.rows} held-out rows the log-probabilities of the "
        f"trained model, up to {format_number(found.difference, 2)} nats on average and "
        f"{format_number(found.worst, 2)} at most{rounded}; weights: "
        f"{dtype}; computed with: {found.computed_in}"
    )
