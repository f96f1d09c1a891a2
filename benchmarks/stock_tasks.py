"""A task with a model's own loss, as far as a memory prediction asks for one: how other models are predicted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from worker.training.steps.shape import MicroBatchShape
from worker.training.tasks.seq2seq.batches import PairBatch
from worker.training.tasks.seq2seq.task import Seq2Seq
from worker.training.tasks.task import Config


@dataclass(frozen=True)
class StockBatch(PairBatch):
    """Tokens and labels for a model that computes its own loss."""

    def loss_sum(self, model: PreTrainedModel) -> torch.Tensor:
        """The model's own, a mean."""
        mask = self.attention_mask if self.input_padded else None
        loss: torch.Tensor = model(input_ids=self.input_ids, attention_mask=mask, labels=self.labels).loss
        return loss


@dataclass(frozen=True)
class StockClassification(Seq2Seq):
    """A label for every row."""

    name: ClassVar[str] = "classification"

    def bare(self, config: Config, dtype: torch.dtype) -> PreTrainedModel:
        """As in `Task`."""
        kind = CONFIG_MAPPING[config["model_type"]]
        model: PreTrainedModel = AutoModelForSequenceClassification.from_config(
            kind.from_dict(dict(config)), dtype=dtype
        )
        return model

    def configure(self, model: PreTrainedModel, *, fused: bool, dropout: float | None) -> None:
        """As in `Task`; nothing is exchanged."""
        if dropout is not None:
            for module in model.modules():
                if isinstance(module, nn.Dropout):
                    module.p = dropout

    def empty_batch(self, shape: MicroBatchShape, *, padded: bool, device: torch.device) -> StockBatch:
        """As in `Task`."""
        ids, mask, labels = (
            torch.empty(size, dtype=torch.int64, device=device)
            for size in (*2 * [(shape.rows, shape.input_width)], (shape.rows,))
        )
        return StockBatch(ids, mask, labels, target_tokens=1, rows=np.arange(shape.rows), input_padded=padded)
