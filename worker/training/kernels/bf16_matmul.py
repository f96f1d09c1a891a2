"""Matrix products of bf16 on a CPU without bf16 instructions (most below AVX-512).

torch multiplies them there number by number: 45 times slower than fp32. Here such a product is computed from fp32
copies and rounded once. Nothing of the copies outlives the call: what autograd keeps is the bf16 tensors, as before.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

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
