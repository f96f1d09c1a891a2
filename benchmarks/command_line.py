"""What the command lines of all benchmarks have in common: `--smoke`, the smallest size, to see that they still run."""

from __future__ import annotations

import argparse
import atexit
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECIPES, TICKETS = ROOT / "examples" / "recipes.jsonl", ROOT / "examples" / "tickets.jsonl"
"""Rows of texts, and rows of texts with labels."""
TRACES = "LONGHAUL_TRACES"
"""A folder: of one benchmark, unless it is set."""


def parse(parser: argparse.ArgumentParser, argv: Sequence[str], **smallest: object) -> argparse.Namespace:
    """The arguments. With `--smoke` the options that are not given have their `smallest` values.

    Figures of that size say nothing, so a benchmark does not end with 1 for them, but for what holds at any size.
    """
    parser.add_argument("--smoke", action="store_true", help="the smallest size: does it run?")
    unknown = smallest.keys() - {action.dest for action in parser._actions}
    assert not unknown, f"there is no option for {unknown}"
    if "--smoke" in argv:
        parser.set_defaults(**smallest)
    arguments = parser.parse_args(argv)
    if TRACES not in os.environ:
        os.environ[TRACES] = tempfile.mkdtemp(prefix="longhaul-traces-")
        atexit.register(shutil.rmtree, os.environ[TRACES], ignore_errors=True)
    return arguments


def traces() -> Path:
    """Where is kept what tracing a model has found out about its memory."""
    return Path(os.environ[TRACES])


def skipped(arguments: argparse.Namespace, why: str) -> int:
    """Say that this machine cannot run it. Returns the exit code, which `--smoke` does not take for a failure."""
    print(json.dumps({"skipped": why}))
    return 0 if arguments.smoke else 2
