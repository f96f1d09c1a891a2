"""What tasks ask a model before it trains: rows for it, the mode in which it answers, and its refusal."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from jobs.errors import Rejected, StageError
from worker.training.machine.out_of_memory import is_out_of_memory

log = logging.getLogger("longhaul.trainer")
_LENGTHS = (7, 12)
_OF_A_LIBRARY = re.compile(
    r"(?!.*_(?:INVALID_VALUE|NOT_SUPPORTED|BAD_PARAM)\b)"
    r".*\b(?:(?:CUDA(?: driver)?|HIP|cu(?:DNN|BLAS|FFT|SOLVER|SPARSE)|NCCL|NVRTC|Triton) [Ee]rror\b|CU[A-Z]+_STATUS_)",
    re.DOTALL,
)
"""How torch words what a library of the GPU answers: no fault of the model, but for what it was asked."""


def short_rows(model: PreTrainedModel) -> list[torch.Tensor]:
    """Two rows of 7 and 12 token numbers that every vocabulary has, none of the first few, which may be special."""
    embedding: Any = model.get_input_embeddings()
    size = int(embedding.weight.shape[0])
    first = torch.arange(max(_LENGTHS), device=model.device) * 7 % max(1, size - 8) + min(8, size - 1)
    return [(first[:length] + place).clamp(max=size - 1) for place, length in enumerate(_LENGTHS)]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout and gradients; afterwards the model is in the mode in which it was."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


@dataclass(frozen=True)
class SelfCheck:
    """How a model is refused that does something else than training takes for granted."""

    kind: str
    """What it should be, such as `an encoder`."""
    hint: str

    def refused(self, model: nn.Module, what: str) -> Rejected:
        """The error (`self_check_failed`)."""
        return Rejected(
            f"model: {type(model).__name__} does not compute what training takes for granted of {self.kind}: {what}",
            code="self_check_failed",
            param="model",
            hint=self.hint,
        )

    @contextmanager
    def errors(self, model: nn.Module) -> Iterator[None]:
        """Whatever the model raises inside refuses it, but for a lack of memory and a fault of the GPU or its
        libraries: that is told as it is, and tried again.
        """
        try:
            yield
        except (StageError, torch.AcceleratorError):
            raise
        except Exception as error:  # families raise whatever they like
            if is_out_of_memory(error) or (isinstance(error, RuntimeError) and _OF_A_LIBRARY.match(str(error))):
                raise
            log.warning("%s raised in its self-check", type(model).__name__, exc_info=error)
            line = [*str(error).strip().splitlines(), ""][0][:300]
            raise self.refused(model, f"{type(error).__name__}: {line}") from error

    @contextmanager
    def asking(self, model: nn.Module) -> Iterator[None]:
        """`errors` and `evaluating`."""
        with self.errors(model), evaluating(model):
            yield
