"""The library as somebody else's program has it: installed, importable from anywhere, and light."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HEAVY = ("torch", "rich", "pydantic", "fastapi", "redis", "rq", "pyarrow", "numpy")


def test_it_can_be_imported_from_any_folder_and_takes_little_with_it(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from longhaul import ApiError, Longhaul, Unreachable\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules], Longhaul(api_key='secret'))\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, env={}, timeout=60, check=False
    )
    assert told.stdout == "[] Longhaul('http://127.0.0.1:8000', key set)\n", told.stderr
