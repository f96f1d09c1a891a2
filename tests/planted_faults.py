"""How many faults do the tests notice? `python -m tests.planted_faults` plants them, one at a time, and counts.

A fault is one change in one place of a file of `WHERE`: a comparison or a condition turned round, a sign, a number one
higher, a statement that is gone. 200 are drawn: the same ones of the same source and seed, and a change of the source
changes few of them. Each is planted in a copy of the tree. Then run the tests of `make test` (but those of pages) that
reach the file, nearest first, until one fails or `--seconds` of CPU are spent. What fails without it does not count.

One process imports torch and the other libraries; for each fault it forks, and the child imports ours from the copy.
The last line is JSON: {"mutants": 200, "noticed": 171, "share": 0.855, "lived": ["file:line: change", …]}.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = ("jobs", "service", "worker", "longhaul", "benchmarks", "tests")
WHERE = (
    "jobs/record.py", "jobs/redis", "worker/supervise.py", "worker/reconcile.py", "worker/training/loop.py",
    "worker/training/memory/recovery.py", "worker/training/checkpoints", "worker/training/optimizers",
    "worker/training/rows", "worker/training/dataset", "service/edge",
)  # fmt: skip
LIBRARIES = (
    "numpy", "torch", "transformers", "transformers.models.t5.modeling_t5", "tokenizers", "safetensors.torch",
    "pyarrow", "pydantic", "fastapi", "redis", "rq", "requests", "httpx", "hypothesis", "jsonschema",
    "schemathesis",
)  # fmt: skip
SLOW = ("e2e", "faults", "ranks", "test_publish.py")
"""Parts of paths whose tests start all of Longhaul: the last among equals."""
ELSEWHERE = re.compile(r"^pytestmark = (\[[^\]]*?)?pytest\.mark\.(gpu|docker|simulated_gpu|engines)\b", re.MULTILINE)
"""In files that `make test` leaves out whole."""
A_TEST_S = 300
"""A single test that takes longer hangs, and the fault is noticed."""

COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
OPERATORS: dict[type[ast.operator], str] = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*"}


# --- faults


@dataclass(frozen=True)
class Mutant:
    """The bytes `start` to `end` of a file give way to `text`."""

    file: str
    line: int
    start: int
    end: int
    text: str
    change: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.change}"

    def planted(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.end :]


def mutants_of(file: str, source: bytes) -> list[Mutant]:
    """Every fault that can be planted in a file, from top to bottom."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for node, text in _changes(ast.parse(source)):
        assert node.end_lineno is not None and node.end_col_offset is not None
        start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        before = " ".join(source[start:end].decode().split())
        found.append(Mutant(file, node.lineno, start, end, text, f"{before[:80]} → {text[:80]}"))
    return found


def _changes(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Places below a node, and the text that stands there instead."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    match node:
        case ast.Compare(left=left, ops=[operator], comparators=[right]):
            yield node, f"({ast.unparse(left)} {COMPARISONS[type(operator)]} {ast.unparse(right)})"
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in OPERATORS and not _holds_text(node):
            yield node, f"({ast.unparse(left)} {OPERATORS[type(sign)]} {ast.unparse(right)})"
        case ast.BoolOp(op=joint, values=values):
            other = " or " if isinstance(joint, ast.And) else " and "
            yield node, f"({other.join(_bracketed(each) for each in values)})"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield node, _bracketed(operand)
        case ast.Constant(value=bool() as value):
            yield node, str(not value)
        case ast.Constant(value=int() as value):
            yield node, str(value + 1)
        case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            yield node, "return None"
        case ast.AugAssign() | ast.Raise() | ast.Delete() | ast.Continue() | ast.Break():
            yield node, "pass"
        case ast.Expr(value=ast.Call(func=called)) if not re.match(r"(\w*\.)?_?log(ger)?\.", ast.unparse(called)):
            yield node, "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield node, "pass"
    if isinstance(node, ast.If | ast.While | ast.IfExp) and not isinstance(node.test, ast.Compare | ast.UnaryOp):
        yield node.test, f"(not {_bracketed(node.test)})"
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "type_params", "type_comment"):
            continue
        for child in value if isinstance(value, list) else [value]:
            # What an f-string holds has had no place of its own for long, and messages are no behaviour.
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr | ast.MatchValue):
                yield from _changes(child)


