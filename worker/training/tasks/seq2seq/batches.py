"""What goes into the model: rows of a step as a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from jobs.trainer_facts import Sample
from worker.training.dataset.data import Int64, Rows
from worker.training.kernels.head_loss import IGNORED
from worker.training.steps.shape import MicroBatchShape
from worker.training.tasks.compiled import onto
from worker.training.tasks.evaluated import Evaluated, Floats, sums
from worker.training.tasks.limits import MicroBatchLimit
from worker.training.tasks.seq2seq.loss import token_loss_sum, tokens_evaluated


@dataclass(frozen=True)
class PairBatch:
    """Inputs and targets that go through the model at once, on the CPU. The methods are described in `Batch`."""

    input_ids: torch.Tensor
    """[B, S] int64."""
    attention_mask: torch.Tensor
    """[B, S] int64, 1 where there is a token."""
    labels: torch.Tensor
    """[B, T] int64, -100 where there is none."""
    target_tokens: int
    """Labels that count."""
    rows: Int64
    """[B] their numbers in the dataset."""
    input_padded: bool
    """Whether any input is shorter than S: known here, so that nobody has to ask the device."""

    @property
    def shape(self) -> MicroBatchShape:
        """Rows and padded widths."""
        return MicroBatchShape(len(self.rows), self.input_ids.shape[1], self.labels.shape[1])

    def loss_sum(self, model: PreTrainedModel) -> torch.Tensor:
        """0-dim, nats."""
        return token_loss_sum(model, *self._onto(model.device))

    def evaluated(self, model: PreTrainedModel) -> Evaluated:
        """[B * T] tokens."""
        return tokens_evaluated(model, *self._onto(model.device))

    def by_row(self, seen: Evaluated) -> tuple[Floats, Int64]:
        """[B] twice: the loss, and how many tokens are right."""
        lengths = np.full(len(self.rows), self.labels.shape[1])
        return sums(seen.losses, lengths), sums(seen.answers, lengths).astype(np.int64)

    def _onto(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        mask = onto(self.attention_mask, device) if self.input_padded else None
        return onto(self.input_ids, device), mask, onto(self.labels, device)

    def samples(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_new_tokens: int) -> list[Sample]:
        """Written greedily."""
        decode = tokenizer.decode
        written = model.generate(  # type: ignore[operator]  # typed as Tensor | Module
            input_ids=self.input_ids.to(model.device),
            attention_mask=self.attention_mask.to(model.device),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            num_beams=1,
            use_cache=True,
        )
        return [
            Sample(
                input=decode(inputs, skip_special_tokens=True),
                target=decode(labels[labels != IGNORED], skip_special_tokens=True),
                generated=decode(text, skip_special_tokens=True),
            )
            for inputs, labels, text in zip(self.input_ids, self.labels, written, strict=True)
        ]


def pair_batch(rows: Rows, chosen: Int64, pad_id: int, input_width: int, target_width: int) -> PairBatch:
    """These rows, padded to these widths."""
    input_lengths = rows.input_lengths[chosen]
    mask = np.arange(input_width) < input_lengths[:, None]
    return PairBatch(
        input_ids=torch.from_numpy(rows.gather("input", chosen, input_width, pad_id)),
        attention_mask=torch.from_numpy(mask.astype(np.int64)),
        labels=torch.from_numpy(rows.gather("target", chosen, target_width, IGNORED)),
        target_tokens=int(rows.target_lengths[chosen].sum()),
        rows=chosen,
        input_padded=bool(input_lengths.min() < input_width),
    )


def empty_batch(shape: MicroBatchShape, *, padded: bool, device: torch.device) -> PairBatch:
    """Without values; every target has the full width. `padded`: some inputs have not."""

    def tokens(width: int) -> torch.Tensor:
        return torch.empty((shape.rows, width), dtype=torch.int64, device=device)

    return PairBatch(
        input_ids=tokens(shape.input_width),
        attention_mask=tokens(shape.input_width),
        labels=tokens(shape.target_width),
        target_tokens=shape.rows * shape.target_width,
        rows=np.arange(shape.rows),
        input_padded=padded,
    )


# -- limits ------------------------------------------------------------------------------------------------------------
# How many rows of seq2seq go through the model at once.


@dataclass(frozen=True)
class PairLimit(MicroBatchLimit["PairBatch"]):
    """Inputs and targets are padded apart."""

    def batch(self, rows: Rows, chosen: Int64, pad_id: int, input_width: int, target_width: int) -> PairBatch:
        """These rows, padded to these widths."""

        return pair_batch(rows, chosen, pad_id, input_width, target_width)
