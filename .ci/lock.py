"""Regenerate the four locks from pyproject.toml: `make lock`, or `make lock UPGRADE=1` for newer releases.

requirements.lock          client + service + worker + local, all but torch
requirements.service.lock  client + service: the service's image, no torch
requirements.dev.lock      dev tools, less what requirements.lock already pins
requirements.cuda.lock     torch, as PyPI has it for Linux on x86-64, and its CUDA libraries: the worker's image

Only the last names torch, so that the others serve machines with a GPU and without: there torch is installed first, by
version. What it needs besides (sympy, jinja2, ...) is in requirements.lock. A run takes minutes: some packages have to
be downloaded to learn what they need.
"""

import platform
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST = (3, 11)  # a newer Python would resolve to releases that the oldest supported one cannot install
# torch's own GPU libraries come with torch, in the versions its wheel asks for.
WITH_TORCH = re.compile(r"torch|triton|nvidia-.*|cuda-.*")
RUNTIME, SERVICE, DEV = "requirements.lock", "requirements.service.lock", "requirements.dev.lock"
CUDA = "requirements.cuda.lock"


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


def compile_lock(
    target: str, extras: list[str], seeds: list[str], upgrade: bool, source: str = "pyproject.toml"
) -> dict[str, str]:
    """Resolve `source` with `extras` into `target`, keeping pins and hashes of `seeds` that still fit."""
    path = ROOT / target
    merged: dict[str, str] = {}
    for seed in seeds:
        merged |= blocks((ROOT / seed).read_text()) if (ROOT / seed).exists() else {}
    path.write_text("".join(merged.values()))
    command = [sys.executable, "-m", "piptools", "compile", source, "--output-file", target]
    command += ["--quiet", "--generate-hashes", "--strip-extras", "--no-header"]
    command += ["--no-emit-index-url", "--no-emit-find-links", "--no-emit-trusted-host", "--no-emit-options"]
    # Unsafe: resolved, given no line.
    command += ["--unsafe-package", "pip"] + ([] if target == CUDA else ["--unsafe-package", "torch"])
    command += [f"--extra={extra}" for extra in extras] + (["--upgrade"] if upgrade else [])
    subprocess.run(command, cwd=ROOT, check=True)
    return blocks(path.read_text())


def without_torch(locked: dict[str, str]) -> dict[str, str]:
    return {name: block for name, block in locked.items() if not WITH_TORCH.fullmatch(name)}


def compile_cuda(runtime: dict[str, str], upgrade: bool) -> dict[str, str]:
    """torch and what comes with it. `===`: nothing but PyPI's own build, no other of that version (2.13.0+cpu)."""
    worker = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["worker"]
    (torch,) = [line for line in worker if line.startswith("torch==")]
    asked = ROOT / "requirements.cuda.in"
    asked.write_text(f"{torch.replace('==', '===')}\n-c {RUNTIME}\n")
    try:
        locked = compile_lock(CUDA, [], [CUDA], upgrade, source=asked.name)
    finally:
        asked.unlink()
    agree(without_torch(locked), runtime)
    return {name: block for name, block in locked.items() if WITH_TORCH.fullmatch(name)}


def agree(locked: dict[str, str], runtime: dict[str, str]) -> None:
    """A difference ends in an error."""
    for name, block in locked.items():
        if pin(block) != pin(runtime.get(name, block)):
            sys.exit(f"{pin(block)} against {pin(runtime[name])}: bound that requirement in pyproject.toml")


def write(target: str, what: str, locked: dict[str, str]) -> None:
    head = f"# {what} Made by `make lock` from pyproject.toml; do not edit.\n"
    (ROOT / target).write_text(head + "".join(locked.values()))
    print(f"{target}: {len(locked)} pins")


def main() -> None:
    if sys.version_info[:2] != OLDEST:
        sys.exit(f"make lock runs on Python 3.11, the oldest supported; this is {sys.version.split()[0]}")
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        sys.exit("make lock runs on Linux on x86-64: only there torch asks for its CUDA libraries")
    upgrade = "--upgrade" in sys.argv[1:]
    runtime = without_torch(compile_lock(RUNTIME, ["service", "worker", "local"], [RUNTIME], upgrade))
    write(RUNTIME, "Worker and local run, all but torch.", runtime)
    # Seeded with the runtime's pins, the others resolve to the same ones.
    service = compile_lock(SERVICE, ["service"], [RUNTIME], upgrade=False)
    write(SERVICE, "The service alone, no torch.", service)
    seeds = [RUNTIME] if upgrade else [DEV, RUNTIME]
    dev = without_torch(compile_lock(DEV, ["service", "worker", "local", "dev"], seeds, upgrade=False))
    agree(dev | service, runtime)
    tools = {name: block for name, block in dev.items() if name not in runtime}
    write(DEV, "Development tools, on top of requirements.lock.", tools)
    write(CUDA, "torch for CUDA on Linux, x86-64, under requirements.lock.", compile_cuda(runtime, upgrade))


if __name__ == "__main__":
    main()
