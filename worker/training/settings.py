"""Where a trainer process finds things, read from the environment once and passed down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from jobs.gpus import GPU, GpuFacts
from jobs.memory_plan import TEST_LIMIT, Device, prepare_memory


@dataclass(frozen=True)
class TrainerSettings:
    """Folders and device of one trainer process."""

    data: Path
    """Users' files; job files name paths inside it."""
    prepared: Path
    """Prepared datasets, shared by jobs."""
    models: Path
    """Model store, shared by jobs."""
    device: Device
    offline: bool
    """No hub access at all (a user's HF_HUB_OFFLINE)."""
    gpu: GpuFacts | None = None
    """The GPU that will train, as far as the supervisor knows; for the plans of check and prepare."""
    runs: Path = Path("runs")
    """Run directories: the models of other jobs are in them."""
    traces: Path | None = None
    """What memory plans keep for later ones; None: nothing."""
    uploads: Path = Path("uploads")
    """Data sets that came in over HTTP, a folder each; jobs name them `dataset:…`."""
    prepare_memory: int = 16 * 10**9
    """Bytes of memory that check and prepare may have, each process."""
    keep_downloads: bool = False
    """Weights from the hub are kept beside their bf16 copy."""
    test_memory_limit: int | None = None
    """Tests alone: bytes that an attempt really gets, whatever was planned (memory/hard_limit.py)."""


def from_environment(environ: Mapping[str, str], runs: Path = Path("runs")) -> TrainerSettings:
    """With those `runs`.

    LONGHAUL_{DATA,UPLOADS,PREPARED,MODELS,TRACES,KEEP_DOWNLOADS,DEVICE,GPU,PREPARE_MEMORY_GB} and
    HF_HUB_OFFLINE.
    """
    device = environ.get("LONGHAUL_DEVICE", "cuda")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"LONGHAUL_DEVICE is {device!r}; it is cpu or cuda")
    return TrainerSettings(
        data=Path(environ.get("LONGHAUL_DATA", "data")).resolve(),
        prepared=Path(environ.get("LONGHAUL_PREPARED", "prepared")).resolve(),
        models=Path(environ.get("LONGHAUL_MODELS", "models")).resolve(),
        device=cast(Device, device),
        uploads=Path(environ.get("LONGHAUL_UPLOADS", "uploads")).resolve(),
        runs=runs,
        traces=Path(environ.get("LONGHAUL_TRACES") or runs / ".traces").resolve(),
        offline=environ.get("HF_HUB_OFFLINE", "") not in ("", "0"),
        gpu=GpuFacts.parse(environ[GPU]) if environ.get(GPU) else None,
        prepare_memory=prepare_memory(environ.get("LONGHAUL_PREPARE_MEMORY_GB")),
        keep_downloads=environ.get("LONGHAUL_KEEP_DOWNLOADS", "") not in ("", "0"),
        test_memory_limit=int(environ[TEST_LIMIT]) if environ.get(TEST_LIMIT) else None,
    )
