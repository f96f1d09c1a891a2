"""What `.env.example` and compose say of the variables of sinks, written from `jobs/integrations.py`."""

from __future__ import annotations

import re
from textwrap import TextWrapper

from jobs.integrations import variables

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
