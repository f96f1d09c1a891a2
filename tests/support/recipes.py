"""The rows of most tests."""

from __future__ import annotations

from pathlib import Path

ROWS = Path(__file__).parents[2] / "examples" / "recipes.jsonl"


def write_recipes(folder: Path) -> Path:
    """rows.jsonl with 64 recipes, held_out.jsonl with 12 others, in this folder."""
    lines = ROWS.read_text().splitlines(keepends=True)
    (folder / "rows.jsonl").write_text("".join(lines[:64]))
    (folder / "held_out.jsonl").write_text("".join(lines[64:76]))
    return folder