def _bracketed(node: ast.expr) -> str:
    return f"({ast.unparse(node)})"


def _holds_text(node: ast.AST) -> bool:
    texts = (str, bytes)
    return any(
        isinstance(each, ast.JoinedStr) or (isinstance(each, ast.Constant) and isinstance(each.value, texts))
        for each in ast.walk(node)
    )


def drawn(root: Path, where: Iterable[str], count: int, seed: int) -> list[Mutant]:
    """Those that come first when all are sorted by a hash of what they are, in the order of the files."""
    files = sorted(
        {each for part in where for each in ([root / part] if part.endswith(".py") else (root / part).rglob("*.py"))}
    )
    ranked = []
    for path in files:
        file = path.relative_to(root).as_posix()
        seen: dict[str, int] = defaultdict(int)
        for mutant in mutants_of(file, path.read_bytes()):
            seen[mutant.change] += 1
            key = f"{seed} {file} {mutant.change} {seen[mutant.change]}"
            ranked.append((hashlib.sha256(key.encode()).digest(), mutant))
    first = [mutant for _, mutant in sorted(ranked, key=lambda each: each[0])[:count]]
    return sorted(first, key=lambda each: (each.file, each.start, each.change))


# --- tests


class Reach:
    """Which test files reach a module, and over how many imports."""

    def __init__(self, root: Path) -> None:
        files = [path.relative_to(root) for name in OURS for path in sorted((root / name).rglob("*.py"))]
        self._modules = {file: ".".join(file.with_suffix("").parts).removesuffix(".__init__") for file in files}
        known = set(self._modules.values())
        self._users: dict[str, set[Path]] = defaultdict(set)
        self._words: dict[Path, set[str]] = {}
        self._root = root
        for file, module in self._modules.items():
            text = (root / file).read_text()
            used = _imports(module, file.name == "__init__.py", ast.parse(text), known)
            for each in used:
                self._users[each].add(file)
            if file.name.startswith("test_") and not ELSEWHERE.search(text):
                self._words[file] = set(re.findall(r"\w+", text))
        self._files_with = Counter(word for words in self._words.values() for word in words)

    def tests(self, mutant: Mutant) -> list[Path]:
        """Nearest first: those of the file's own name; then those that have rare words in common with the lines around
        the fault, over few imports or in the file's folder; and what starts all of Longhaul last.
        """
        target = Path(mutant.file)
        distance, ring, far = {target: 0}, [target], 0
        while ring:
            far += 1
            users = {user for each in ring for user in self._users[self._modules[each]]}
            ring = sorted(users - distance.keys())
            distance |= dict.fromkeys(ring, far)
        lines = (self._root / target).read_text().splitlines()[max(0, mutant.line - 6) : mutant.line + 3]
        around = set(re.findall(r"\w+", " ".join(lines))) | {target.stem}
        folder = Path("tests", *target.parent.parts)
        if folder.parts[1:3] == ("worker", "training"):
            folder = Path("tests", *folder.parts[2:])
        while not (self._root / folder).is_dir():
            folder = folder.parent

        def rank(test: Path) -> tuple[bool, bool, float, str]:
            home = test.parent == folder
            named = home and target.stem in test.stem
            slow = any(part in SLOW for part in test.parts)
            shared = sum(1 / self._files_with[word] for word in sorted(around & self._words[test]))
            return not named, slow, -shared * (1 + home) / distance[test], test.as_posix()

        return sorted(distance.keys() & self._words.keys(), key=rank)


