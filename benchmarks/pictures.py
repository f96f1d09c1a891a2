"""The pictures of the README and of docs/, drawn anew by the product's own code.

    python -m benchmarks.pictures [--to docs/pictures] [--only memory|loss]

`memory-xl-32gb.png` is the `memory.png` of a job that trains FLAN-T5-XL on rows of 256/256 tokens on an RTX 5090, made
of its config, without weights or a GPU. `loss.png` is that of the job in `examples/`, which `longhaul demo` trains in
a temporary folder on the CPU, telling neither Discord nor Weights & Biases. Together a minute or two.

JSON on the last line: each picture and its bytes (null: not drawn). Exit code 1 when the demo fails.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.command_line import ROOT, parse
from jobs.disk.files import write_atomically
from jobs.gpus import REFERENCE
from jobs.spec import parse_spec
from longhaul.demo import run_demo
from worker.training.doctor.random_t5 import SHAPES
from worker.training.planning.budget import find_budget
from worker.training.planning.memory_plan import plan_memory
from worker.training.planning.stages import draw
from worker.training.tasks.seq2seq.task import Seq2Seq

KEYS = ("memory-xl-32gb.png", "loss.png")
MEMORY, LOSS = "memory-xl-32gb.png", "loss.png"
WIDTHS = (256, 256)
PASSED_ON = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "TMPDIR")
"""Of the environment, to the demo: no webhook, no key, no setting of this machine's own Longhaul."""


def main(argv: list[str]) -> int:
    """Draw, write, print."""
    parser = argparse.ArgumentParser(prog="benchmarks.pictures")
    parser.add_argument("--to", type=Path, default=ROOT / "docs" / "pictures")
    parser.add_argument("--only", choices=("memory", "loss"))
    parser.add_argument("--shape", choices=sorted(SHAPES), default="xl", help="of the model whose memory is drawn")
    arguments = parse(parser, argv, to=None, only="memory", shape="small")
    pictures = {}
    if arguments.only != "loss":
        pictures[MEMORY] = memory_of(SHAPES[arguments.shape])
    if arguments.only != "memory":
        pictures[LOSS] = loss_of_the_demo()
    if arguments.to is not None:
        arguments.to.mkdir(parents=True, exist_ok=True)
        for name, picture in pictures.items():
            write_atomically(arguments.to / name, picture)
    print(json.dumps({name: len(pictures[name]) if name in pictures else None for name in KEYS}))
    return 0


def memory_of(shape: dict[str, Any]) -> bytes:
    """What check draws when an RTX 5090 has been reported."""
    rows = {"train": "recipes.jsonl", "max_input_tokens": WIDTHS[0], "max_target_tokens": WIDTHS[1]}
    spec = parse_spec({"data": rows, "training": {"batch_size": 128}})
    budget = find_budget(spec.memory, "cuda", REFERENCE)
    config = shape | {"dropout_rate": 0.1}
    return draw(plan_memory(spec, Seq2Seq(), config, WIDTHS, device="cuda", budget=budget))


def loss_of_the_demo() -> bytes:
    """What publish draws when the demo's job has ended."""
    environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ} | {"LONGHAUL_DEVICE": "cpu"}
    with tempfile.TemporaryDirectory(prefix="longhaul-pictures-") as scratch:
        if run_demo(environment, Console(stderr=True), kind="recipes", model=None, home=Path(scratch)):
            sys.exit(1)
        (picture,) = Path(scratch).glob("runs/*/loss.png")
        return picture.read_bytes()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
