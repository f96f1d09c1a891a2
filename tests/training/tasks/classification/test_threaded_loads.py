"""RoBERTa and DeBERTa loaded from eight threads of one process: 200 of 200 are good, and bare loads are not."""

from __future__ import annotations

from pathlib import Path

from tests.training.tasks.classification.families import LABELS, write_pretrained
from tests.training.threaded_loads import threaded_loads


def test_loads_from_eight_threads_are_all_good_and_bare_ones_are_not(tmp_path: Path) -> None:
    folders = [write_pretrained(tmp_path / family, family, LABELS) for family in ("roberta", "deberta-v2")]
    assert threaded_loads("ours", "classification", folders) == {"counts": {"good": 200}, "afterwards": "good"}
    bare = threaded_loads("bare", "classification", folders)
    assert bare["counts"].get("good", 0) < 190, "from_pretrained has become thread-safe: is our lock still needed?"
    assert bare["counts"].keys() & {"meta", "dtype"}
