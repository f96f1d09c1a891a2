"""A child process that is spoken to in JSON lines."""

from __future__ import annotations

import os
import signal
import subprocess
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


WARM = """
import json, sys
from worker.training import warm

def main(arguments):
    print("a warning", file=sys.stderr)
    for line in sys.stdin:
        print(json.dumps({"name": arguments[0], "asked": json.loads(line)["n"]}), flush=True)
    return 7

warm.import_all = lambda: print("it listens", flush=True)  # what it forks does without imports
warm.serve(sys.argv[1], {}, main)
"""


def test_forked_children_answer_for_themselves_and_end_one_by_one(tmp_path: Path) -> None:
    socket = os.fspath(tmp_path / "warm")
    command = [sys.executable, "-c", WARM, socket]
    warm = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    try:
        assert warm.stdout is not None and warm.stdout.readline() == b"it listens\n"
        one, other = (JsonChild.forked(socket, [name], {}) for name in ("one", "other"))
        assert one is not None and other is not None
        for child, name in ((one, "one"), (other, "other")):
            child.ask({"n": 1})
            assert child.answer(60.0) == {"name": name, "asked": 1}
        one.end(60.0)
        assert not one.running and one.kill() == 7, "it read the end of its input, which no other child holds open"
        other.ask({"n": 2})
        assert other.answer(60.0) == {"name": "other", "asked": 2}
        assert other.kill() == -signal.SIGKILL
    finally:
        warm.kill()
        warm.communicate()


def test_where_nothing_forks_none_is_forked_and_no_file_stays_open(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    assert JsonChild.forked(os.fspath(tmp_path / "nobody"), ["one"], os.environ) is None
    assert os.listdir("/proc/self/fd") == before
