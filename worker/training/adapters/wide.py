"""A model computed in wide numbers as it lies in memory, without a copy: each weight is widened where it is used."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map


class Widened(TorchFunctionMode):
    """Inside, functions get `wide` in place of floats with fewer bits, tensors and dtypes alike.

    What a function would change in place must be wide already: of a narrow tensor it would change a copy. So this is
    for forward passes alone, in which activations are wide from the embedding on and no weight is changed.
    """

    def __init__(self, wide: torch.dtype) -> None:
        super().__init__()
        self._dtype = wide

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The function, on wide numbers."""
        if func is torch.Tensor.float:
            func, args = torch.Tensor.to, (*args[:1], self._dtype)
        return func(*tree_map(self._wide, args), **tree_map(self._wide, kwargs or {}))

    def _wide(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(self._dtype) if self._narrow(value.dtype) else value
        return self._dtype if isinstance(value, torch.dtype) and self._narrow(value) else value

    def _narrow(self, dtype: torch.dtype) -> bool:
        return dtype.is_floating_point and dtype.itemsize < self._dtype.itemsize
