"""What runs on tensors without data in place of CUDA kernels, and answers to questions that they cannot answer.

Tensors on the device "meta" take every branch of our code that is not the CPU's. But some functions of torch choose
their kernel by the device, and give "meta" the plain one: dropout, attention and RMS norm of CUDA are asked for by name
here, so that what is kept for the backward pass, and what is not, is theirs.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from jobs.errors import Rejected
from jobs.memory_plan import OptimizerName
from worker.training.adapters.method import Method
from worker.training.tasks.task import Config, Task

# -- bare model --------------------------------------------------------------------------------------------------------
# A model without weights: the modules that a config.json describes, as `network.model.load` leaves them.


def bare_model(
    config: Config, task: Task, dtype: torch.dtype, *, fused: bool, dropout: float | None, method: Method | None = None
) -> PreTrainedModel:
    """The model in training mode, on the device "meta". Raises Rejected (`bad_config`).

    `method` None: every weight is trained; one that adds to the model raises Rejected, too, where it cannot.
    """
    try:
        with torch.device("meta"):
            model = task.bare(config, dtype)
    except MemoryError:
        raise
    # Whatever transformers raises on a value it did not expect.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
        raise Rejected(
            f"model: no {task.name} model can be built from config.json: {reason}",
            code="bad_config",
            param="model",
            hint="take the original file",
        ) from error
    task.configure(model, fused=fused, dropout=dropout)
    if method is not None:
        with torch.device("meta"):
            method.inject(model, 0, task.layout(config).head_modules)
    model.train()
    return model


def give_device(model: nn.Module, device: torch.device) -> None:
    """Put parameters and buffers on another device, without values; shared ones stay shared."""
    moved: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in moved:
                    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    moved[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
                tensors[name] = moved[id(tensor)]  # type: ignore[assignment]  # a moved parameter is a Parameter still


# -- updates -----------------------------------------------------------------------------------------------------------
# What an optimizer needs without data: its random generator, and the compiled update of `adamw_8bit`.


class _Generator(torch.Generator):
    """One of the host, whatever device is asked for: there is none for the device "meta"."""

    def __new__(cls, device: Any = None) -> _Generator:
        return super().__new__(cls)


@contextlib.contextmanager
def without_data(name: OptimizerName) -> Iterator[None]:
    """Make and step an optimizer inside. Generators are left as they were found."""
    if name == "adamw_8bit":
        # Tables of real numbers: they must exist before anything is without data.
        from torchao.optim.subclass_8bit import get_qmap_signed, get_qmap_unsigned

        get_qmap_signed()
        get_qmap_unsigned()
    real = torch.compile, torch.Generator
    torch.compile, torch.Generator = _compiled, _Generator  # type: ignore[assignment,misc]  # stand-ins
    try:
        # Not a reason to wake an idle GPU.
        gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        with torch.random.fork_rng(devices=gpus):
            yield
    finally:
        torch.compile, torch.Generator = real  # type: ignore[misc]  # the real ones


def _compiled(function: Callable[..., Any], **options: Any) -> Callable[..., None]:
    """In place of the compiled update of one parameter by `adamw_8bit`: the buffers that it makes.

    Seen with the profiler on the CPU: of a parameter whose states are quantized, both states in fp32 exist at once (the
    scale of a block is known only when all of its numbers are); all else stays in registers.
    """
    del function, options
    return _hold_both_states


def _hold_both_states(parameter: torch.Tensor, *others: Any) -> None:
    quantized = [each for each in others if isinstance(each, torch.Tensor) and each.dtype == torch.uint8]
    held = [torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device) for _ in quantized]
    del held


# -- kernels -----------------------------------------------------------------------------------------------------------

aten = torch.ops.aten
WORKSPACES = 2 * 32 * 2**20
"""Bytes that cuBLAS takes from torch's allocator on Hopper and Blackwell, for as long as the process runs: 32 MiB for
the thread of the forward pass, and as many for that of the backward pass."""
_HALF = (torch.bfloat16, torch.float16)


class WithoutData(TorchFunctionMode):
    """Answers what code asks of values: all is finite and nothing clipped, and some inputs are padded.

    With `cuda`, functions that choose their kernel by the device get CUDA's; without `flash`, those of a GPU that has
    no flash attention.
    """

    def __init__(self, *, cuda: bool, flash: bool = True) -> None:
        super().__init__()
        self._functions: dict[Any, Callable[..., Any]] = _ANSWERS | (_CUDA if cuda else {})
        if cuda and not flash:
            self._functions[F.scaled_dot_product_attention] = functools.partial(_attention, flash=False)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The answer or kernel, where there is one; else the function itself."""
        found = self._functions.get(func)
        return (func if found is None else found)(*args, **(kwargs or {}))


def run_backward(loss: torch.Tensor) -> None:
    """`loss.backward()` for use inside `WithoutData`.

    torch leaves a mode while it runs what the mode was asked about, and `backward` is asked about: layers that are
    recomputed in it would then run on other kernels than they did in the forward pass.
    """
    ones = torch.ones_like(loss)
    _engine_run_backward((loss,), (ones,), False, False, (), allow_unreachable=True, accumulate_grad=True)


# -- answers -------------------------------------------------------------------------------------------------


def _number(tensor: torch.Tensor) -> float | int:
    # What was computed, such as the factor of clipping, or "is finite"; or the first bad step, of which there is none.
    return 1.0 if tensor.is_floating_point() else 0


