"""Rows of metrics.jsonl: how training goes, every `log.every_steps` steps."""

from __future__ import annotations

from jobs.frozen import Frozen


class MetricRow(Frozen):
    """One line of metrics.jsonl: means over the steps since the one before. Of two rows for a step the later counts."""

    step: int
    """Optimizer steps done."""
    at: float
    """Unix time, seconds."""
    attempt: int
    """The attempt that wrote it."""
    epoch: float
    """Passes over the rows, with a fraction."""
    loss: float
    """Mean negative log likelihood of a target token (of a classifier: of a row), nats; of a regression the
    mean squared error; in fp32."""
    learning_rate: float
    """Of the last step."""
    grad_norm: float | None
    """Global norm before clipping, without that of skipped updates. None where all were skipped."""
    loss_scale: float | None = None
    """What the loss of the last step was multiplied by for its backward pass. None: the model is not float16."""
    skipped_updates: int | None = None
    """Steps of the run so far whose update was skipped, since gradients overflowed float16. None as above."""
    rows_per_s: float
    """Training rows a second."""
    target_tokens_per_s: float
    """Target tokens a second, without padding."""
    tokens_per_s: float | None = None
    """Tokens that went through the model a second, without padding; learned ones of a causal model once. This and the
    next three: None in rows of earlier versions."""
    padding_fraction: float | None = None
    """Share of the positions that went through the model that were padding."""
    model_flops_per_s: float | None = None
    """What the model needs for these rows at their real lengths, forward and backward. None where it is not counted."""
    mfu: float | None = None
    """That as a share of the GPU's peak in bf16, 0 to 1. None on CPU, and for a GPU whose peak is not known."""
    step_s: float
    """Seconds of a step."""
    eta_s: float
    """Seconds left by what was measured so far: steps, evaluations and checkpoints."""
    memory_bytes: int
    """CUDA: allocated at peak since the last row; CPU: resident set now."""
    memory_reserved_bytes: int
    """CUDA: reserved by the allocator; CPU: the same as `memory_bytes`."""
    memory_planned_bytes: int | None = None
    """What was predicted for the largest micro-batch. None in rows of earlier versions, as are the next two."""
    memory_fragmentation: float | None = None
    """Share of the reserved memory that was not allocated at the peak, 0 to 1. None on CPU."""
    gpu_memory_other_processes_bytes: int | None = None
    """What other processes hold of the GPU. None if unknown."""
    cache_clears: int
    """Cache clearings so far in this attempt."""
    cache_clear_s: float
    """Seconds they took so far in this attempt."""
    cache_freed_bytes: int | None = None
    """What they gave back so far in this attempt. None in rows of earlier versions."""
    micro_batch: int
    """Rows of the longest shape that go through the model at once."""
    data_wait_fraction: float
    """Share of step time spent waiting for data."""
    gpu_utilization: float | None = None
    """Share of the driver's last sampling period (up to 1 s) in which the GPU was busy, 0 to 1. None on CPU."""
    gpu_memory_used_bytes: int | None = None
    """Of the whole GPU, by every process on it."""
    gpu_temperature_c: int | None = None
    """Degrees Celsius."""
    gpu_power_w: float | None = None
    """Watts."""
    host_memory_used_bytes: int | None = None
    """Of the machine, or of the container where that has a lower limit; without page cache."""
    host_memory_available_bytes: int | None = None
    """What programs there can still get."""
    trainer_rss_bytes: int | None = None
    """Resident set of the trainer process."""
