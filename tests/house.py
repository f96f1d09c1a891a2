"""How large the house is: `make house`. JSON on the last line; lines are physical ones of Python files."""

from __future__ import annotations

import ast
import json
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = ("jobs", "longhaul", "service", "worker")
SHORT_MODULE, LONG_FUNCTION, MANY_PARAMETERS = 60, 40, 12


def sources(folder: str) -> Iterator[tuple[Path, str]]:
    """Tracked Python files of a folder."""
    found = subprocess.run(["git", "ls-files", f"{folder}/*.py"], cwd=ROOT, check=True, capture_output=True, text=True)
    for name in found.stdout.split():
        yield ROOT / name, (ROOT / name).read_text()


def package(folder: str) -> dict[str, float]:
    """Size of a package, and what in it is small, long, or imported late."""
    texts = list(sources(folder))
    lengths = [text.count("\n") for _, text in texts]
    functions = [node for _, text in texts for node in ast.walk(ast.parse(text)) if isinstance(node, FUNCTIONS)]
    return {
        "lines": sum(lengths),
        "modules": len(lengths),
        "median": statistics.median(lengths),
        "longest": max(lengths),
        f"modules_under_{SHORT_MODULE}": sum(
            length < SHORT_MODULE and path.name != "__init__.py"
            for (path, _), length in zip(texts, lengths, strict=True)
        ),
        f"functions_over_{LONG_FUNCTION}_lines": sum(length_of(each) > LONG_FUNCTION for each in functions),
        f"functions_over_{MANY_PARAMETERS}_parameters": sum(parameters(each) > MANY_PARAMETERS for each in functions),
        "late_imports": sum(
            isinstance(node, ast.Import | ast.ImportFrom) for function in functions for node in ast.walk(function)
        ),
        "type_checking_blocks": sum(text.count("\nif TYPE_CHECKING:") for _, text in texts),
        "dict_str_any": sum(text.count("dict[str, Any]") for _, text in texts),
    }


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def length_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines, decorators left out."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Without `self` and `cls`."""
    named = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return sum(each.arg not in ("self", "cls") for each in named)


def main() -> None:
    """Print the table, and the same as JSON."""
    found = {folder: package(folder) for folder in (*PRODUCT, "worker/training", "tests", "benchmarks")}
    whole = {name: sum(found[folder][name] for folder in PRODUCT) for name in ("lines", "modules")}
    for folder, figures in found.items():
        print(f"{folder}: " + ", ".join(f"{name.replace('_', ' ')} {figure:,g}" for name, figure in figures.items()))
    print(f"product: {whole['lines']:,} lines in {whole['modules']:,} modules")
    print(json.dumps({"product": whole, **found}))


if __name__ == "__main__":
    main()
