"""The report on the rows of a classifier."""

from __future__ import annotations

import json
from pathlib import Path

from tests.training.workplace import Workplace


def test_the_report_counts_classes_and_finds_what_is_odd(tmp_path: Path) -> None:
    place = Workplace(tmp_path, planned=False)
    train = [{"text": f"number {n} of many", "label": "often" if n % 4 else "rare"} for n in range(40)]
    train += [{"text": "My kettle leaks", "label": "often"}, {"text": "My kettle leaks", "label": "rare"}]
    place.rows("rows.jsonl", train)
    place.rows("held_out.jsonl", [{"text": f"another {n}", "label": ["often", "new"][n % 2]} for n in range(6)])
    run = place.job(model="builtin:roberta-tiny", data={"validation": "held_out.jsonl", "max_input_tokens": 32})
    summary = place.prepare(run)["data"]["labels"]
    assert summary["classes"] == {"often": 34, "rare": 11, "new": 3}
    assert summary["largest_share"] == round(34 / 48, 6) and summary["without_label"] == 0
    assert summary["validation_only"] == ["new"]
    assert summary["contradictory_texts"] == 1
    assert summary["contradictory_example"] == {"text": "My kettle leaks", "labels": ["often", "rare"]}
    assert json.loads((run.path / "dataset.json").read_text())["labels"] == summary