def _imports(module: str, package: bool, tree: ast.Module, known: set[str]) -> set[str]:
    """Modules of ours that a module imports, or names in a text, as it does to start one with `python -m`."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: len(module.split(".")) - node.level + package] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found |= {base} | {f"{base}.{each.name}" for each in node.names}
        elif isinstance(node, ast.List | ast.Tuple | ast.Call):
            words = [str(getattr(each, "value", "")) for each in ast.iter_child_nodes(node)]
            started = {after for option, after in pairwise(words) if option == "-m"}
            started |= {word for word in words if "." in word}
            found |= started | {f"{each}.__main__" for each in started}
    return found & known


def marked(root: Path) -> str:
    """The tests of `make test`."""
    found = re.search(r"^MARKERS \?= (.*)$", (root / "Makefile").read_text(), re.MULTILINE)
    assert found is not None, "the Makefile says which tests `make test` runs"
    return found[1]


# --- runs


class _Watch:
    """A plugin: which test failed, and no further test when the time is up."""

    def __init__(self, until: float) -> None:
        self.failed: str | None = None
        self.late = False
        self._until = until

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid

    def pytest_runtest_logfinish(self) -> None:
        self.late = _cpu_seconds() > self._until

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if self.late:
            item.session.shouldstop = "the time for this fault is up"
        return (yield)


def _cpu_seconds() -> float:
    return sum(os.times()[:4])


@dataclass
class ForkEnd:
    """How the tests of one fork have ended."""

    failed: str | None
    """The first test that failed; "" where the process hung or crashed."""
    seconds: float
    late: bool


@dataclass
class Plot:
    """A copy of the tree, in which one fault at a time is planted."""

    folder: Path
    options: tuple[str, ...]
    broken: set[str] = field(default_factory=set)
    """Tests that fail without a fault, too."""
    sound: set[str] = field(default_factory=set)
    _written: int = 0

    def write(self, file: str, source: bytes) -> None:
        """With a time that no file had before: what Python has compiled of it goes by time and size."""
        self._written += 1
        (self.folder / file).write_bytes(source)
        os.utime(self.folder / file, (1_000_000_000 + self._written,) * 2)

    def run(self, tests: Iterable[str], seconds: float) -> ForkEnd:
        """In a fork, until one fails."""
        answer = self.folder / ".planted"
        answer.unlink(missing_ok=True)
        began = time.monotonic()
        child = os.fork()
        if child == 0:
            try:
                self._in_child(answer, list(tests), seconds)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if time.monotonic() - began > 10 * seconds + 2 * A_TEST_S:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                break
            time.sleep(0.05)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # what its tests have left
        return ForkEnd(**json.loads(answer.read_text())) if answer.exists() else ForkEnd("", seconds, late=False)

    def _in_child(self, answer: Path, tests: list[str], seconds: float) -> None:
        os.setsid()
        os.chdir(self.folder)
        with open(self.folder / ".said", "ab", buffering=0) as said:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
        began = _cpu_seconds()
        watch = _Watch(began + seconds)
        deselected = [f"--deselect={each}" for each in sorted(self.broken)]
        code = pytest.main([*self.options, *deselected, *tests], plugins=[watch])
        if code in (pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR):
            watch.failed = ""
        written = {"failed": watch.failed, "seconds": _cpu_seconds() - began, "late": watch.late}
        answer.write_text(json.dumps(written))

    def notices(self, mutant: Mutant, tests: list[Path], seconds: float) -> str:
        """The test that fails of it, or "" with none."""
        source = (self.folder / mutant.file).read_bytes()
        left, at, size = seconds, 0, 3
        while at < len(tests) and left > 0:
            some = [each.as_posix() for each in tests[at : at + size]]
            self.write(mutant.file, mutant.planted(source))
            try:
                run = self.run(some, left)
            finally:
                self.write(mutant.file, source)
            left -= run.seconds
            if run.failed is None:
                at, size = at + size, min(2 * size, 12)
            elif self._is_sound(run.failed, some):
                return run.failed or f"a crash or a standstill of {' '.join(some)}"
            # Else the same again, without that test.
        return ""

    def _is_sound(self, test: str, all_run: list[str]) -> bool:
        """Whether it passes without a fault."""
        key = test or " ".join(all_run)
        if key not in self.sound | self.broken:
            run = self.run([test] if test else all_run, A_TEST_S)
            if run.failed == "":
                said = (self.folder / ".said").read_text(errors="replace")[-3000:]
                raise RuntimeError(f"without a fault, too, there is a crash or a standstill of {key}\n{said}")
            (self.broken if test and run.failed is not None else self.sound).add(key)
        return key in self.sound


def copy_of_the_tree(folder: Path) -> Path:
    """What git knows or does not ignore, as it is in the working tree."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    (folder / ".venv").symlink_to(ROOT / ".venv")
    return folder


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.planted_faults", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", metavar="FILE", action="append", help="only in this file or folder")
    parser.add_argument("--sample", type=int, default=200, help="how many faults (default 200)")
    parser.add_argument("--seed", type=int, default=36, help="of the draw (default 36)")
    parser.add_argument("--seconds", type=float, default=120, help="CPU time for the tests of a fault (default 120)")
    parser.add_argument("--processes", type=int, default=1, help="faults tried beside each other (default 1)")
    parser.add_argument("--list", action="store_true", help="print the faults and the nearest tests, and try none")
    return parser.parse_args(argv)


