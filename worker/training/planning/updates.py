"""What an optimizer needs without data: its random generator, and the compiled update of `adamw_8bit`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from jobs.memory_plan import OptimizerName


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
