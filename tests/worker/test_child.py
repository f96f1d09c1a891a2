"""A child process that is spoken to in JSON lines."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from worker.child import JsonChild

SLOW_TO_START = """
import json, sys
open(sys.argv[1]).read()  # what it has to do before it reads
for line in sys.stdin:
    print(json.dumps({"characters": len(json.loads(line)["text"])}), flush=True)
"""


def test_a_question_larger_than_the_pipe_waits_until_the_child_reads(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    child = JsonChild([sys.executable, "-c", SLOW_TO_START, os.fspath(gate)], os.environ)
    try:
        child.ask({"text": "x" * 1_000_000})
        assert child.answer(0.0) is None and child.running
        gate.write_text("")
        assert child.answer(60.0) == {"characters": 1_000_000}
        child.ask({"text": "again"})
        assert child.answer(60.0) == {"characters": 5}
    finally:
        child.kill()