def try_all(mutants: list[Mutant], reach: Reach, seconds: float, options: tuple[str, ...], answers: Path) -> None:
    """In this process: a line of JSON for each fault, with the test that noticed it."""
    with tempfile.TemporaryDirectory(prefix="longhaul-faults-") as folder:
        plot = Plot(copy_of_the_tree(Path(folder)), options)
        for mutant in mutants:
            by = plot.notices(mutant, reach.tests(mutant), seconds)
            print(f"{mutant}\n    {f'noticed by {by}' if by else 'LIVES'}", flush=True)
            with answers.open("a") as lines:
                print(json.dumps([str(mutant), by]), file=lines)


def main() -> int:
    arguments = parse(sys.argv[1:])
    mutants = drawn(ROOT, arguments.only or WHERE, arguments.sample, arguments.seed)
    reach = Reach(ROOT)
    if arguments.list:
        for mutant in mutants:
            print(f"{mutant}\n    {', '.join(str(each) for each in reach.tests(mutant)[:6])}")
        return 0
    os.environ["PYTHONPATH"] = "."  # what tests start is in the copy, too
    for name in LIBRARIES:
        with suppress(ImportError):
            importlib.import_module(name)
    sys.path[:] = [".", *(each for each in sys.path if each and Path(each).absolute() != ROOT)]
    for name in [each for each in sys.modules if each.split(".")[0] in OURS]:
        del sys.modules[name]
    options: tuple[str, ...] = (
        "-x",
        "-q",
        "-m",
        marked(ROOT),
        f"--timeout={A_TEST_S}",
        "--hypothesis-seed=0",
        "-p",
        "no:randomly",
    )
    options += ("-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")
    with tempfile.TemporaryDirectory() as folder:
        answers, workers = Path(folder) / "answers", []
        for number in range(arguments.processes):
            worker = os.fork()
            if worker == 0:
                code = 1
                try:
                    mine = mutants[number :: arguments.processes]
                    try_all(mine, reach, arguments.seconds, options, answers)
                    code = 0
                finally:
                    sys.stdout.flush()
                    os._exit(code)
            workers.append(worker)
        codes = [os.waitpid(worker, 0)[1] for worker in workers]
        tried = [json.loads(line) for line in answers.read_text().splitlines()] if answers.exists() else []
    lived = sorted(mutant for mutant, by in tried if not by)
    noticed = len(tried) - len(lived)
    share = round(noticed / max(len(tried), 1), 4)
    print(json.dumps({"mutants": len(tried), "noticed": noticed, "share": share, "lived": lived}))
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
