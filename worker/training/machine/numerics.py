"""What a process sets before it computes on a device: the allocator, and how matrices are multiplied."""

from __future__ import annotations

import torch

from worker.training.kernels.bf16_matmul import use_fp32_where_bf16_is_slow
from worker.training.kernels.grouped_attention import repeat_shared_heads
from worker.training.machine import expandable_segments
from worker.training.machine.device import has_native_bf16


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
