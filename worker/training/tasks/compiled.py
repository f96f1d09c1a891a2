"""`speed.compile`: layers compiled one by one, with one set of graphs for every shape; where that fails, as they are.

A layer, not the model, is the unit: all layers that are alike share the same few graphs, however many there are, and
recomputing layers stays outside. Sizes are symbols in a graph, so neither a new shape nor a smaller micro-batch after
an out-of-memory error compiles anything. What else tells graphs apart depends on the task, whose warm-up goes through
all those cases before the first step. Evaluation and generation are not compiled.

Dropout is drawn by the compiled code, from seeds taken of torch's generators: reproducible like the stock one, with
other masks.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException
from torch._functorch import config as functorch_config
from transformers import PretrainedConfig, PreTrainedModel

from worker.training.journal import Journal
from worker.training.machine.out_of_memory import is_out_of_memory

Backend = str | Callable[..., Any]
"""Of torch.compile."""
# Graphs of one function, of which a warm-up makes 14 at most: reached only if something is wrong, and then refused
# by torch, since without graph breaks it may not continue uncompiled by itself.
_MOST_GRAPHS = 32
# One kernel for the two reductions of a norm's backward pass. Whether it pays depends on the size, on which graphs
# would be told apart: 10 more in training, for rows x width x d_model from 5 Mi on.
_OPTIONS = {"triton.mix_order_reduction": False}
_COMPILERS = ("torch._dynamo.", "torch._inductor.", "triton.")

log = logging.getLogger("longhaul.trainer")


class CompiledLayers:
    """Runs layers compiled, until compiling fails: from then on as they are.

    `run_layer`: takes a layer and its inputs, and returns what comes out.
    """

    def __init__(self, run_layer: Callable[..., Any], backend: Backend = "inductor") -> None:
        self.failure: str | None = None
        """Why it ended: the first line of the error."""
        self._run_layer = run_layer
        # The backward pass with the forward pass: an error that came only while going back could not be made good.
        functorch_config.force_non_lazy_backward_lowering = True
        self._compiled: Callable[..., Any] = torch.compile(  # type: ignore[call-overload]  # too new
            run_layer,
            dynamic=True,
            fullgraph=True,
            backend=backend,
            options=_OPTIONS if backend == "inductor" else None,
            recompile_limit=_MOST_GRAPHS,
        )

    @property
    def run(self) -> Callable[..., Any]:
        """What runs the next layer."""
        return self._run_layer if self.failure else self._try

    def fail(self, error: Exception) -> None:
        """Go on without compiling."""
        if self.failure is None:
            self.failure = f"{type(error).__name__}: {error}".strip().splitlines()[0][:500]
            log.warning("layers are not compiled from here on: %s", self.failure)

    def warm_up(self, model: PreTrainedModel, journal: Journal, passes: Callable[[], object]) -> None:
        """Compile, announced as the phase `compile`: `passes` are forward and backward passes of every kind.

        Weights and generators stay as they are. Any error but running out of memory leaves the layers uncompiled, and
        says so in the log.
        """
        journal.phase("compile")
        model.train()
        device = model.device
        try:
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                passes()
        except Exception as error:
            if is_out_of_memory(error):
                raise
            self.fail(error)
        finally:
            model.zero_grad(set_to_none=True)

    def _try(self, *arguments: Any, **options: Any) -> Any:
        # A layer that is recomputed comes here again even after a failure, as it must: its second forward pass has to
        # do what its first one did.
        try:
            return self._compiled(*arguments, **options)
        except Exception as error:
            if not _is_compiler_error(error):
                raise
            cause = getattr(error, "inner_exception", error)
            if is_out_of_memory(cause):
                raise
            self.fail(cause)
        return self._run_layer(*arguments, **options)


def _is_compiler_error(error: Exception) -> bool:
    # By name: Triton is not installed everywhere, and Inductor takes seconds to import.
    return isinstance(error, TorchDynamoException) or type(error).__module__.startswith(_COMPILERS)


# -- moving ------------------------------------------------------------------------------------------------------------
# From the host to the device.


def onto(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on the device: pinned, so that the copy runs while the host continues."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


# -- dropout -----------------------------------------------------------------------------------------------------------
# The rate of every dropout of a model, those that are numbers and no modules included.

_RATE = re.compile(r"dropout|pdrop$|drop_prob$")
"""In the names of rates: `attention_dropout`, `hidden_dropout_prob`, `resid_pdrop`; `layerdrop` skips layers."""


def set_dropout(model: nn.Module, rate: float) -> None:
    """In modules, their attributes, and the configs that some read in their forward pass; config.json stays."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = rate
        _set_rates(module, rate)
        if isinstance(config := getattr(module, "config", None), PretrainedConfig):
            _set_rates(config, rate)


def _set_rates(holder: Any, rate: float) -> None:
    for name, value in vars(holder).items():
        if _RATE.search(name) and isinstance(value, int | float) and not isinstance(value, bool):
            setattr(holder, name, rate)
