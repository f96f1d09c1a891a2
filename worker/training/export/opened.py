"""Formats that transformers and peft open: the whole model with its adapters merged, and the adapters alone."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import torch

from worker.training.adapters.lora import Widened
from worker.training.export.formats import EXACT, Scores
from worker.training.export.held_out import HeldOutRow, log_probabilities
from worker.training.models.manifest import MANIFEST
from worker.training.tasks.task import Config, Task


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
