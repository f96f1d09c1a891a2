"""The card, as the driver's own tool sees it: no CUDA call is made in a worker process."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FIELDS = "index,uuid,name,memory.total,driver_version"
TIMEOUT_S = 20.0
DRIVERS = {12: 525, 13: 580}
"""The first driver for each major version of CUDA. It runs the later minor ones, too (source: CUDA release notes)."""
_ASK_DRIVER = """
import ctypes
version = ctypes.c_int()
assert ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) == 0
print(version.value)
"""


@dataclass(frozen=True)
class Card:
    """One card."""

    uuid: str
    name: str
    memory_bytes: int
    driver: str

    def facts(self) -> dict[str, Any]:
        """For heartbeats."""
        return asdict(self)


class NoCard(Exception):
    """There is no usable card; the message says why, in a user's words."""


def usable_card(wanted: str) -> Card:
    """`find_card`, and torch and driver fit each other. Raises NoCard: better no job than all of them, one by one."""
    card = find_card(wanted)
    refuse_misfit(card, torch_cuda(), driver_cuda())
    return card


def find_card(wanted: str) -> Card:
    """The card that `wanted` names (an index or UUID, as in CUDA_VISIBLE_DEVICES); empty: the first. Raises NoCard."""
    if shutil.which("nvidia-smi") is None:
        raise NoCard("no NVIDIA driver was found here (no nvidia-smi; driver 580 or newer is needed)")
    query = ["nvidia-smi", f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise NoCard(f"nvidia-smi did not answer within {TIMEOUT_S:.0f} s") from None
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.stdout.splitlines()]
    cards = [row for row in rows if len(row) == len(FIELDS.split(","))]
    if answer.returncode != 0 or not cards:
        said = (answer.stderr or answer.stdout).strip()[:200] or f"exit code {answer.returncode}"
        raise NoCard(f"there is no usable card: nvidia-smi says {said!r}")
    for index, uuid, name, mebibytes, driver in cards:
        if wanted in ("", index, uuid):
            return Card(uuid, name, int(mebibytes) * 2**20, driver)
    raise NoCard(f"CUDA_VISIBLE_DEVICES={wanted}, but the cards here are {', '.join(row[1] for row in cards)}")


def refuse_misfit(card: Card, needed: tuple[int, int] | None, has: tuple[int, int] | None) -> None:
    """NoCard when torch was built for a CUDA that the driver cannot run. Versions are (major, minor).

    `needed` None: torch was built without. `has` None: nobody could find out; the trainer looks again.
    """
    found = f"{card.name} with driver {card.driver}"
    if needed is None:
        raise NoCard(f"the torch installed here is built for the CPU alone (found: {found}); install its CUDA build")
    if has is not None and has[0] < needed[0]:
        driver = f"driver {DRIVERS[needed[0]]} or newer" if needed[0] in DRIVERS else "a newer driver"
        runs, needs = (f"CUDA {major}.{minor}" for major, minor in (has, needed))
        raise NoCard(f"{found} runs {runs}, and this torch needs {needs}: {driver} is needed")


def torch_cuda() -> tuple[int, int] | None:
    """The CUDA version that torch was built for, read from its files: torch is not imported here."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None, "torch is a dependency"
    text = Path(spec.origin).with_name("version.py").read_text()
    found = re.search(r"^cuda\b.*= *'(\d+)\.(\d+)", text, re.MULTILINE)
    return (int(found[1]), int(found[2])) if found else None


def driver_cuda() -> tuple[int, int] | None:
    """The newest CUDA version that the driver runs, compatibility libraries included; None: it does not say.

    Asked in a process of its own: CUDA lives in trainers alone.
    """
    try:
        answer = subprocess.run(
            [sys.executable, "-c", _ASK_DRIVER], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return None
    if answer.returncode != 0:
        return None
    version = int(answer.stdout)
    return version // 1000, version % 1000 // 10
