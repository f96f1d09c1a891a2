"""Are loss and gradients right? A T5 of two layers in bf16, eager and compiled, against float64; and which kernels ran.

The yardstick is stock transformers in bf16 on the same device: its rounding errors are what bf16 costs anyway.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import T5ForConditionalGeneration

from jobs.text.units import format_share
from worker.training.doctor.finding import Check, Examination, Finding, judge
from worker.training.doctor.random_t5 import draw_batch, make_model
from worker.training.machine.numerics import prepare_device
from worker.training.tasks.seq2seq.compiled import CompiledBlocks
from worker.training.tasks.seq2seq.fused import fuse

TIMES = 2.0
ROUNDING = 2.0**-8
"""Of a number in bf16. What is nearer to the truth than that is exact, whatever the stock model reaches by chance."""
CHANCE = 0.25
"""Share of the stock model's distance that its bias is taken to be, at least."""
SDPA = "aten::_scaled_dot_product_"
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class GradientError:
    """Of one tensor, relative to its norm."""

    distance: float
    bias: float
    """Of the length along the true gradient: what does not cancel out over many steps."""


@dataclass(frozen=True)
class Reference:
    """What is true, and what stock transformers make of it."""

    exact: Tensors
    stock: Mapping[str, GradientError]


class GradientComparison:
    """Gradients of the fused model against the reference, which is computed when it is first asked for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @cached_property
    def reference(self) -> Reference:
        """Raises ValueError where gradients are zero."""
        exact = gradients(make_model(self.device, torch.float64))
        if none := [name for name, tensor in exact.items() if not float(tensor.norm()) > 0]:
            raise ValueError(f"{len(none)} of {len(exact)} gradients are zero in float64: the device computes nothing")
        return Reference(exact, errors(gradients(make_model(self.device, torch.bfloat16)), exact))

    def check(self, name: str, *, compiled: bool) -> Finding:
        """Of the fused model."""
        reference = self.reference
        begun = time.perf_counter()
        ours = errors(gradients(fused_model(self.device, compiled=compiled)), reference.exact)
        seconds = time.perf_counter() - begun
        found = compare(name, ours, reference.stock)
        return found.model_copy(update={"values": found.values | {"seconds": seconds}})


def checks(examination: Examination) -> Mapping[str, Check]:
    """By name."""
    device = torch.device(examination.device)
    prepare_device(device)
    comparison = GradientComparison(device)
    return {
        "eager_gradients": lambda: comparison.check("eager_gradients", compiled=False),
        "compiled_gradients": lambda: comparison.check("compiled_gradients", compiled=True),
        "attention_kernels": lambda: attention_kernels(device),
    }


def fused_model(device: torch.device, *, compiled: bool) -> T5ForConditionalGeneration:
    """As it trains. Where layers do not compile, running it raises RuntimeError."""
    model = make_model(device, torch.bfloat16)
    fuse(model)
    if compiled:
        blocks = StrictBlocks()
        for stack in (model.encoder, model.decoder):
            stack.compiled = blocks  # type: ignore[assignment]  # a fused stack
    return model


class StrictBlocks(CompiledBlocks):
    """Does not continue uncompiled."""

    def fail(self, error: Exception) -> None:
        """Raise RuntimeError."""
        raise RuntimeError(f"layers do not compile: {type(error).__name__}: {error}") from error


def gradients(model: T5ForConditionalGeneration) -> Tensors:
    """Loss and gradients of the one batch, float64."""
    batch = draw_batch()
    loss = batch.loss_sum(model) / batch.target_tokens
    loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {name: grad.double() for name, grad in found.items()} | {"loss": loss.detach().double()}


def errors(found: Tensors, exact: Tensors) -> dict[str, GradientError]:
    """Of each tensor."""
    assert found.keys() == exact.keys()
    result = {}
    for name, true in exact.items():
        off, square = found[name] - true, float(true.square().sum())
        result[name] = GradientError(float(off.norm()) / square**0.5, abs(float((off * true).sum())) / square)
    return result


def compare(check: str, ours: Mapping[str, GradientError], stock: Mapping[str, GradientError]) -> Finding:
    """Every tensor's distance and bias against twice the stock model's; what rounding alone explains is let go."""

    def ratio(name: str, kind: str) -> float:
        own, theirs = getattr(ours[name], kind), getattr(stock[name], kind)
        # By chance the errors of a small tensor may cancel out in one model, and not in the other.
        least = max(ROUNDING, CHANCE * stock[name].distance if kind == "bias" else 0.0)
        return float(own / max(theirs, least)) if own == own else float("inf")

    ratios = {(name, kind): ratio(name, kind) for name in ours for kind in ("distance", "bias")}
    (worst, kind), highest = max(ratios.items(), key=lambda entry: entry[1])
    mean, theirs = (sum(each.distance for each in some.values()) / len(some) for some in (ours, stock))
    return judge(
        check, f"{len(ours)} tensors off by {format_share(mean)} in the mean, stock transformers by "
        f"{format_share(theirs)}; at most {highest:.2f} × theirs ({kind} of {worst})",
        limit=f"< {TIMES:g} × stock's", fail=not highest < TIMES,
        hint="report it: set speed.compile: false, and speed.fused: false where eager gradients fail, too",
        worst_ratio=highest, mean_error=mean, mean_error_stock=theirs,
    )  # fmt: skip


def attention_kernels(device: torch.device) -> Finding:
    """Which kernels attention ran, forward and backward."""
    model = fused_model(device, compiled=False)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as record:
        gradients(model)
        torch.cuda.synchronize(device)
    names = {event.name for event in record.events()}
    functions = sorted({name.removeprefix(SDPA) for name in names if name.startswith(SDPA)})
    kernels = sorted({name.split("<")[0].split("(")[0][:60] for name in names if is_attention_kernel(name)})
    shown = f"{', '.join(functions) or 'none'}" + (f" ({', '.join(kernels[:4])})" if kernels else "")
    math = [name for name in functions if "math" in name]
    return judge("attention_kernels", shown, limit="no math", fail=bool(math) or not functions,
                 hint="report it: attention is slow, and takes much memory")  # fmt: skip


def is_attention_kernel(name: str) -> bool:
    """By the names that flash, memory-efficient and cuDNN attention give theirs."""
    return not name.startswith("aten::") and any(part in name for part in ("fmha", "flash", "cudnn_generated", "sdpa"))
