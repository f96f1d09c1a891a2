"""What goes into a causal model: rows of a step as a micro-batch.

Rows are padded at their ends, and there is no attention mask: a causal model looks at no later position, so no token of
a row sees the padding behind it, and what becomes of the padding is not looked at. Attention then takes its fastest
kernel, and the numbers are those of each row by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from jobs.trainer_facts import Sample
from worker.training.dataset.data import Int64, Rows
from worker.training.steps.shape import MicroBatchShape
from worker.training.tasks.causal.fused import learned_evaluated, learned_loss_sum
from worker.training.tasks.compiled import onto
from worker.training.tasks.evaluated import Evaluated, Floats, sums
from worker.training.tasks.limits import MicroBatchLimit

LEAST_PROMPT = 32
"""Tokens of a plain text that a sample begins with, or half of them."""


@dataclass(frozen=True)
class CausalBatch:
    """Rows that go through the model at once, on the CPU. The methods are described in `Batch`."""

    input_ids: torch.Tensor
    """[B, S] int64."""
    places: torch.Tensor
    """[N] int64: of each learned token the position before it, in `input_ids` flattened, whose logits predict it."""
    labels: torch.Tensor
    """[N] int64."""
    rows: Int64
    """[B] their numbers in the dataset."""
    lengths: Int64
    """[B] tokens of each."""
    learned: list[Int64]
    """[B] of each row the positions of its learned tokens."""
    target_width: int
    """Learned tokens of a row at most, rounded."""

    @property
    def target_tokens(self) -> int:
        """Those that are learned."""
        return len(self.labels)

    @property
    def shape(self) -> MicroBatchShape:
        """Rows, padded width, and learned tokens at most."""
        return MicroBatchShape(len(self.rows), self.input_ids.shape[1], self.target_width)

    def loss_sum(self, model: PreTrainedModel) -> torch.Tensor:
        """0-dim, nats."""
        return learned_loss_sum(model, *self._onto(model.device))

    def evaluated(self, model: PreTrainedModel) -> Evaluated:
        """[N] learned tokens."""
        return learned_evaluated(model, *self._onto(model.device))

    def by_row(self, seen: Evaluated) -> tuple[Floats, Int64]:
        """[B] twice: the loss, and how many tokens are right."""
        lengths = np.array([len(positions) for positions in self.learned])
        return sums(seen.losses, lengths), sums(seen.answers, lengths).astype(np.int64)

    def _onto(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return onto(self.input_ids, device), onto(self.places, device), onto(self.labels, device)

    def samples(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_new_tokens: int) -> list[Sample]:
        """Written greedily: the last reply of each row, after what comes before it."""
        prompts = [row[: prompt_length(learned)] for row, learned in zip(self.input_ids, self.learned, strict=True)]
        width = max(len(prompt) for prompt in prompts)
        ids = torch.zeros(len(prompts), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :], mask[row, width - len(prompt) :] = prompt, 1
        ends = torch.tensor(model.generation_config.eos_token_id, device=model.device).reshape(-1)
        written = model.generate(  # type: ignore[operator]  # typed as Tensor | Module
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            num_beams=1,
            use_cache=True,
            pad_token_id=model.generation_config.pad_token_id or 0,
        )
        return [
            Sample(
                input=_text(tokenizer, prompt),
                target=_text(tokenizer, row[len(prompt) : length]),
                generated=_text(tokenizer, _until_end(text[width:], ends)),
            )
            for row, prompt, length, text in zip(self.input_ids, prompts, self.lengths, written, strict=True)
        ]


def _until_end(written: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """What stands before the first end token: behind it is padding, which may be a word where a model has no other."""
    found = torch.isin(written, ends).nonzero()
    return written[: int(found[0])] if len(found) else written


def prompt_length(learned: Int64) -> int:
    """Tokens before the last run of learned ones; of a plain text, its beginning."""
    begin = int(learned[np.flatnonzero(np.diff(learned, prepend=-1) != 1)[-1]])
    return begin if begin > 1 else 1 + min(LEAST_PROMPT, len(learned) // 2)


def causal_batch(rows: Rows, chosen: Int64, pad_id: int, width: int, target_width: int) -> CausalBatch:
    """These rows, padded to this width."""
    ids = rows.gather("input", chosen, width, pad_id)
    learned = [rows.target(row).astype(np.int64) for row in chosen.tolist()]
    places = np.concatenate([number * width + positions for number, positions in enumerate(learned)])
    return CausalBatch(
        input_ids=torch.from_numpy(ids),
        places=torch.from_numpy(places - 1),
        labels=torch.from_numpy(ids.reshape(-1)[places]),
        rows=chosen,
        lengths=rows.input_lengths[chosen].astype(np.int64),
        learned=learned,
        target_width=target_width,
    )


def empty_batch(shape: MicroBatchShape, *, device: torch.device) -> CausalBatch:
    """Without values; every row has the full number of learned tokens."""

    def numbers(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int64, device=device)

    learned = shape.rows * min(shape.target_width, shape.input_width)
    return CausalBatch(
        input_ids=numbers(shape.rows, shape.input_width),
        places=numbers(learned),
        labels=numbers(learned),
        rows=np.arange(shape.rows),
        lengths=np.full(shape.rows, shape.input_width),
        learned=[],
        target_width=shape.target_width,
    )


def _text(tokenizer: PreTrainedTokenizerBase, tokens: torch.Tensor) -> str:
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    assert isinstance(text, str)
    return text.strip()


# -- limits ------------------------------------------------------------------------------------------------------------
# How many rows of a causal model go through it at once.


@dataclass(frozen=True)
class CausalLimit(MicroBatchLimit["CausalBatch"]):
    """`input` are the tokens of a row, padded; `target` those of them that are learned, which are not."""

    def batch(self, rows: Rows, chosen: Int64, pad_id: int, input_width: int, target_width: int) -> CausalBatch:
        """These rows, padded to this width."""

        return causal_batch(rows, chosen, pad_id, input_width, target_width)
