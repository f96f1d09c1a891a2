"""The task `causal`, as the trainer asks for it. What needs torch is imported when it is asked for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from jobs.companions import CompanionColumns
from jobs.errors import Rejected
from jobs.plan import DataPlan
from jobs.preview import SpanPreview
from jobs.spec import DataSpec, JobSpec, Learn, LoraMethod
from worker.training.dataset.data import Rows
from worker.training.dataset.encoding import Limits
from worker.training.dataset.tokens import TokenizerState, guessed_tokens
from worker.training.journal import Journal
from worker.training.rows.text import Template, Templates, Texts
from worker.training.steps.shape import Lengths, MicroBatchShape, SafeSize
from worker.training.tasks.causal import batches, builtin
from worker.training.tasks.causal.batches import CausalBatch, CausalLimit, prompt_length
from worker.training.tasks.causal.chat import ChatFormat
from worker.training.tasks.causal.chat_templates import chat_template
from worker.training.tasks.causal.compiled import compile_layers, obstacle
from worker.training.tasks.causal.fused import configure
from worker.training.tasks.causal.layout import CausalFlops, build, layers_of, layout_of, text_part
from worker.training.tasks.causal.rows import CausalEncoder, CausalTokenizer, spans_of, tried
from worker.training.tasks.columns import WHOLE, choose_templates, recognize
from worker.training.tasks.layout import Layout, check_positions, positions_of
from worker.training.tasks.task import BuiltinModel, Config, Prompt, Usage
from worker.training.tasks.unlabelled import Unlabelled
from worker.training.tasks.widths import PairWidths

FAMILIES = frozenset({"qwen2", "qwen3", "llama", "mistral", "gemma", "gemma2", "gemma3_text", "phi3"})
"""`model_type` of models that are tried in the tests. Others are taken by their architecture, and check themselves."""
_ARCHITECTURES = ("ForCausalLM", "LMHeadModel")
_MULTIMODAL = "ForConditionalGeneration"
"""Of a model whose text part is taken."""
_FORMAT_TOKENS = 8
"""Of a chat format, around the texts of a row, at the least."""


@dataclass(frozen=True)
class Causal(Unlabelled):
    """Going on with a text. The methods are described in `Task`."""

    everything: bool = False
    """All tokens are learned, not only replies."""
    learn: Learn = "all"
    """What of each reply is learned."""
    positions: int = 0
    """Tokens of a row at most, by the job."""
    adapters_alone: bool = False
    """Adapters are delivered without the model."""
    by_reply: bool = True
    """See `DataPlan`. The rows of an earlier version can be read, and are not prepared any more."""
    keeps_ends: bool = True
    """See `DataPlan.ends_kept`."""
    chat_template: str | None = None
    """See `DataPlan`."""
    name: ClassVar[str] = "causal"
    targets_apart: ClassVar[bool] = False
    limit_keys: ClassVar[tuple[str, ...]] = ("data.max_tokens",)
    models: ClassVar[str] = "Qwen2, Qwen3, Llama, Mistral, Gemma, Phi-3 and other causal language models"
    builtin: ClassVar[BuiltinModel] = BuiltinModel(
        builtin.NAME, builtin.VERSION, builtin.CONFIG, builtin.TOKENIZER_ROWS, builtin.build
    )

    @classmethod
    def of(cls, spec: JobSpec, data: DataPlan | None = None) -> Causal:
        """As the job sets it."""
        alone = isinstance(spec.method, LoraMethod) and not spec.method.merge
        everything, template = spec.task.loss_on == "all", chat_template(spec)
        made = cls(everything, spec.data.learn, spec.data.max_tokens, alone, chat_template=template)
        return made if data is None else made.reading_as(data)

    @property
    def variant(self) -> object:
        part: list[str] = [] if self.learn == "all" else [self.learn]
        part += [] if self.chat_template is None else [self.chat_template]
        return [self.everything, "by reply", *part] if self.by_reply else self.everything

    def reading_as(self, data: DataPlan) -> Causal:
        return replace(self, by_reply=data.by_reply, keeps_ends=data.ends_kept, chat_template=data.chat_template)

    def templates(
        self,
        input: str | None,
        target: str | None,
        columns: Collection[str],
        source: str,
        elsewhere: Collection[str] = (),
    ) -> Templates:
        return choose_templates(input, target, columns, source, WHOLE, elsewhere)

    def target_template(self, text: str, companions: CompanionColumns) -> Template:
        return replace(super().target_template(text, companions), in_turns=True, keeps_ends=self.keeps_ends)

    def row_format(self, columns: Collection[str]) -> str | None:
        """See `Task`."""
        found = recognize(columns, WHOLE)
        return None if found is None else found.name

    def takes(self, config: Config) -> bool:
        named = [str(each) for each in config.get("architectures") or []]
        if config.get("model_type") in FAMILIES or any(each.endswith(_ARCHITECTURES) for each in named):
            return True
        return any(each.endswith(_MULTIMODAL) for each in named) and text_part(config) is not None

    def limits(self, data: DataSpec) -> Limits:
        return {"input": data.max_tokens, "target": data.max_tokens}

    def guessed_lengths(self, characters: Sequence[tuple[int, int]], data: DataSpec) -> tuple[Lengths, Lengths]:
        read, learned = (guessed_tokens(characters) + 1).T
        whole = np.minimum(read + learned + _FORMAT_TOKENS, data.max_tokens)
        return whole, np.minimum(whole if self.everything else learned, data.max_tokens)

    def tokenizer(self, folder: Path) -> CausalTokenizer:
        return CausalTokenizer.read(folder, self.chat_template)

    def tried(self, tokenizer: TokenizerState, texts: Sequence[Texts], limits: Limits) -> CausalTokenizer:
        """Raises Rejected (`tokenizer_unusable`, `chat_template`)."""
        return tried(tokenizer, texts, limits, everything=self.everything, learn=self.learn)

    def encoder(self, tokenizer: TokenizerState, limits: Limits) -> Callable[[], CausalEncoder]:
        assert isinstance(tokenizer, CausalTokenizer)
        return partial(CausalEncoder, tokenizer, limits, everything=self.everything, learn=self.learn)

    def builtin_spans(self, texts: Texts) -> tuple[SpanPreview, ...]:
        *_, rendered = _builtin_chat(self.chat_template).render(texts, everything=self.everything, learn=self.learn)
        return spans_of(rendered, len(rendered.text))

    def adapted(self, config: Config) -> Config:
        """Raises Rejected (`bad_config`, `limit_too_large`, `text_part`)."""
        text = text_part(config)
        if text is not None and self.adapters_alone:
            raise Rejected(
                "the text part of a multimodal model is delivered as a model by itself: adapters alone would name the "
                "multimodal one, to which they do not belong",
                code="text_part",
                param="method.merge",
                hint="set method.merge: true",
            )
        own = config if text is None else text
        check_positions(self.limit_keys[0], self.positions, positions_of(own, layout_of(own)))
        return own

    def noticed(self, config: Config) -> tuple[str, ...]:
        text = text_part(config)
        found = []
        if text is not None:
            [causal] = text["architectures"]
            found = [f"the text part alone is trained, and delivered as a {causal}: images and sound are left out"]
        if (config if text is None else text).get("output_router_logits"):
            found.append(
                "config.json asks for the loss that balances the load of experts (output_router_logits), which is left "
                "out: routers and experts learn by the loss of the tokens alone"
            )
        return tuple(found)

    def layout(self, config: Config) -> Layout:
        return layout_of(config)

    def layers(self, config: Config) -> int:
        return layers_of(config)

    def flops(self, config: Config) -> CausalFlops:
        return CausalFlops.of_config(config)

    def recomputed_flops(self, config: Config, every: int) -> CausalFlops:
        return CausalFlops.recomputed(config, every)

    def generation(self, folder: Path) -> Mapping[str, object]:
        """It ends where a reply ends, which the generation_config.json of base models does not know."""
        return {"eos_token_id": CausalTokenizer.read(folder, self.chat_template).end_ids}

    def usage(self, data: DataSpec, new_tokens: int) -> Usage:
        return Usage(
            inputs='tokenizer(text, return_tensors="pt", add_special_tokens=False)',
            shown=f"tokenizer.decode(model.generate(**inputs, max_new_tokens={new_tokens}, do_sample=False, "
            'repetition_penalty=1.0)[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)',
            text="your prompt, as tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) "
            "writes it",
        )

    def asked(self, tokenizer: TokenizerState, texts: Texts, data: DataSpec) -> Prompt:
        """It is not cut: what is asked stands at its end."""
        assert isinstance(tokenizer, CausalTokenizer)
        text, as_chat = tokenizer.chat.prompt(texts)
        own = tokenizer.open().encode(text, add_special_tokens=False).ids
        prompt = Prompt([*(() if as_chat else tokenizer.leading), *own], text, cut=False)
        return replace(prompt, called=partial(tokenizer.chat.called, texts)) if texts.tools else prompt

    def prompt(self, rows: Rows, row: int, tokenizer: PreTrainedTokenizerBase, data: DataSpec) -> str | None:
        given = rows.input(row)[: prompt_length(rows.target(row).astype(np.int64))].tolist()
        text = tokenizer.decode(given)
        again = tokenizer(text, add_special_tokens=False)["input_ids"]
        return text if isinstance(text, str) and again == given else None

    def widths(self, rows: Rows) -> PairWidths:
        return PairWidths(rows)

    def limit(self, rows: Rows, micro_batch: int, safe: Mapping[str, SafeSize] | None = None) -> CausalLimit:
        return CausalLimit.of(rows, micro_batch, safe)

    def empty_batch(self, shape: MicroBatchShape, *, padded: bool, device: torch.device) -> CausalBatch:
        return batches.empty_batch(shape, device=device)

    def auto_class(self) -> Any:
        return AutoModelForCausalLM

    def bare(self, config: Config, dtype: torch.dtype) -> PreTrainedModel:
        return build(config, dtype)

    def configure(self, model: PreTrainedModel, *, fused: bool, dropout: float | None) -> None:
        configure(model, fused=fused, dropout=dropout)

    def uncompiled(self, model: PreTrainedModel, *, recomputed: bool) -> str | None:
        return obstacle(model, self.positions, recomputed=recomputed)

    def compile(self, model: PreTrainedModel, journal: Journal) -> str | None:
        return compile_layers(model, journal).failure


@functools.lru_cache(4)
def _builtin_chat(template: str | None) -> ChatFormat:
    """How the built-in model writes chats, by its own template or by this one. Raises Defect."""
    return builtin.CHAT if template is None else replace(builtin.CHAT, template=template).with_end()
