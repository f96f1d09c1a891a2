"""What is exported: a finished job with its data, its model as it was trained, and folders made of it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from jobs.disk.rundir import RunDir
from jobs.errors import NotPrepared, Rejected
from jobs.export import FinishedModel
from jobs.plan import Plan
from jobs.spec import FullMethod, JobSpec
from worker.training.adapters.merging import Merged
from worker.training.checkpoints.tensorfile import write_tensors
from worker.training.dataset.data import PreparedDataset
from worker.training.journal import Journal
from worker.training.models.manifest import MANIFEST, README, delivered
from worker.training.models.model_files import GENERATION_CONFIG, SINGLE, SMALL, read_config
from worker.training.network.model import LoadedModel, write_model
from worker.training.readme import base_model
from worker.training.start import open_stores
from worker.training.tasks.registry import task_of
from worker.training.trained import adapters_of, load_delivered

CPU = torch.device("cpu")


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
