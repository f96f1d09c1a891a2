"""What the export asks of a format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from worker.training.export.held_out import Float64, HeldOutRow
from worker.training.tasks.task import Config

EXACT = 1e-4
"""Nats a token: what is left of one computation in float32 by another."""


class Unsupported(Exception):
    """Why this model has no such form."""


@dataclass(frozen=True)
class Scores:
    """What the runtime of a format makes of held-out rows."""

    log_probabilities: Sequence[Float64]
    """[rows] of [tokens]."""
    limit: float
    """Mean absolute difference (nats per token) to the trained model that it may have."""
    computed_in: str
    tokenizer_texts: int | None = None
    """Held-out texts that it cuts into the same tokens; None: it has no tokenizer of its own."""


class Format(Protocol):
    """A format of weights that another program opens."""

    @property
    def runtime(self) -> str:
        """That program, with its version."""

    @property
    def packages(self) -> tuple[str, ...]:
        """Python packages that make and open it."""

    def check(self, config: Config) -> None:
        """Raises Unsupported for what `FinishedModel.refusal` cannot tell."""

    def write(self, source: Path, folder: Path, dtype: str, progress: Callable[[], None]) -> None:
        """Make the files in an existing folder, from a folder that `from_pretrained` opens. Raises Unsupported."""

    def scores(
        self, folder: Path, source: Path, dtype: str, rows: Sequence[HeldOutRow], progress: Callable[[], None]
    ) -> Scores:
        """What is in the folder, opened by the runtime. Raises Rejected."""

    def usage(self, folder: Path) -> list[str]:
        """Lines of Markdown: how it is used."""
