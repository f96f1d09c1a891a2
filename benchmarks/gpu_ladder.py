"""What `gpu_throughput` compares: a random model, and the configurations that it is put into, one after the other."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import PreTrainedModel, T5Config, T5ForConditionalGeneration

from worker.training.tasks.seq2seq.compiled import CompiledBlocks, compile_blocks
from worker.training.tasks.seq2seq.fused import ALL, Patch

MICRO_BATCH = 8
_HEAD_STD = 0.02


@dataclass(frozen=True)
class LadderConfiguration:
    """How the model is run."""

    name: str
    attention: Literal["eager", "sdpa"] = "sdpa"
    recompute: int = 0
    """Every n-th layer; 0: none."""
    ordered: bool = True
    """Our order and micro-batches; else random rows, `micro_batch` of them, padded to the longest."""
    patches: tuple[Patch, ...] = ()
    compiled: bool = False
    limited: bool = True
    """To the memory of the emulated GPU."""
    step_rows: int = 128
    """Rows of an optimizer step, out of which our micro-batches are cut."""
    micro_batch: int = MICRO_BATCH
    search: bool = True
    """Look for the largest micro-batch that fits, too."""


LADDER = (
    LadderConfiguration("seed: eager, recomputed", "eager", 1, ordered=False),
    LadderConfiguration("sdpa, recomputed", recompute=1, ordered=False),
    LadderConfiguration("sdpa", ordered=False),
    LadderConfiguration("+ our batches"),
    LadderConfiguration("+ gelu, norm, dropout", patches=("gelu", "norm", "dropout")),
    LadderConfiguration("+ attention, masks", patches=("gelu", "norm", "dropout", "attention")),
    LadderConfiguration("+ loss", patches=ALL),
    LadderConfiguration("+ compile", patches=ALL, compiled=True),
    LadderConfiguration("+ compile, every 2nd layer recomputed", recompute=2, patches=ALL, compiled=True),
    LadderConfiguration("whole GPU, steps of 128", patches=ALL, compiled=True, limited=False, search=False),
    LadderConfiguration(
        "whole GPU, steps of 512", patches=ALL, compiled=True, limited=False, step_rows=512, micro_batch=16,
        search=False,
    ),
    LadderConfiguration(
        "whole GPU, steps of 2048", patches=ALL, compiled=True, limited=False, step_rows=2048, micro_batch=32,
        search=False,
    ),
)  # fmt: skip
"""Each adds to the one before; those from the fourth on are ours."""
SEED, OURS = LADDER[0].name, frozenset(one.name for one in LADDER[3:])


def make_model(config: dict[str, Any], device: torch.device, seed: int = 0) -> PreTrainedModel:
    """Random, bf16, made on the device; the head is not tied, as FLAN-T5's is not."""
    torch.manual_seed(seed)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model = T5ForConditionalGeneration(T5Config(**config))
            # transformers 5 ties the head of every T5 that it makes.
            head = torch.randn_like(model.lm_head.weight).mul_(_HEAD_STD)
    finally:
        torch.set_default_dtype(usual)
    model.lm_head.weight = torch.nn.Parameter(head)
    model.config.use_cache = False
    model.train()
    return model


def compile_layers(model: PreTrainedModel, backend: str) -> CompiledBlocks:
    """As the trainer compiles them. Takes minutes."""
    with recompile_limit_is_known():
        return compile_blocks(model, _Silent(), backend)  # type: ignore[arg-type]  # all that it asks of a journal


class _Silent:
    """A journal that nobody reads."""

    def phase(self, phase: str) -> None:
        """Nothing."""

    def progress(self, fraction: float | None = None) -> None:
        """Nothing."""


class recompile_limit_is_known:
    """torch 2.13's `torch.compile` takes the limit of recompilations; where it does not yet, dynamo is configured."""

    def __enter__(self) -> None:
        self._stock: Any = torch.compile
        if "recompile_limit" not in inspect.signature(self._stock).parameters:
            torch.compile = self._without_limit  # type: ignore[assignment]  # a stand-in

    def __exit__(self, *error: object) -> None:
        torch.compile = self._stock

    def _without_limit(self, *arguments: Any, recompile_limit: int, **options: Any) -> Any:
        torch._dynamo.config.recompile_limit = recompile_limit
        return self._stock(*arguments, **options)
