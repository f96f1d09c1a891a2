"""`python -m service.docs.schema` writes docs/openapi.json, docs/reference/, and the variables of sinks in .env.example
and docker-compose.training.yml; `--check` compares them instead.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from textwrap import TextWrapper

from jobs.integrations import variables
from service.docs import reference
from service.main import create_app
from service.settings import ServiceSettings

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE, COMPOSE = ".env.example", "docker-compose.training.yml"


def files() -> dict[str, str]:
    """The text of each file, by its path in the repository."""
    app = create_app(ServiceSettings())
    example = env_example((ROOT / EXAMPLE).read_text())
    return {
        "docs/openapi.json": json.dumps(app.openapi(), indent=1, ensure_ascii=False) + "\n",
        EXAMPLE: example,
        COMPOSE: compose((ROOT / COMPOSE).read_text()),
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


_SECTION = "# Where reports go\n"
_WIDTH = 140
_PUBLISH = re.compile(r"(\n  publish:.*\n(?:    .*\n)*?    environment:\n      <<: \*places\n)(?:      \w+: .*\n)+")


def env_example(text: str) -> str:
    """`.env.example`, with their section as they are declared."""
    comment = TextWrapper(_WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)
    section = "".join(f"{comment.fill(each.meaning)}\n{each.name}=\n" for each in variables())
    return _replaced(re.compile(f"({_SECTION})(?:.+\\n)+"), section, text)


def compose(text: str) -> str:
    """`docker-compose.training.yml`, with what the container *publish* is given."""
    names = [*(each.name for each in variables()), "LONGHAUL_PUBLIC_URL"]
    return _replaced(_PUBLISH, "".join(f"      {name}: ${{{name}:-}}\n" for name in names), text)


def _replaced(pattern: re.Pattern[str], lines: str, text: str) -> str:
    """The text with these lines behind the first group of the pattern, which it has once."""
    made, count = pattern.subn(lambda found: found[1] + lines, text)
    assert count == 1, f"{pattern.pattern!r} is there {count} times"
    return made


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
