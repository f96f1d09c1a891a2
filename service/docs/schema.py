"""`python -m service.docs.schema` writes docs/openapi.json, docs/reference/, and the variables of sinks in .env.example
and docker-compose.training.yml; `--check` compares them instead.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from service.docs import reference, settings_files
from service.main import create_app
from service.settings import ServiceSettings

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE, COMPOSE = ".env.example", "docker-compose.training.yml"


def files() -> dict[str, str]:
    """The text of each file, by its path in the repository."""
    app = create_app(ServiceSettings())
    example = settings_files.env_example((ROOT / EXAMPLE).read_text())
    return {
        "docs/openapi.json": json.dumps(app.openapi(), indent=1, ensure_ascii=False) + "\n",
        EXAMPLE: example,
        COMPOSE: settings_files.compose((ROOT / COMPOSE).read_text()),
    } | {f"docs/reference/{name}": text for name, text in reference.pages(app, example).items()}


def main(arguments: list[str]) -> int:
    """Write, or compare. Exit code 1: a file differs, is missing, or is one too many."""
    made = files()
    if arguments != ["--check"]:
        for name, text in made.items():
            (ROOT / name).parent.mkdir(exist_ok=True)
            (ROOT / name).write_text(text)
        print(f"wrote {len(made)} files in {ROOT}")
        return 0
    pages = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/reference/*.md")}
    there = {name: (ROOT / name).read_text() for name in made.keys() | pages if (ROOT / name).is_file()}
    differ = sorted(name for name in made.keys() | pages if made.get(name) != there.get(name))
    for name in differ:
        done = "run `make openapi` and look at the difference" if name in made else "delete it: nothing writes it"
        print(f"{name} is not what the code says: {done}", file=sys.stderr)
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
