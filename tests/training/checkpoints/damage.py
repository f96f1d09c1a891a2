"""Damage to checkpoints."""

from __future__ import annotations

import os
from pathlib import Path


def flip_a_bit(folder: Path) -> None:
    with open(folder / "model.safetensors", "r+b") as file:
        file.seek(-100, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-100, os.SEEK_END)
        file.write(bytes([byte ^ 4]))


def cut_short(folder: Path) -> None:
    os.truncate(folder / "optimizer.safetensors", 1000)
