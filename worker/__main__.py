"""`python -m worker …`. What it needs takes a moment to import: Ctrl-C ends that quietly, too."""

from __future__ import annotations

import sys
from signal import SIGINT


def main() -> int:
    """Run one command and return its exit code."""
    try:
        from worker.command_line import main as run

        return run()
    except KeyboardInterrupt:
        return 128 + SIGINT


if __name__ == "__main__":
    sys.exit(main())
