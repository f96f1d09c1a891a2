"""`python -m service.docs.schema` writes docs/openapi.json and docs/reference/; `--check` compares them instead."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from service.docs import reference
from service.main import create_app
from service.settings import ServiceSettings

DOCS = Path(__file__).resolve().parents[2] / "docs"


def files() -> dict[str, str]:
    """The text of each file, by its path in docs/."""
    app = create_app(ServiceSettings())
    document = json.dumps(app.openapi(), indent=1, ensure_ascii=False) + "\n"
    return {"openapi.json": document} | {f"reference/{name}": text for name, text in reference.pages(app).items()}


def main(arguments: list[str]) -> int:
    """Write, or compare. Exit code 1: a file differs, is missing, or is one too many."""
    made = files()
    if arguments != ["--check"]:
        for name, text in made.items():
            (DOCS / name).parent.mkdir(exist_ok=True)
            (DOCS / name).write_text(text)
        print(f"wrote {len(made)} files in {DOCS}")
        return 0
    there = {path.relative_to(DOCS).as_posix(): path.read_text() for path in DOCS.glob("reference/*.md")}
    if (DOCS / "openapi.json").is_file():
        there["openapi.json"] = (DOCS / "openapi.json").read_text()
    differ = sorted(name for name in made.keys() | there.keys() if made.get(name) != there.get(name))
    for name in differ:
        done = "run `make openapi` and look at the difference" if name in made else "delete it: nothing writes it"
        print(f"docs/{name} is not what the code says: {done}", file=sys.stderr)
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
