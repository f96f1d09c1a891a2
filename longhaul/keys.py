"""`longhaul keys`: the keys of a job file or a sweep file, from the specification itself."""

from __future__ import annotations

import re
from difflib import get_close_matches

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from jobs.spec import JobSpec
from jobs.sweeps.spec import SweepSpec
from jobs.text.schemas import REQUIRED, Key, keys
from jobs.wrong_spec import ELSEWHERE, OTHERWISE, WITHOUT_KEY
from longhaul.jobfile import TYPED, BadInput

INDENT = 4


def set_instead(word: str, value: str | None, of: str = "") -> str | None:
    """What to write in place of an option called so: --set with the key of a job that does the same, or why there is
    none; None: no key has that name. `of`: what stands before keys of a job."""
    if word in WITHOUT_KEY:
        return WITHOUT_KEY[word]
    named = ELSEWHERE.get(word)
    keys_of = {key.name: key for key in keys_below("") if "[" not in key.name}
    found = [named] if named else [name for name in keys_of if name == word or name.endswith(f".{word}")]
    found = [name for name in found if name == word] or found
    if not found or (not named and keys_of[found[0]].holds_keys and found[0] not in TYPED):
        return None
    given = "…" if value is None or word in OTHERWISE or len(found) > 1 or found[0] == "integrations" else value
    settings = [f"--set {of}{name}={given}" for name in found]
    if all(name.startswith("method.") for name in found):
        settings = [f"--set {of}method=lora {setting}" for setting in settings]
    question = f"did you mean {' or '.join(settings)}?"
    return f"{question} {OTHERWISE[word]}" if word in OTHERWISE else question


def keys_below(prefix: str, *, sweep: bool = False) -> list[Key]:
    """The keys of a job, or of a sweep, that this names or that lie below it; all for ''. Raises BadInput for none."""
    schema = (SweepSpec if sweep else JobSpec).model_json_schema()
    known = list(keys(schema["properties"], schema["$defs"]))
    if sweep:
        known += keys(schema["$defs"]["Parameter"]["properties"], schema["$defs"], "space.KEY.")
    plain = re.sub(r"\[\d*\]|\.\d+\b", "", prefix)  # the place in a list, as errors name it, or none
    found = [key for key in known if not prefix or f"{key.name.replace('[]', '')}.".startswith(f"{plain}.")]
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
