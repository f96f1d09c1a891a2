"""RoBERTa and DeBERTa loaded from eight threads of one process: 200 of 200 are good, and bare loads are not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.training.tasks.classification.families import LABELS, write_pretrained


def test_loads_from_eight_threads_are_all_good_and_bare_ones_are_not(tmp_path: Path) -> None:
    folders = [write_pretrained(tmp_path / family, family, LABELS) for family in ("roberta", "deberta-v2")]

    def loads(how: str) -> Any:
        command = [sys.executable, "-m", "tests.training.threaded_loads", how, "classification", *map(str, folders)]
        return json.loads(subprocess.run(command, check=True, capture_output=True, timeout=240).stdout.splitlines()[-1])

    assert loads("ours") == {"counts": {"good": 200}, "afterwards": "good"}
    bare = loads("bare")
    assert bare["counts"].get("good", 0) < 190, "from_pretrained has become thread-safe: is our lock still needed?"
    assert bare["counts"].keys() & {"meta", "dtype"}
