"""What the command lines of all benchmarks have in common: `--smoke`, the smallest size, to see that they still run."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECIPES, TICKETS = ROOT / "examples" / "recipes.jsonl", ROOT / "examples" / "tickets.jsonl"
"""Rows of texts, and rows of texts with labels."""
TRACES = "LONGHAUL_SMOKE_TRACES"
"""Set by `benchmarks.smoke`: a folder."""


def parse(parser: argparse.ArgumentParser, argv: Sequence[str], **smallest: object) -> argparse.Namespace:
    """The arguments. With `--smoke` the options that are not given have their `smallest` values.

    Figures of that size say nothing, so a benchmark does not end with 1 for them, but for what holds at any size.
    """
    parser.add_argument("--smoke", action="store_true", help="the smallest size: does it run?")
    unknown = smallest.keys() - {action.dest for action in parser._actions}
    assert not unknown, f"there is no option for {unknown}"
    if "--smoke" in argv:
        parser.set_defaults(**smallest)
    return parser.parse_args(argv)


def share_traces(runs: Path) -> None:
    """What another benchmark of the same `make bench-smoke` has found out about a model's memory, the jobs of this
    runs directory need not: that takes longer than to train them."""
    folder = runs / ".traces"
    if TRACES in os.environ and not folder.is_symlink():
        runs.mkdir(parents=True, exist_ok=True)
        folder.symlink_to(os.environ[TRACES])


def skipped(arguments: argparse.Namespace, why: str) -> int:
    """Say that this machine cannot run it. Returns the exit code, which `--smoke` does not take for a failure."""
    print(json.dumps({"skipped": why}))
    return 0 if arguments.smoke else 2
