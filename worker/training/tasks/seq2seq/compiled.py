"""`speed.compile`: the layers of T5 compiled, with one set of graphs for every shape.

A layer, not the model, is the unit: all layers of a stack share the same few graphs, however many layers there are, and
recomputing layers stays outside. Sizes are symbols in a graph, so neither a new shape nor a smaller micro-batch after
an out-of-memory error compiles anything; what does tell graphs apart is whether a row is alone (a size of 1 is never
a symbol), whether inputs are padded and, on CUDA, which widths are multiples of 16: attention lays the others out anew.
`warm_up` goes through all those cases before the first step. Evaluation and generation are not compiled.

Dropout is drawn by the compiled code, from seeds taken of torch's generators: reproducible like the stock one, with
other masks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo.exc import TorchDynamoException
from torch._functorch import config as functorch_config
from transformers import PreTrainedModel

from worker.training.machine.out_of_memory import is_out_of_memory
from worker.training.tasks.seq2seq.attention import run_block
from worker.training.tasks.seq2seq.loss import token_loss_sum

if TYPE_CHECKING:
    from worker.training.journal import Journal

# Graphs of one function, of which `warm_up` makes 14 at most: reached only if something is wrong, and then refused
# by torch, since without graph breaks it may not continue uncompiled by itself.
_MOST_GRAPHS = 32
# Of the tiny batches of `warm_up`. All different and unlike any size of a model: equal sizes would become one symbol.
# The second of two widths is a multiple of 16.
_ROWS, _INPUTS, _TARGETS = 3, (88, 80), (104, 96)
# One kernel for the two reductions of a norm's backward pass. Whether it pays depends on the size, on which graphs
# would be told apart: 10 more in training, for rows x width x d_model from 5 Mi on.
_OPTIONS = {"triton.mix_order_reduction": False}
_COMPILERS = ("torch._dynamo.", "torch._inductor.", "triton.")

log = logging.getLogger("longhaul.trainer")


class CompiledBlocks:
    """Runs layers compiled, until compiling fails: from then on as they are."""

    def __init__(self, backend: str | Callable[..., Any] = "inductor") -> None:
        self.failure: str | None = None
        """Why it ended: the first line of the error."""
        # The backward pass with the forward pass: an error that came only while going back could not be made good.
        functorch_config.force_non_lazy_backward_lowering = True
        self._compiled: Callable[..., torch.Tensor] = torch.compile(  # type: ignore[call-overload]  # too new
            run_block,
            dynamic=True,
            fullgraph=True,
            backend=backend,
            options=_OPTIONS if backend == "inductor" else None,
            recompile_limit=_MOST_GRAPHS,
        )

    @property
    def run(self) -> Callable[..., torch.Tensor]:
        """What runs the next layer."""
        return run_block if self.failure else self._try

    def fail(self, error: Exception) -> None:
        """Go on without compiling."""
        if self.failure is None:
            self.failure = f"{type(error).__name__}: {error}".strip().splitlines()[0][:500]
            log.warning("layers are not compiled from here on: %s", self.failure)

    def _try(self, *arguments: Any) -> torch.Tensor:
        # A layer that is recomputed comes here again even after a failure, as it must: its second forward pass has to
        # do what its first one did.
        try:
            return self._compiled(*arguments)
        except Exception as error:
            if not _is_compiler_error(error):
                raise
            cause = getattr(error, "inner_exception", error)
            if is_out_of_memory(cause):
                raise
            self.fail(cause)
        return run_block(*arguments)


def compile_blocks(
    model: PreTrainedModel, journal: Journal, backend: str | Callable[..., Any] = "inductor"
) -> CompiledBlocks:
    """Compile the layers for training, announced as the phase `compile`. Weights and generators stay as they are.

    The model must be fused. Any error but running out of memory leaves the layers uncompiled, and says so in the log.
    """
    blocks = CompiledBlocks(backend)
    for stack in (model.encoder, model.decoder):
        assert hasattr(stack, "compiled"), "only a fused stack runs its layers through one function"
        stack.compiled = blocks
    journal.phase("compile")
    try:
        warm_up(model, journal)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        blocks.fail(error)
    finally:
        model.zero_grad(set_to_none=True)
    return blocks


def warm_up(model: PreTrainedModel, journal: Journal) -> None:
    """Forward and backward over tiny batches of every kind; gradients are left behind."""
    device = model.device
    model.train()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        widths = product(_INPUTS, _TARGETS) if device.type == "cuda" else [(_INPUTS[0], _TARGETS[0])]
        for (input_width, target_width), rows, padded in product(widths, (_ROWS, 1), (True, False)):
            ids = torch.ones(rows, input_width, dtype=torch.int64, device=device)
            mask = (torch.arange(input_width, device=device) < input_width - 1).long().expand(rows, -1)
            labels = torch.ones(rows, target_width, dtype=torch.int64, device=device)
            token_loss_sum(model, ids, mask if padded else None, labels).backward()
            journal.progress()


def _is_compiler_error(error: Exception) -> bool:
    # By name: Triton is not installed everywhere, and Inductor takes seconds to import.
    return isinstance(error, TorchDynamoException) or type(error).__module__.startswith(_COMPILERS)
