"""Regenerate the three locks from pyproject.toml: `make lock`, or `make lock UPGRADE=1` for newer releases.

requirements.lock          base + worker + local, all but torch
requirements.service.lock  base: the service's image, no torch
requirements.dev.lock      dev tools, less what requirements.lock already pins

torch has no line and its CUDA libraries have none: it is installed first, by version, so that one lock
serves machines with a GPU and without. What it needs besides (sympy, jinja2, ...) is pinned like the rest.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST = (3, 11)  # a newer Python would resolve to releases that the oldest supported one cannot install
# torch's own GPU libraries come with torch, in the versions its wheel asks for.
WITH_TORCH = re.compile(r"torch|triton|nvidia-.*|cuda-.*")
RUNTIME, SERVICE, DEV = "requirements.lock", "requirements.service.lock", "requirements.dev.lock"


def blocks(lock: str) -> dict[str, str]:
    """Split a lock into `name -> its lines` (requirement, hashes, `# via` remarks)."""
    found: dict[str, str] = {}
    name = None
    for line in lock.splitlines(keepends=True):
        if match := re.match(r"([a-z0-9][a-z0-9.-]*)==", line):
            name = match[1]
            found[name] = ""
        elif not line.startswith(" "):
            name = None
        if name:
            found[name] += line
    return found


def pin(block: str) -> str:
    return block.split()[0]


def compile_lock(target: str, extras: list[str], seeds: list[str], upgrade: bool) -> dict[str, str]:
    """Resolve pyproject with `extras` into `target`, keeping pins and hashes of `seeds` that still fit."""
    path = ROOT / target
    merged: dict[str, str] = {}
    for seed in seeds:
        merged |= blocks((ROOT / seed).read_text()) if (ROOT / seed).exists() else {}
    path.write_text("".join(merged.values()))
    command = [sys.executable, "-m", "piptools", "compile", "pyproject.toml", "--output-file", target]
    command += ["--quiet", "--generate-hashes", "--strip-extras", "--no-header"]
    command += ["--no-emit-index-url", "--no-emit-find-links", "--no-emit-trusted-host", "--no-emit-options"]
    command += ["--unsafe-package", "torch", "--unsafe-package", "pip"]  # unsafe: resolved, given no line
    command += [f"--extra={extra}" for extra in extras] + (["--upgrade"] if upgrade else [])
    subprocess.run(command, cwd=ROOT, check=True)
    return {name: block for name, block in blocks(path.read_text()).items() if not WITH_TORCH.fullmatch(name)}


def write(target: str, what: str, locked: dict[str, str]) -> None:
    head = f"# {what} Made by `make lock` from pyproject.toml; do not edit.\n"
    (ROOT / target).write_text(head + "".join(locked.values()))
    print(f"{target}: {len(locked)} pins")


def main() -> None:
    if sys.version_info[:2] != OLDEST:
        sys.exit(f"make lock runs on Python 3.11, the oldest supported; this is {sys.version.split()[0]}")
    upgrade = "--upgrade" in sys.argv[1:]
    runtime = compile_lock(RUNTIME, ["worker", "local"], [RUNTIME], upgrade)
    write(RUNTIME, "Worker and local run, all but torch.", runtime)
    # Seeded with the runtime's pins, the others resolve to the same ones; a difference ends in an error.
    service = compile_lock(SERVICE, [], [RUNTIME], upgrade=False)
    write(SERVICE, "The service alone, no torch.", service)
    seeds = [RUNTIME] if upgrade else [DEV, RUNTIME]
    dev = compile_lock(DEV, ["worker", "local", "dev"], seeds, upgrade=False)
    for name, block in (dev | service).items():
        if pin(block) != pin(runtime.get(name, block)):
            sys.exit(f"{pin(block)} against {pin(runtime[name])}: bound that requirement in pyproject.toml")
    tools = {name: block for name, block in dev.items() if name not in runtime}
    write(DEV, "Development tools, on top of requirements.lock.", tools)


if __name__ == "__main__":
    main()
