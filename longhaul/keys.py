"""`longhaul keys`: the keys of a job file or a sweep file, from the specification itself."""

from __future__ import annotations

from difflib import get_close_matches

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from jobs.spec import JobSpec
from jobs.sweeps.spec import SweepSpec
from jobs.text.schemas import REQUIRED, Key, keys
from jobs.wrong_spec import ELSEWHERE, WITHOUT_KEY
from longhaul.jobfile import BadInput

INDENT = 4


def set_instead(word: str) -> str | None:
    """The key of a job that other tools, or their users, call this; None: there is none of that name."""
    if word in ELSEWHERE:
        return ELSEWHERE[word]
    names = [key.name for key in keys_below("") if not key.holds_keys]
    return next((name for name in names if name == word or name.endswith(f".{word}")), None)


def keys_below(prefix: str, *, sweep: bool = False) -> list[Key]:
    """The keys of a job, or of a sweep, that this names or that lie below it; all for ''. Raises BadInput for none."""
    schema = (SweepSpec if sweep else JobSpec).model_json_schema()
    known = list(keys(schema["properties"], schema["$defs"]))
    if sweep:
        known += keys(schema["$defs"]["Parameter"]["properties"], schema["$defs"], "space.KEY.")
    found = [
        key for key in known if key.name == prefix or key.name.startswith((f"{prefix}.", f"{prefix}[")) or not prefix
    ]
    if not found:  # a beginning, or a name without its part
        found = [key for key in known if key.name.startswith(prefix) or key.name.endswith(f".{prefix}")]
    if not found:
        last = {key.name.rpartition(".")[2]: key.name for key in reversed(known)}
        word = prefix.rpartition(".")[2]
        names = [key.name for key in known]
        near = [name for name in names if f".{name}".endswith(f".{ELSEWHERE.get(word)}")]
        near = (
            near or get_close_matches(prefix, names, n=1) or [last[name] for name in get_close_matches(word, last, n=1)]
        )
        question = f"did you mean {near[0]}?" if near else f"`longhaul keys{' --sweep' * sweep}` lists all of them"
        raise BadInput(
            f"no key of a {'sweep' if sweep else 'job'} is called {prefix}",
            hint=WITHOUT_KEY.get(word) or question,
        )
    return found


def print_keys(found: list[Key], console: Console) -> None:
    """Each with its values, default and meaning."""
    for key in found:
        default = "" if key.holds_keys else f"; {'' if key.default == REQUIRED else 'default '}{key.default}"
        head = Text(key.name, style="bold").append(f"  {key.values.replace('`', '')}{default}", style="dim")
        console.print(head)
        console.print(Padding(Text(key.meaning), (0, 0, 0, INDENT), expand=False))
