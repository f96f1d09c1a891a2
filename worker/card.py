"""The card, as the driver's own tool sees it: no CUDA call is made in a worker process."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import asdict, dataclass
from typing import Any

FIELDS = "index,uuid,name,memory.total,driver_version"
TIMEOUT_S = 20.0


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
