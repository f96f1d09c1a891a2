"""Every benchmark has a smallest size, its keys and its line in the table; what `make bench-smoke` makes of one."""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import smoke
from benchmarks.command_line import ROOT, parse

TABLE = (smoke.FOLDER / "README.md").read_text()
THE_RUNNER = {"__init__", "command_line", "forking", "smoke"}


def imported(file: Path) -> set[str]:
    """Modules of benchmarks/ that one imports, or starts."""
    return set(re.findall(r"\bbenchmarks\.(\w+)", file.read_text()))


def test_every_benchmark_has_its_line_in_the_table() -> None:
    assert re.findall(r"^\| `(\w+)` \|", TABLE, re.MULTILINE) == smoke.names()


def test_every_file_is_a_benchmark_or_a_part_of_one() -> None:
    files = {file.stem: file for file in smoke.FOLDER.glob("*.py")}
    used, new = set[str](), set(smoke.names())
    while new:
        used |= new
        new = {part for name in new for part in imported(files[name]) if part in files} - used
    assert files.keys() - used - THE_RUNNER == set()


@pytest.mark.parametrize("name", smoke.names())
def test_a_smallest_size(name: str) -> None:
    tree = ast.parse((smoke.FOLDER / f"{name}.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "parse"]
    assert [bool(call.keywords) for call in calls] == [True]


@pytest.mark.parametrize(
    ("code", "last", "failure", "skipped"),
    [
        (0, '{"a": 1, "b": null}', None, None),
        (0, '{"skipped": "no GPU"}', None, "no GPU"),
        (0, '{"a": 1}', "JSON without b", None),
        (0, '{"a": 1, "c": 2, "d": 3}', "JSON without b and with c, d", None),
        (1, '{"a": 1, "b": 2}', "exit code 1", None),
        (0, "[1]", "its last line is not JSON (exit code 0)", None),
        (-9, "", "its last line is not JSON (exit code -9)", None),
    ],
)
def test_what_is_wrong(code: int, last: str, failure: str | None, skipped: str | None) -> None:
    assert smoke.judge(code, last, {"a", "b"}) == (failure, skipped)


def test_an_option_that_is_given_wins_over_the_smallest_size() -> None:
    def parsed(*argv: str) -> dict[str, object]:
        parser = argparse.ArgumentParser()
        parser.add_argument("rows", type=int, nargs="?", default=100)
        parser.add_argument("--steps", type=int, default=10)
        return vars(parse(parser, argv, rows=1, steps=2))

    assert parsed() == {"rows": 100, "steps": 10, "smoke": False}
    assert parsed("--smoke", "--steps", "7") == {"rows": 1, "steps": 7, "smoke": True}


# -- forks -------------------------------------------------------------------------------------------------------------

SERVER = """
import json, os, sys
from pathlib import Path
from benchmarks.forking import Forks

forks, ended = Forks(Path(sys.argv[1])), []
files = [os.dup(each) for each in (0, 1, 2)]
forks.begin("one", ["tests.benchmarks.forked", "starts"], files, os.environ, ended.append)
while not ended:
    forks.serve(10.0)
forks.close()
print(ended[0].code, sorted(forks.cpu_s))
"""
"""A process of its own: it has to have one thread."""


def test_programs_that_a_fork_starts_are_forks_and_end_as_programs_do(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SERVER, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    told, end = done.stdout.splitlines() or ["{}", ""]
    assert json.loads(told) == {
        "argv": ["starts"],
        "forked_by_the_same": True,
        "given": "a line\n",
        "folder": str(ROOT),
        "exit_code": 7,
        "terminated": 15,
        "killed": -9,
        "gone_with_its_client": True,
        "other_words_are_no_fork": True,
        "other_folders_are_no_fork": True,
    }, done.stderr
    assert end == "3 ['one']"
