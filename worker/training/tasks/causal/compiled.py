"""The layers of a causal model, compiled (`tasks/compiled.py`), whatever its family.

Rows have no attention mask, so what tells graphs apart is whether a row is alone (a size of 1 is never a symbol) and,
beside frozen weights, whether a layer is the first one, whose input needs no gradient. A window shorter than a row
would bring masks, and with them a graph for each kind of width: such models run as they are. So do models of which
layers are recomputed: going back, a compiled layer holds all that it computes again at once, eager modules give it back
one by one. For Qwen2.5-7B with LoRA, 2 x 2,048 tokens, that are 0.7 GiB more than planned.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from worker.training.journal import Journal
from worker.training.tasks.causal.fused import learned_loss_sum, needs_no_mask
from worker.training.tasks.compiled import Backend, CompiledLayers

# Of the tiny batches of `warm_up`: unlike any size of a model, since equal sizes would become one symbol.
_ROWS, _WIDTH, _LEARNED = 3, 88, 5


def compile_layers(model: PreTrainedModel, journal: Journal, backend: Backend = "inductor") -> CompiledLayers:
    """Compile the layers for training, as `CompiledLayers.warm_up` says. There must be no obstacle."""
    compiled = CompiledLayers(_run_layer, backend)
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.forward = partial(_run, compiled, type(layer).forward, layer)
    compiled.warm_up(model, journal, partial(warm_up, model, journal))
    return compiled


def obstacle(model: PreTrainedModel, longest: int, *, recomputed: bool) -> str | None:
    """Why layers run as they are; None: they can be compiled. `longest`: tokens of a row at most."""
    if recomputed:
        return "some are recomputed, and compiled those would take more memory than planned"
    if model.dtype == torch.float16:
        return "GPUs that train in float16 have another attention, whose graphs and memory were not measured"
    if not needs_no_mask(model, longest):
        return f"their attention needs a mask for rows of up to {longest:,} tokens"
    return None


def warm_up(model: PreTrainedModel, journal: Journal) -> None:
    """Forward and backward over a tiny batch of several rows, and of one alone; gradients are left behind."""
    for number, rows in enumerate((_ROWS, 1)):
        journal.progress(number / 2)
        ids = torch.ones(rows, _WIDTH, dtype=torch.int64, device=model.device)
        learned_loss_sum(model, ids, torch.arange(_LEARNED, device=model.device), ids[0, :_LEARNED]).backward()


def _run(compiled: CompiledLayers, forward: Callable[..., Any], layer: Any, *arguments: Any, **options: Any) -> Any:
    run = compiled.run if layer.training else _run_layer
    return run(forward, layer, *arguments, **options)


def _run_layer(forward: Callable[..., Any], layer: Any, *arguments: Any, **options: Any) -> Any:
    return forward(layer, *arguments, **options)