def _answer(function: Callable[..., Any], answer: Callable[[torch.Tensor], Any]) -> Callable[..., Any]:
    """`answer` in place of `function`, for tensors without data and no further arguments."""

    def ask(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        has_data = not (tensor.is_meta or isinstance(tensor, FakeTensor))
        return function(tensor, *args, **kwargs) if has_data or args or kwargs else answer(tensor)

    return ask


_ANSWERS: dict[Any, Callable[..., Any]] = {
    function: _answer(function, answer)
    for function, answer in (
        (torch.Tensor.item, _number),
        (torch.Tensor.tolist, lambda tensor: [_number(tensor)] * tensor.numel()),
        (torch.Tensor.__int__, lambda tensor: 1),  # steps
        (torch.Tensor.__bool__, lambda tensor: True),  # of what is looked at to be sure
        (torch.Tensor.all, lambda tensor: False),  # of a mask: is every position a token?
        (torch.all, lambda tensor: False),
        (torch.Tensor.data_ptr, lambda tensor: tensor.untyped_storage()._cdata),
    )
}


# -- kernels of CUDA -----------------------------------------------------------------------------------------


def _dropout(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool | None = None
) -> torch.Tensor:
    training = training if train is None else train
    if not training or p == 0:
        return input
    dropped: torch.Tensor = aten.native_dropout(input, p, True)[0]
    return dropped


class _RMSNormWithoutData(torch.autograd.Function):
    # By its name in `aten` the device "meta" gets the plain one, too: what CUDA's allocates and keeps.

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(values.dtype, torch.float32)
        scales = torch.empty((*values.shape[: values.ndim - weight.ndim],), dtype=wide, device=values.device)
        ctx.save_for_backward(values, weight, scales)
        return torch.empty_like(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, weight, _ = ctx.saved_tensors
        return torch.empty_like(values), torch.empty_like(weight)


def _rms_norm(
    input: torch.Tensor, normalized_shape: Any, weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    del eps
    if weight is None:
        weight = torch.empty(tuple(normalized_shape), dtype=input.dtype, device=input.device)
    normed: torch.Tensor = _RMSNormWithoutData.apply(input, weight)  # type: ignore[no-untyped-call]  # untyped
    return normed


class _FlashAttention(torch.autograd.Function):
    # Its result lies in memory as [B, Q, H, D], whatever the query's order; what "meta" makes would follow the query.

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        attended = _by_position(query)
        scales = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
        ctx.save_for_backward(query, key, value, attended, scales)
        return attended

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value, _, scales = ctx.saved_tensors
        # The query's gradient is summed up in fp32; keys and values that heads share get one for every head at first.
        sums = torch.empty(query.shape, dtype=torch.float32, device=query.device), torch.empty_like(scales)
        gradients = [_by_position(query), _by_position(key), _by_position(value)]
        shared = [_by_position(query) for one in (key, value) if one.shape[1] != query.shape[1]]
        del sums, shared
        return tuple(gradients)


def _by_position(heads: torch.Tensor) -> torch.Tensor:
    rows, count, length, width = heads.shape
    return torch.empty(rows, length, count, width, dtype=heads.dtype, device=heads.device).transpose(1, 2)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    flash: bool = True,
) -> torch.Tensor:
    """Flash attention if available (half precision, no mask), else the memory-efficient kernel."""
    flash = flash and attn_mask is None and _flash(query)
    if enable_gqa and (repeats := query.shape[1] // key.shape[1]) > 1 and not flash:
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    attended: torch.Tensor
    if flash:
        attended = _FlashAttention.apply(query, key, value)  # type: ignore[no-untyped-call]  # untyped
        return attended
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        allowed = attn_mask
        attn_mask = torch.zeros(allowed.shape, dtype=query.dtype, device=query.device)
        attn_mask = attn_mask.masked_fill_(~allowed, -math.inf)
    if attn_mask is not None:
        # The kernel wants rows that begin at multiples of 16 bytes.
        width = attn_mask.shape[-1]
        if width % 8:
            attn_mask = F.pad(attn_mask, (0, 8 - width % 8))[..., :width]
        attn_mask = attn_mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    gradients = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    attended = aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, gradients, dropout_p, is_causal, scale=scale
    )[0]
    return attended


def _log_softmax(input: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Of float16, and of that alone, CUDA takes it in fp32 without a copy of what goes in."""
    if input.dtype == torch.float16 and dtype == torch.float32:
        taken: torch.Tensor = aten._log_softmax(input, dim, True)
        return taken
    return torch.log_softmax(input, dim, dtype=dtype)


def _flash(query: torch.Tensor) -> bool:
    return query.dtype in _HALF and query.shape[-1] <= 256 and query.shape[-1] % 8 == 0


_CUDA: dict[Any, Callable[..., Any]] = {
    F.dropout: _dropout,
    torch.dropout: _dropout,
    torch.Tensor.log_softmax: _log_softmax,
    F.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
    F.scaled_dot_product_attention: _attention,
}


# -- what kernels hold inside --------------------------------------------------------------------------------


def inside_cuda(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Bytes of the buffers that CUDA's kernels make and drop by themselves, where these are large."""
    del kwargs
    if func is aten._scaled_dot_product_efficient_attention_backward.default:
        query: torch.Tensor = args[1]  # its gradient is summed up in fp32, and a number a row is kept for the softmax
        return 4 * (query.numel() + query.numel() // query.shape[-1])
    return 0


def inside_cpu(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The same for the CPU's. Not in it: what oneDNN takes for a matrix product in bf16, up to 3 MiB."""
    if func is aten.linalg_vector_norm.default:
        values: torch.Tensor = args[0]
        wide: torch.dtype | None = kwargs.get("dtype")
        if wide is not None and wide != values.dtype:
            return values.numel() * wide.itemsize  # all of them, converted first
    return 0
