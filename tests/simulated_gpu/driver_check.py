"""The self-test of the simulated GPU, with cases that end where they are done: `make simulated-gpu` runs it.

Each case of `selftest` is a process. One whose last act is a backward pass on the GPU may abort while Python takes
itself apart ("terminate called without an active exception"): torch's autograd thread still drops its graph, wants
the GIL for that, and Python before 3.14 answers with `pthread_exit`, which may not pass through a destructor. So it
is with a real driver, too. What the case asserts has then held; here it ends there, and an assertion still fails it.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any


def main(words: list[str]) -> int:
    """All cases, or those that are named; `--inside CASE`: that one, in this process."""
    selftest: Any = importlib.import_module("selftest")  # beside the driver, which `run` puts on the path
    if words[:1] == ["--inside"]:
        selftest.CASES[words[1]][0]()
        sys.stdout.flush()
        os._exit(0)
    selftest.__file__ = __file__  # what it starts for each case
    return int(selftest.main(words or list(selftest.CASES)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
