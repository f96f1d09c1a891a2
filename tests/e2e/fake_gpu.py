"""A machine whose GPU is a file, and can be lost."""

from __future__ import annotations

import os
from pathlib import Path

SMI = """#!/bin/sh
if [ -e '{gpu}' ]; then echo '0, GPU-aaa, NVIDIA GeForce RTX 5090, 32607, 580.95.05, 12.0'; exit 0; fi
echo 'Unable to determine the device handle for GPU0: 0000:01:00.0: GPU is lost.  Reboot the system'; exit 15
"""
SAID = "GPU is lost"
TORCH = """
import pathlib
pathlib.Path({gpu!r}).unlink()
raise RuntimeError("CUDA error: unknown error")
"""


def machine(folder: Path, path: str) -> tuple[dict[str, str], Path]:
    """(what a worker's environment needs to find a GPU there, the file that is the GPU).

    nvidia-smi is a script. torch says it is built for CUDA; whoever imports it loses the GPU, as a trainer would that
    comes to its first kernel. The CUDA driver says nothing.
    """
    for name in ("tools", "torch", "libraries"):
        (folder / name).mkdir(parents=True)
    gpu = folder / "gpu"
    gpu.touch()
    (folder / "tools/nvidia-smi").write_text(SMI.format(gpu=gpu))
    (folder / "tools/nvidia-smi").chmod(0o755)
    (folder / "torch/__init__.py").write_text(TORCH.format(gpu=os.fspath(gpu)))
    (folder / "torch/version.py").write_text("cuda = '13.0'\n")
    (folder / "libraries/libcuda.so.1").touch()
    return {
        "LONGHAUL_DEVICE": "cuda",
        "PATH": f"{folder}/tools:{path}",
        "PYTHONPATH": os.fspath(folder),
        "LD_LIBRARY_PATH": f"{folder}/libraries",
    }, gpu
