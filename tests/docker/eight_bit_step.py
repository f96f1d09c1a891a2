"""One step of our own 8-bit optimizer, to be run inside the worker container (which holds no tests: `python -c`).

Prints JSON: who it ran as, and what the step did.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch._dynamo.utils import counters

from jobs.spec import TrainingSpec
from worker.training.journal import Journal
from worker.training.optimizers.optimizer import make_optimizer

SHAPE = (96, 128)
"""12,288 numbers: enough for states of one byte. No model of the tests has this shape, so it is in no cache."""


def libraries() -> set[Path]:
    """What the compiler has built so far."""
    return set(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).rglob("*.so"))


def main() -> int:
    """Make, compile, step, print."""
    before = libraries()
    torch.manual_seed(0)
    weight = nn.Parameter((0.05 * torch.randn(SHAPE)).to(torch.bfloat16))
    start = weight.detach().clone()
    optimizer = make_optimizer("adamw_8bit", [("weight", weight)], TrainingSpec(), fused=True)
    with tempfile.TemporaryDirectory() as folder:
        optimizer.compile(Journal(Path(folder) / "attempt.jsonl"))
    compiled = counters["stats"]["unique_graphs"]
    weight.grad = torch.randn(SHAPE).to(torch.bfloat16)
    optimizer.step(1, 1e-2, torch.tensor(1.0))
    states = optimizer.state_dict()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    print(
        json.dumps({
            "uid": os.getuid(),
            "capabilities": status["CapEff"].strip(),
            "root_is_read_only": bool(os.statvfs("/").f_flag & os.ST_RDONLY),
            "compiled": compiled,
            "compiled_later": counters["stats"]["unique_graphs"] - compiled,
            "libraries": len(libraries() - before),
            "changed": (weight != start).float().mean().item(),
            "largest_change": (weight - start).abs().max().item(),
            "states": {name: str(state.dtype) for name, state in states.items() if name.startswith("exp_avg")},
            "codes_set": [states[f"{kind}.codes.weight"].any().item() for kind in ("exp_avg", "exp_avg_sq")],
        })
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
