"""`python -m service.schema` writes docs/openapi.json; `--check` says whether that is what it would write."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from service.main import create_app
from service.settings import Settings

FILE = Path(__file__).resolve().parents[1] / "docs" / "openapi.json"


def text() -> str:
    """The document as the file has it."""
    return json.dumps(create_app(Settings()).openapi(), indent=1, ensure_ascii=False) + "\n"


def main(arguments: list[str]) -> int:
    """Write, or compare."""
    if arguments == ["--check"]:
        if FILE.exists() and FILE.read_text() == text():
            return 0
        print(f"{FILE.name} is not what the routes say: run `make openapi` and look at the difference", file=sys.stderr)
        return 1
    FILE.write_text(text())
    print(f"wrote {FILE}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
