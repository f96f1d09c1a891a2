"""The task `seq2seq`, as the trainer asks for it. What needs torch is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel, PreTrainedTokenizerBase

from jobs.errors import Rejected
from jobs.plan import DataPlan
from jobs.spec import DataSpec, JobSpec
from worker.training.dataset.data import Rows
from worker.training.dataset.encoding import Limits
from worker.training.dataset.tokens import TokenizerState, guessed_tokens
from worker.training.journal import Journal
from worker.training.rows.text import Templates, Texts
from worker.training.steps.shape import Lengths, MicroBatchShape, SafeSize
from worker.training.tasks.columns import PAIRS, asked_input, choose_templates, recognize
from worker.training.tasks.layout import Layout, positions_of
from worker.training.tasks.seq2seq import batches, builtin, compiled
from worker.training.tasks.seq2seq.batches import PairBatch, PairLimit
from worker.training.tasks.seq2seq.fused import has_t5_stacks
from worker.training.tasks.seq2seq.layout import PairFlops, architecture_of, build, is_t5, layers_of, layout_of
from worker.training.tasks.seq2seq.rows import PairEncoder
from worker.training.tasks.seq2seq.self_check import configure
from worker.training.tasks.task import BuiltinModel, Config, Prompt, Usage
from worker.training.tasks.unlabelled import Unlabelled
from worker.training.tasks.widths import PairWidths

FAMILIES = frozenset({"t5", "mt5", "bart", "pegasus"})
"""`model_type` of models that are tried in the tests. Others are taken by their architecture, and check themselves."""
_WITH_LANGUAGES = frozenset({"mbart", "m2m_100", "nllb-moe", "plbart", "fsmt"})
"""`model_type` of families whose targets are in a language that a row does not name."""
_OTHER_HEADS = ("ForSequenceClassification", "ForQuestionAnswering", "ForTokenClassification", "ForCausalLM")


@dataclass(frozen=True)
class Seq2Seq(Unlabelled):
    """Text to text. The methods are described in `Task`."""

    positions: tuple[int, int] = (0, 0)
    """Tokens of an input and of a target at most, by the job."""
    keeps_line_breaks: bool = False
    name: ClassVar[str] = "seq2seq"
    variant: ClassVar[None] = None
    targets_apart: ClassVar[bool] = True
    limit_keys: ClassVar[tuple[str, ...]] = ("data.max_input_tokens", "data.max_target_tokens")
    models: ClassVar[str] = "T5, FLAN-T5, mT5, BART, Pegasus and other encoder-decoders"

    def templates(
        self,
        input: str | None,
        target: str | None,
        columns: Collection[str],
        source: str,
        elsewhere: Collection[str] = (),
    ) -> Templates:
        if input is None and target is not None:
            raise Rejected(
                "data.target is set without data.input, from which a seq2seq model writes it",
                code="no_input",
                param="data.input",
                hint="set data.input, too, or leave both out; text alone is learned by the task causal",
            )
        return choose_templates(input, target, columns, source, PAIRS, elsewhere)

    def row_format(self, columns: Collection[str]) -> str | None:
        """See `Task`."""
        found = recognize(columns, PAIRS)
        return None if found is None else found.name

    @classmethod
    def of(cls, spec: JobSpec, data: DataPlan | None = None) -> Seq2Seq:
        """As the job sets it."""
        return cls((spec.data.max_input_tokens, spec.data.max_target_tokens), spec.data.keep_line_breaks)

    @property
    def builtin(self) -> BuiltinModel:
        build = partial(builtin.build, line_breaks=self.keeps_line_breaks)
        rows = builtin.TOKENIZER_ROWS
        return BuiltinModel(builtin.NAME, builtin.VERSION, builtin.CONFIG, rows, build, of_bytes=False)

    def model_facts(self, seed: int) -> Sequence[object]:
        return ["line breaks"] if self.keeps_line_breaks else []

    def takes(self, config: Config) -> bool:
        named = [str(each) for each in config.get("architectures") or []]
        if config.get("model_type") in FAMILIES:
            return not any(each.endswith(_OTHER_HEADS) for each in named)
        kind = config.get("model_type")
        if not config.get("is_encoder_decoder") or kind in _WITH_LANGUAGES or not named:
            return False
        return architecture_of(config) in named

    def adapted(self, config: Config) -> Config:
        """Raises Rejected (`bad_config`, `limit_too_large`)."""
        most = positions_of(config, layout_of(config))
        for key, limit in zip(self.limit_keys, self.positions, strict=True):
            if most is not None and limit > most:
                raise Rejected(
                    f"{key} is {limit:,}, and the model knows {most:,} positions",
                    code="limit_too_large",
                    param=key,
                    hint=f"set {key} to {most:,} or less; what is longer is cut",
                )
        return config if is_t5(config) else {**config, "architectures": [architecture_of(config)]}

    def limits(self, data: DataSpec) -> Limits:
        return {"input": data.max_input_tokens, "target": data.max_target_tokens}

    def guessed_lengths(self, characters: Sequence[tuple[int, int]], data: DataSpec) -> tuple[Lengths, Lengths]:
        tokens = guessed_tokens(characters) + 1  # end-of-sequence
        cut = np.minimum(tokens, [data.max_input_tokens, data.max_target_tokens])
        return cut[:, 0], cut[:, 1]

    def tokenizer(self, folder: Path) -> TokenizerState:
        found = TokenizerState.read(folder)
        return found.keeping_line_breaks() if self.keeps_line_breaks else found

    def tried(self, tokenizer: TokenizerState, texts: Sequence[Texts], limits: Limits) -> TokenizerState:
        """Raises Rejected (`tokenizer_unusable`, `limit_too_small`)."""
        found = tokenizer.tried([text for one in texts for text in one.all])
        found.check_limits(dict(zip(self.limit_keys, limits.values(), strict=True)))
        return found

    def encoder(self, tokenizer: TokenizerState, limits: Limits) -> Callable[[], PairEncoder]:
        return partial(PairEncoder, tokenizer, limits)

    def layout(self, config: Config) -> Layout:
        return layout_of(config)

    def layers(self, config: Config) -> int:
        return layers_of(config)

    def flops(self, config: Config) -> PairFlops:
        return PairFlops.of_config(config)

    def recomputed_flops(self, config: Config, every: int) -> PairFlops:
        return PairFlops.recomputed(config, every)

    def generation(self, folder: Path) -> Mapping[str, object]:
        return {}

    def usage(self, data: DataSpec, new_tokens: int) -> Usage:
        return Usage(
            inputs=f'tokenizer(text, return_tensors="pt", truncation=True, max_length={data.max_input_tokens})',
            shown="tokenizer.decode(model.generate(**inputs)[0], skip_special_tokens=True)",
            text="your input, written as in the table above",
        )

    def asked(self, tokenizer: TokenizerState, texts: Texts, data: DataSpec) -> Prompt:
        return asked_input(tokenizer, texts, data.max_input_tokens)

    def prompt(self, rows: Rows, row: int, tokenizer: PreTrainedTokenizerBase, data: DataSpec) -> str | None:
        given = rows.input(row).tolist()
        text = tokenizer.decode(given, skip_special_tokens=True)
        again = tokenizer(text, truncation=True, max_length=data.max_input_tokens)["input_ids"]
        return text if isinstance(text, str) and again == given else None

    def widths(self, rows: Rows) -> PairWidths:
        return PairWidths(rows)

    def limit(self, rows: Rows, micro_batch: int, safe: Mapping[str, SafeSize] | None = None) -> PairLimit:
        return PairLimit.of(rows, micro_batch, safe)

    def empty_batch(self, shape: MicroBatchShape, *, padded: bool, device: torch.device) -> PairBatch:
        return batches.empty_batch(shape, padded=padded, device=device)

    def auto_class(self) -> Any:
        return AutoModelForSeq2SeqLM

    def bare(self, config: Config, dtype: torch.dtype) -> PreTrainedModel:
        return build(config, dtype)

    def configure(self, model: PreTrainedModel, *, fused: bool, dropout: float | None) -> None:
        """Raises Rejected (`self_check_failed`)."""
        configure(model, fused=fused, dropout=dropout)

    def uncompiled(self, model: PreTrainedModel, *, recomputed: bool) -> str | None:
        return None if has_t5_stacks(model) else f"layers of {type(model).__name__} run as they are"

    def compile(self, model: PreTrainedModel, journal: Journal) -> str | None:
        return compiled.compile_blocks(model, journal).failure
