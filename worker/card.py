"""The card, as the driver's own tool sees it: no CUDA call is made in a worker process."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import Any


def find_card() -> tuple[dict[str, Any] | None, str]:
    """(facts of the card, "") or (None, why there is none). Asks the driver's own tool: no CUDA in this process."""
    if shutil.which("nvidia-smi") is None:
        return (
            None,
            "LONGHAUL_DEVICE=cuda, but no NVIDIA driver was found here (no nvidia-smi; driver 580 or newer is needed)",
        )
    query = [
        "nvidia-smi",
        "--query-gpu=uuid,name,memory.total,driver_version",
        "--format=csv,noheader,nounits",
    ]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return None, "LONGHAUL_DEVICE=cuda, but nvidia-smi did not answer within 20 s"
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    cards = [[cell.strip() for cell in line.split(",")] for line in answer.stdout.splitlines() if line.count(",") == 3]
    if answer.returncode != 0 or not cards:
        return (
            None,
            f"LONGHAUL_DEVICE=cuda, but there is no usable card: {(answer.stderr or answer.stdout).strip()[:200]}",
        )
    uuid, name, mebibytes, driver = next((card for card in cards if card[0] == wanted), cards[0])
    return {"gpu": {"uuid": uuid, "name": name, "memory_bytes": int(mebibytes) * 2**20, "driver": driver}}, ""
