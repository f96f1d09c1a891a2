"""What goes into a classifier: rows of a step as a micro-batch.

Rows are padded at their ends. Where none is, there is no attention mask, and attention takes its fastest kernel.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from jobs.trainer_facts import Sample
from worker.training.dataset.data import Int64, Rows
from worker.training.steps.order import rounded
from worker.training.steps.shape import MicroBatchShape
from worker.training.tasks.classification.fused import ClassLoss, HeadLoss, logits_of
from worker.training.tasks.classification.pairs import decoded, end_of, token_types
from worker.training.tasks.compiled import onto
from worker.training.tasks.evaluated import Answers, Evaluated, Floats
from worker.training.tasks.limits import MicroBatchLimit


@dataclass(frozen=True)
class ClassBatch:
    """Texts that go through the model at once, on the CPU. The methods are described in `Batch`."""

    input_ids: torch.Tensor
    """[B, S] int64."""
    attention_mask: torch.Tensor | None
    """[B, S] int64, 1 where there is a token; None: no row is padded."""
    labels: torch.Tensor
    """As of `HeadLoss.labels`."""
    rows: Int64
    """[B] their numbers in the dataset."""
    lengths: Int64
    """[B] tokens of each."""
    loss: HeadLoss
    token_types: torch.Tensor | None = None
    """[B, S] int64, of pairs; None: the model is told of none."""

    @property
    def target_tokens(self) -> int:
        """What the loss counts: rows."""
        return len(self.rows)

    @property
    def shape(self) -> MicroBatchShape:
        """Rows and padded width. Labels take the place of one token."""
        return MicroBatchShape(len(self.rows), self.input_ids.shape[1], 1)

    def loss_sum(self, model: PreTrainedModel) -> torch.Tensor:
        """0-dim."""
        return self.loss.sum(self.logits(model), onto(self.labels, model.device))

    def evaluated(self, model: PreTrainedModel) -> Evaluated:
        """[B] rows."""
        logits = self.logits(model)
        losses = self.loss.of_rows(logits, onto(self.labels, model.device))
        return Evaluated(losses.sum(), losses, self.loss.answers(logits))

    def by_row(self, seen: Evaluated) -> tuple[Floats, Answers]:
        """[B] the loss; [B], or [B, K] of several labels, what the model says."""
        return seen.losses.double().cpu().numpy(), seen.answers.cpu().numpy()

    def samples(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_new_tokens: int) -> list[Sample]:
        """The label of each row, and what the model says."""
        known: Any = model.config.id2label  # by number
        found = []
        logits = self.logits(model).float().cpu()
        for ids, mask, label, said in zip(self.input_ids, self._masks(), self.labels, logits, strict=True):
            target, answer, probability = self.loss.words(label, said, known)
            text = _texts(tokenizer, ids if mask is None else ids[mask.bool()])
            found.append(Sample(input=text, target=target, generated=answer, probability=probability))
        return found

    def _masks(self) -> Iterable[torch.Tensor | None]:
        return [None] * len(self.rows) if self.attention_mask is None else self.attention_mask

    def logits(self, model: PreTrainedModel) -> torch.Tensor:
        """[B, K]"""
        mask = None if self.attention_mask is None else onto(self.attention_mask, model.device)
        types = None if self.token_types is None else onto(self.token_types, model.device)
        return logits_of(model, onto(self.input_ids, model.device), mask, self.lengths, types)


def class_batch(
    rows: Rows, chosen: Int64, pad_id: int, width: int, loss: HeadLoss, separator: int | None = None
) -> ClassBatch:
    """These rows, padded to this width. `separator`: behind the first of a row, token types are 1; None: none."""
    lengths = rows.input_lengths[chosen].astype(np.int64)
    mask, within = None, np.arange(width) < lengths[:, None]
    if lengths.min() < width:
        mask = torch.from_numpy(within.astype(np.int64))
    ids = rows.gather("input", chosen, width, pad_id)
    return ClassBatch(
        input_ids=torch.from_numpy(ids),
        attention_mask=mask,
        labels=loss.labels(rows, chosen),
        rows=chosen,
        lengths=lengths,
        loss=loss,
        token_types=None if separator is None else torch.from_numpy(token_types(ids, separator) * within),
    )


def empty_batch(
    shape: MicroBatchShape, *, padded: bool, device: torch.device, loss: HeadLoss, typed: bool = False
) -> ClassBatch:
    """Without values. `padded`: some rows are shorter than the widest. `typed`: tokens have types."""

    def tokens() -> torch.Tensor:
        return torch.empty((shape.rows, shape.input_width), dtype=torch.int64, device=device)

    return ClassBatch(
        input_ids=tokens(),
        attention_mask=tokens() if padded else None,
        labels=loss.empty_labels(shape.rows, device),
        rows=np.arange(shape.rows),
        lengths=np.full(shape.rows, shape.input_width),
        loss=loss,
        token_types=tokens() if typed else None,
    )


def _texts(tokenizer: PreTrainedTokenizerBase, tokens: torch.Tensor) -> str:
    found = decoded(tokens.tolist(), end_of(tokenizer), partial(tokenizer.decode, skip_special_tokens=True))
    return "\n".join(text.strip() for text in found)


# -- limits ------------------------------------------------------------------------------------------------------------
# How many texts go through a classifier at once.


@dataclass(frozen=True)
class ClassLimit(MicroBatchLimit["ClassBatch"]):
    """Texts are padded; labels, however many, count as one token."""

    least_positions: ClassVar[int] = 4096
    """Encoders are small: what a micro-batch costs besides its positions, launches on a GPU and gradients that are
    cleared and added up on a CPU, is more of its time."""
    loss: HeadLoss = field(default_factory=lambda: ClassLoss(1))
    separator: int | None = None
    """As of `class_batch`."""

    def with_loss(self, loss: HeadLoss) -> ClassLimit:
        """With which its micro-batches are learned."""
        return replace(self, loss=loss)

    @classmethod
    def longest_of(cls, rows: Rows) -> tuple[int, int]:
        """See `MicroBatchLimit`."""
        return int(rounded(rows.input_lengths).max()), 1

    def widths(self, rows: Rows, chosen: Int64) -> tuple[int, int]:
        """See `MicroBatchLimit`."""
        return int(rounded(rows.input_lengths[chosen]).max()), 1

    def batch(self, rows: Rows, chosen: Int64, pad_id: int, input_width: int, target_width: int) -> ClassBatch:
        """These rows, padded to this width."""

        return class_batch(rows, chosen, pad_id, input_width, self.loss, self.separator)
