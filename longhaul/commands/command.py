"""One command: what it was given, how it answers, and its place in the parser."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

import shtab
from rich.console import Console

from jobs.answers import Job, Sweep
from jobs.state import is_open
from jobs.text.units import escaped
from longhaul.api import DEFAULT_URL, Longhaul
from longhaul.jobfile import BadInput
from longhaul.keys import set_instead
from longhaul.tables import SHORT_ID

OK, JOB_ENDED_BADLY, BAD_INPUT, UNREACHABLE, LEFT = 0, 1, 2, 3, 130
ID_LENGTH, ID_OF_A_SWEEP = len("job-") + 20, len("sweep-") + 20
CANDIDATES = 5
LAST = "last"
ACTS = {"acts": True}
"""Set by commands that change or send what they are given: of several with one name, they take none."""
FOR_SWEEPS = ("show", "watch", "cancel", "delete")
"""Commands that `longhaul sweep` has as well."""
SHELLS = ("bash", "zsh", "fish")
OFFERED = ("jobs", "sweeps")
"""What the scripts for shells ask for."""
_COMPLETES = {
    what: {
        "bash": f"_longhaul_{what}",
        "zsh": f"_longhaul_{what}",
        "fish": f"(longhaul completion {what} 2>/dev/null)",
    }
    for what in OFFERED
}
"""What completes a job or a sweep in each shell."""
_PREAMBLE = {
    "bash": '_longhaul_{0}() {{ compgen -W "$(longhaul completion {0} 2>/dev/null)" -- "$1"; }}',
    "zsh": '_longhaul_{0}() {{ compadd -- ${{(f)"$(longhaul completion {0} 2>/dev/null)"}}; }}',
}
_IMPLIED_BASH = "\n_shtab_longhaul_{0}_pos_0_COMPGEN=_shtab_compgen_files"
_IMPLIED_FISH = "\ncomplete -c longhaul -n '_shtab_longhaul_using {0}; and test $_shtab_longhaul_npos -eq 0' -F\n"
"""Files after a command that may be given one in place of a subcommand. zsh completes them after `submit` alone."""
_SAID_OF_STATES = {
    "done": "succeeded", "finished": "succeeded", "completed": "succeeded", "success": "succeeded", "error": "failed",
    "pending": "queued", "waiting": "queued", "active": "running", "stopped": "cancelled",
}  # fmt: skip
"""What other tools call the states of a job."""
EXIT_CODES = """\
exit codes:
  0    done
  1    the job or sweep failed or was cancelled
  2    bad input, or the service refused
  3    no answer, or the service cannot do it now
  130  left with Ctrl-C"""


@dataclass(frozen=True)
class Call:
    """A command as it was given, and where its answer goes."""

    given: argparse.Namespace
    environment: Mapping[str, str]
    console: Console
    """Standard output."""
    errors: Console
    """Standard error: progress and what is said beside the answer."""

    def connect(self) -> Longhaul:
        """The service that LONGHAUL_URL names. Whatever names the job becomes its id."""
        url = self.environment.get("LONGHAUL_URL") or DEFAULT_URL
        key = self.environment.get("LONGHAUL_API_KEY") or None
        try:
            api = Longhaul(url, key, on_wait=self.note)
        except ValueError as error:
            raise BadInput(f"LONGHAUL_URL: {error}") from None
        tell = None if "acts" in self.given else self.note
        if "id" in self.given:
            self.given.id = find_id(api, self.given.id, self.given.command, tell)
        if "ids" in self.given:
            self.given.ids = [find_id(api, each, self.given.command, tell) for each in self.given.ids]
        if getattr(self.given, "sweep", None):
            self.given.sweep = find_sweep(api, self.given.sweep, tell)
        return api

    def answer(self, content: object, people: Callable[[], None]) -> int:
        """`content` as a line of JSON with --json, else what is for people. Returns OK."""
        if self.given.json:
            print_json(content)
        else:
            people()
        return OK

    def say(self, line: str, style: str = "") -> None:
        """A line for people."""
        self.console.print(line, style=style, highlight=False, soft_wrap=True)

    def note(self, line: str) -> None:
        """A line beside the answer."""
        self.errors.print(line, style="dim", highlight=False, soft_wrap=True)

    def left(self, line: str) -> None:
        """What is said at Ctrl-C, below its `^C`: with --json beside the answer."""
        (self.note if self.given.json else self.say)(f"\n{line}")


def find_id(api: Longhaul, given: str, command: str, tell: Callable[[str], object] | None = None) -> str:
    """The id of the one job that is meant: by its id, the beginning of it, its name, or `last` for the newest.

    `given` where there is no such job. Dry runs have ids alone. `tell` is called where several have this name, of which
    the newest is taken; None: none is. Raises BadInput where it can be several, is misspelt, or is a sweep, with what
    `command` does for sweeps.
    """
    if given == LAST:
        newest = api.list(limit=1, dry_run=False)["data"]
        if not newest:
            raise BadInput("there is no job yet, so none is the last", hint="make one: `longhaul submit FILE`")
        return newest[0]["id"]
    if given.startswith("job-") and len(given) >= ID_LENGTH:
        return given
    found, names = [], set[str]()
    for job in api.all(dry_runs=True):
        if not job["dry_run"]:
            names.add(job["name"])
        if _begins(job["id"], given) or (job["name"] == given and not job["dry_run"]):
            found.append(job)
    if not found and any(_begins(each["id"], given) or each["name"] == given for each in api.sweeps()):
        raise BadInput(
            f"{given} is a sweep, and there is no such job",
            hint=f"longhaul sweep {command if command in FOR_SWEEPS else 'show'} {shlex.quote(given)}",
        )
    if not found:
        _refuse_mistyped(given, "job", names)
    return _only(given, found, "jobs", tell)


def find_sweep(api: Longhaul, given: str, tell: Callable[[str], object] | None = None) -> str:
    """The id of the one sweep that is meant: by its id, the beginning of it, its name, or `last` for the newest.

    `given` where there is no such sweep. `tell`: as above. Raises BadInput where it can be several or is misspelt.
    """
    if given.startswith("sweep-") and len(given) >= ID_OF_A_SWEEP:
        return given
    if given == LAST:
        newest = next(api.sweeps(), None)
        if newest is None:
            raise BadInput("there is no sweep yet, so none is the last", hint="make one: `longhaul sweep FILE`")
        return newest["id"]
    sweeps = list(api.sweeps())
    found = [each for each in sweeps if _begins(each["id"], given) or each["name"] == given]
    if not found:
        _refuse_mistyped(given, "sweep", (each["name"] for each in sweeps))
    return _only(given, found, "sweeps", tell)


def _refuse_mistyped(given: str, what: str, names: Iterable[str]) -> None:
    """Raises BadInput where a name that there is, is spelt nearly so."""
    if near := get_close_matches(given, set(names), n=1, cutoff=0.7):
        raise BadInput(f"there is no {what} {given}", hint=f"did you mean {near[0]}?")


def _begins(one: str, given: str) -> bool:
    """Whether an id begins so, with or without its kind, as tables have it where there is little room."""
    return one.startswith(given) or (len(given) >= SHORT_ID and one.partition("-")[2].startswith(given))


def _only(
    given: str,
    found: Sequence[Job] | Sequence[Sweep],
    what: str,
    tell: Callable[[str], object] | None,
) -> str:
    """Of those that were found, the newest first."""
    if len(found) > 1 and tell is not None and all(each["name"] == given for each in found):
        newest = found[0]["id"]
        tell(f"{len(found):,} {what} are called {given}; the newest is meant, {newest}; for another give its id")
    elif len(found) > 1:
        shown = ", ".join(f"{each['id']} ({each['name']}, {each['status']})" for each in found[:CANDIDATES])
        more = f" and {len(found) - CANDIDATES:,} more" if len(found) > CANDIDATES else ""
        raise BadInput(f"{given} can be {shown}{more}: write more of the id")
    return found[0]["id"] if found else given


Run = Callable[[Call], int]


class Parser(argparse.ArgumentParser):
    """One that says what was probably meant."""

    given: Sequence[str] = ()
    """The words of the command."""

    def error(self, message: str) -> NoReturn:
        """Print the usage and what is wrong; exit."""
        chosen = re.search(r"invalid choice: '?(.*?)'? \(choose from (.*)\)$", message)
        unknown = re.match(r"unrecognized arguments:.*?(--[^ =]+)", message)
        if message.endswith("required: COMMAND"):
            message = "which command? `longhaul --help` lists them"
        elif chosen and message.startswith("argument COMMAND:"):
            near = _near(chosen[1], re.findall(r"\w+", chosen[2]))
            message = f"there is no command {chosen[1]!r}{near or ';'} `longhaul --help` lists all of them"
        elif chosen:
            known = re.findall(r"\w+", chosen[2])
            message += _near(_SAID_OF_STATES.get(chosen[1], chosen[1]), known)
        elif unknown:
            message += self._set_instead(unknown[1]) or _near(unknown[1], self._option_string_actions)
        super().error(message)

    def _set_instead(self, option: str) -> str:
        """For an option that is a key of a job."""
        if "--set" not in self._option_string_actions:
            return ""
        at = next(place for place, each in enumerate(self.given) if each.partition("=")[0] == option)
        _, equals, value = self.given[at].partition("=")
        following = [each for each in self.given[at + 1 : at + 2] if not each.startswith("-")]
        value = shlex.quote(value) if equals else "".join(map(shlex.quote, following))
        of = "job." if self.prog.startswith("longhaul sweep") else ""
        said = set_instead(option.lstrip("-").replace("-", "_"), value or None, of)
        return f"; {said}" if said else ""


def _near(written: str, known: Iterable[str]) -> str:
    near = get_close_matches(written, list(known), n=1, cutoff=0.7)
    return f"; did you mean {near[0]}?" if near else ""


class CommandParser(Parser):
    """The parser of one command: it refuses what it does not know with its own usage, not with that of `longhaul`."""

    implied: str | None = None
    """The word that `longhaul COMMAND FILE` leaves out; a lower-case word alone is no file."""

    def parse_known_args(  # type: ignore[override]  # typeshed: overloads
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """What was given, and nothing unknown."""
        if self.implied and args and not re.fullmatch(r"[a-z]+|-h|--help", args[0]):
            args = [self.implied, *args]
        self.given = args or ()
        given, unknown = super().parse_known_args(args, namespace)
        if unknown and not self._take(given, unknown):
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return given, []

    def _take(self, given: argparse.Namespace, words: list[str]) -> bool:
        """Take what stands behind options for the argument that may be left out, as newer releases of Python do."""
        left = [
            each
            for each in self._actions
            if not each.option_strings and each.nargs in ("?", "*") and getattr(given, each.dest) == each.default
        ]
        if len(left) != 1 or any(word.startswith("-") for word in words) or (left[0].nargs == "?" and len(words) > 1):
            return False
        values = [self._get_value(left[0], word) for word in words]
        setattr(given, left[0].dest, values[0] if left[0].nargs == "?" else values)
        return True


class Commands:
    """The parser as it grows: groups of commands, each with its one line in `longhaul --help`."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._parser = parser
        self._commands = parser.add_subparsers(
            dest="command",
            required=True,
            metavar="COMMAND",
            prog=parser.prog,
            help=argparse.SUPPRESS,
            parser_class=CommandParser,
        )
        self._lines: list[str] = []

    def group(self, title: str) -> None:
        """What follows belongs to this subject."""
        self._lines += ["", f"{title}:"]

    def add(self, name: str, run: Run, tells: str, *, shown: str = "", json_too: bool = True) -> CommandParser:
        """A command. `shown` is how its arguments are listed."""
        self._lines.append(f"  {f'{name} {shown}':25} {tells}")
        made = self._commands.add_parser(name, help=tells, description=tells[0].upper() + tells[1:] + ".")
        made.set_defaults(run=run)
        if json_too:
            made.add_argument("--json", action="store_true", help="print JSON")
        return made

    def completion(self, shell: str) -> str:
        """The script that completes commands, options, files and jobs in this shell."""
        parsers = [self._parser]
        for parser in parsers:
            for action in parser._actions:
                if isinstance(action, argparse._SubParsersAction):
                    action.help = None  # else it is hidden here as in --help
                    parsers += action.choices.values()
                elif action.dest in ("id", "ids"):
                    action.complete = _COMPLETES["jobs"]  # type: ignore[attr-defined]  # what shtab reads
                elif action.dest == "sweep":
                    action.complete = _COMPLETES["sweeps"]  # type: ignore[attr-defined]
                elif action.dest == "file" or action.type is Path:
                    action.complete = shtab.FILE  # type: ignore[attr-defined]
        preamble = {each: "\n".join(map(text.format, OFFERED)) for each, text in _PREAMBLE.items()}
        implied = [name for name, parser in self._commands.choices.items() if parser.implied is not None]
        preamble["bash"] += "".join(map(_IMPLIED_BASH.format, implied))
        script = shtab.complete(self._parser, shell, preamble=preamble)  # type: ignore[arg-type]  # a str, it says
        return script + "".join(map(_IMPLIED_FISH.format, implied)) if shell == "fish" else script

    def finish(self) -> None:
        """The list of commands and the exit codes, as the end of the help."""
        lines = [*self._lines, "", EXIT_CODES, "", "longhaul COMMAND --help shows the options of each"]
        self._parser.epilog = "\n".join(lines).lstrip("\n")


def write_file(content: bytes, file: Path, option: str = "--png") -> None:
    """As the file that an option names. Raises BadInput where it cannot be written."""
    try:
        file.write_bytes(content)
    except OSError as error:
        raise BadInput(f"{option} {file}: {error.strerror}") from None


def confirm(call: Call, question: str) -> None:
    """Ask. Raises BadInput unless the answer is yes."""
    if not sys.stdin.isatty():
        raise BadInput("there is no terminal to ask on: add --yes to delete it")
    call.errors.print(f"{question} [y/N] ", end="", soft_wrap=True)
    if input().strip().lower() not in ("y", "yes"):
        raise BadInput("nothing was deleted")


def print_json(content: object) -> None:
    """One line on standard output."""
    print(escaped(json.dumps(content, ensure_ascii=False)), flush=True)


def nothing_yet(job: Job, what: str) -> str:
    """Said where there is none: not yet, or never."""
    return f"no {what} yet" if is_open(job["status"]) else f"no {what}: the job is {job['status']}"


def ending(job: Job) -> int:
    """Exit code for a job that has ended."""
    return OK if job["status"] in ("succeeded", "validated") else JOB_ENDED_BADLY
