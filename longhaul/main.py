"""The `longhaul` command. What it needs takes a moment to import: Ctrl-C ends that quietly, too."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from signal import SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code (longhaul/commands/command.py says which there are)."""
    try:
        from longhaul.command_line import run

        return run(argv)
    except KeyboardInterrupt:
        return 128 + SIGINT


if __name__ == "__main__":
    sys.exit(main())
