"""The task `seq2seq`, as the trainer asks for it. What needs torch is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from worker.training.dataset.data import Rows
from worker.training.journal import Journal
from worker.training.rows.text import Template
from worker.training.steps.safe_size import SafeSize
from worker.training.steps.shape import MicroBatchShape
from worker.training.tasks.layout import Layout
from worker.training.tasks.seq2seq import builtin
from worker.training.tasks.seq2seq.columns import choose_templates, recognize
from worker.training.tasks.seq2seq.flops import PairFlops, layers
from worker.training.tasks.seq2seq.layout import layout_of
from worker.training.tasks.seq2seq.limits import MicroBatchLimit
from worker.training.tasks.seq2seq.widths import PairWidths
from worker.training.tasks.task import BuiltinModel, Config

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from worker.training.tasks.seq2seq.batches import PairBatch


@dataclass(frozen=True)
class Seq2Seq:
    """Text to text, with the models of T5. The methods are described in `Task`."""

    name: ClassVar[str] = "seq2seq"
    model_types: ClassVar[Collection[str]] = ("t5",)
    models: ClassVar[str] = "T5, T5 1.1 and FLAN-T5 in any size"
    builtin: ClassVar[BuiltinModel] = BuiltinModel(
        builtin.NAME, builtin.VERSION, builtin.CONFIG, builtin.TOKENIZER_ROWS, builtin.build
    )

    def templates(
        self, input: str | None, target: str | None, columns: Collection[str], source: str
    ) -> tuple[Template, Template]:
        return choose_templates(input, target, columns, source)

    def row_format(self, columns: Collection[str]) -> str | None:
        """See `Task`."""
        found = recognize(columns)
        return None if found is None else found.name

    def layout(self, config: Config) -> Layout:
        return layout_of(config)

    def layers(self, config: Config) -> int:
        return layers(config)

    def flops(self, config: Config) -> PairFlops:
        return PairFlops.of_config(config)

    def recomputed_flops(self, config: Config, every: int) -> PairFlops:
        return PairFlops.recomputed(config, every)

    def widths(self, rows: Rows) -> PairWidths:
        return PairWidths(rows)

    def limit(self, rows: Rows, micro_batch: int, safe: Mapping[str, SafeSize] | None = None) -> MicroBatchLimit:
        return MicroBatchLimit.of(rows, micro_batch, safe)

    def empty_batch(self, shape: MicroBatchShape, *, padded: bool, device: torch.device) -> PairBatch:
        from worker.training.tasks.seq2seq import batches

        return batches.empty_batch(shape, padded=padded, device=device)

    def auto_class(self) -> Any:
        from transformers import AutoModelForSeq2SeqLM

        return AutoModelForSeq2SeqLM

    def bare(self, config: Config, dtype: torch.dtype) -> PreTrainedModel:
        from worker.training.tasks.seq2seq import fused

        return fused.bare(config, dtype)

    def configure(self, model: PreTrainedModel, *, fused: bool, dropout: float | None) -> None:
        from worker.training.tasks.seq2seq.fused import fuse, set_dropout

        if dropout is not None:
            set_dropout(model, dropout)
        if fused:
            fuse(model)

    def compile(self, model: PreTrainedModel, journal: Journal) -> str | None:
        from worker.training.tasks.seq2seq import compiled

        return compiled.compile_blocks(model, journal).failure
