"""What a process sets before it computes on a device: the allocator, and how matrices are multiplied."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from transformers.integrations import sdpa_attention

from worker.training.machine import expandable_segments
from worker.training.machine.device import has_native_bf16

# -- bf16 matmul -------------------------------------------------------------------------------------------------------
# Matrix products of bf16 on a CPU without bf16 instructions (most below AVX-512).
#
# torch multiplies them there number by number: 45 times slower than fp32. Here such a product is computed from fp32
# copies and rounded once. Nothing of the copies outlives the call: what autograd keeps is the bf16 tensors, as before.

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
_INTO: dict[str, Callable[..., Any]] = {"mm.out": torch.mm, "addmm_": torch.addmm}
"""Those that write to a tensor that is there, and what computes the same."""


@functools.cache
def use_fp32_where_bf16_is_slow() -> torch.library.Library | None:
    """Replace torch's kernels for this process, once. None, and no change, where the CPU has bf16 instructions."""
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings(action="ignore"):  # that a kernel is replaced
        for product in _PRODUCTS:
            stock = torch.library.get_kernel(f"aten::{product}", "CPU")
            library.impl(product, functools.partial(_multiply, stock), "CPU", with_keyset=True)
        for product, same in _INTO.items():
            stock = torch.library.get_kernel(f"aten::{product}", "CPU")
            library.impl(product, functools.partial(_multiply_into, stock, same), "CPU", with_keyset=True)
    return library


def _multiply(stock: Any, keys: torch.DispatchKeySet, *tensors: torch.Tensor, **factors: Any) -> torch.Tensor:
    """`stock` of the tensors, of their fp32 copies where they are bf16."""
    result: torch.Tensor
    if tensors[0].dtype is not torch.bfloat16:
        result = stock.call_boxed(keys, *tensors, **factors)
        return result
    result = stock.call_boxed(keys, *(tensor.float() for tensor in tensors), **factors)
    return result.to(torch.bfloat16)


def _multiply_into(
    stock: Any,
    same: Callable[..., Any],
    keys: torch.DispatchKeySet,
    *tensors: torch.Tensor,
    **options: Any,
) -> torch.Tensor:
    """`same` of fp32 copies into `out`, or else into the first, where the tensors are bf16; `stock` elsewhere."""
    if tensors[0].dtype is not torch.bfloat16:
        result: torch.Tensor = stock.call_boxed(keys, *tensors, **options)
        return result
    target: torch.Tensor = options.pop("out", tensors[0])
    return target.copy_(same(*(tensor.float() for tensor in tensors), **options))


# -- grouped attention -------------------------------------------------------------------------------------------------
# Attention whose heads share keys and values (grouped queries), on GPUs without flash attention.
#
# Those before compute capability 8.0 have torch's memory-efficient kernel alone, which wants a key for each query's
# head. Asked to share them (`enable_gqa`), torch takes its plain kernel there, which holds a score for each pair of
# positions.


def repeat_shared_heads() -> None:
    """Have transformers repeat keys and values before attention, in this process, instead of sharing them.

    Layers that are recomputed look the function up anew, so it is replaced once, and for all of them.
    """
    sdpa_attention.use_gqa_in_sdpa = _never  # type: ignore[assignment]


def _never(*tensors: object) -> bool:
    return False


# -- numerics ----------------------------------------------------------------------------------------------------------


def prepare_device(device: torch.device) -> None:
    """For this process, before anything is loaded. On CUDA, TF32 for what is computed in fp32; on the CPU full fp32,
    where resuming is exact bit for bit.
    """
    expandable_segments.leave_off_where_broken(device)
    if device.type == "cuda":
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    else:
        use_fp32_where_bf16_is_slow()
    if not has_native_bf16(device):
        repeat_shared_heads()
