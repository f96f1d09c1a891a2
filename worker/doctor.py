"""`python -m worker doctor`: finds the GPU that a train worker would use, and has the trainer's process examine it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from jobs.gpus import GPU
from jobs.heartbeat import TOGETHER
from jobs.process.secrets import minimal_environment
from jobs.process.stopping import Stopped, run_child, stopped_once
from worker.gpu import NoGpu, named_gpus, usable_gpu

DRIVER = Path("/dev/nvidia0")


def examine(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the doctor in this terminal; returns its exit code. It is given no secret."""
    environment = minimal_environment(environ, ())
    device = environ.get("LONGHAUL_DEVICE") or ("cuda" if DRIVER.exists() else "cpu")
    if device not in ("cpu", "cuda"):
        print(f"doctor: LONGHAUL_DEVICE is {device!r}; set it to cpu or cuda", file=sys.stderr)
        return 2
    environment["LONGHAUL_DEVICE"] = device
    command = [sys.executable, "-m", "worker.training", "doctor", *arguments]
    try:
        with stopped_once():
            if device == "cuda":
                try:
                    names = environ.get("LONGHAUL_GPUS") or environ.get("CUDA_VISIBLE_DEVICES") or "all"
                    gpu = usable_gpu(named_gpus(names.replace(" ", ""))[0].split(TOGETHER)[0])  # one of a group
                except NoGpu as error:
                    command += ["--no-gpu", str(error)]
                else:
                    environment |= {"CUDA_VISIBLE_DEVICES": gpu.uuid, GPU: gpu.facts.encode()}
                    command += ["--driver", gpu.driver]
            return run_child(command, environment)
    except Stopped as stopped:
        print("doctor: stopped; nothing is kept", file=sys.stderr)
        return stopped.code
