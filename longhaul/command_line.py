"""Submit, follow and control long fine-tuning jobs, and download their models.

LONGHAUL_URL names the service (default http://127.0.0.1:8000), LONGHAUL_API_KEY the key, if the service needs one.
To begin: `longhaul demo`, which takes minutes on any machine. Then `longhaul local` in one terminal and
`longhaul plan recipes.jsonl` in another: it says what the job needs, and `longhaul submit` starts it.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import textwrap
from collections.abc import Sequence

from jobs.version import VERSION
from longhaul.api import ApiError, Unreachable
from longhaul.commands import datasets, exports, following, machine, queue, results, submitting, sweeping, trying
from longhaul.commands.command import BAD_INPUT, OK, UNREACHABLE, Call, Commands, Parser
from longhaul.figures import Terminal
from longhaul.jobfile import BadInput

WIDE = 200
NARROW, BELOW = 20, " " * 6
"""Columns beside a command's name for what it does, at the least, and what stands before that below the name."""
SUBJECTS = {
    "new jobs": submitting,
    "sweeps": sweeping,
    "what a job does": following,
    "the queue": queue,
    "results": results,
    "try it": trying,
    "use of a model": exports,
    "rows": datasets,
    "the machine": machine,
}


def run(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code (longhaul/commands/command.py says which there are)."""
    errors = Terminal(stderr=True, highlight=False, soft_wrap=True)
    # What is read by programs is as wide as COLUMNS says, and else not cut to a width of 80.
    console = Terminal(width=None if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit() else WIDE)
    call = Call(_parser().parse_args(argv), os.environ, console, errors)
    try:
        code: int = call.given.run(call)
        return code
    except BadInput as error:
        errors.print(f"longhaul: {error}")
        if error.hint:
            errors.print(f"  hint: {error.hint}")
        return BAD_INPUT
    except ApiError as error:
        where = f"{error.param}: " if error.param and error.param not in str(error) else ""
        errors.print(f"longhaul: {where}{error}")
        if hint := _hint(error):
            errors.print(f"  hint: {hint}")
        return UNREACHABLE if error.status >= 500 else BAD_INPUT
    except Unreachable as error:
        errors.print(f"longhaul: {error}")
        errors.print(f"  hint: {error.hint}")
        return UNREACHABLE
    except BrokenPipeError:  # `longhaul list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK


def _hint(error: ApiError) -> str | None:
    if error.status != 401:
        return error.hint
    # A file of secrets that happens to lie here is not read unasked.
    return "set LONGHAUL_API_KEY; after `make env`: export $(grep ^LONGHAUL_API_KEY= .env)"


class _Wrapped(argparse.HelpFormatter):
    """Paragraphs, and lines of a list: what a command does is beside its name, or below it where that is too narrow."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        filled = re.sub(r"(?<=\S)\n(?=\S)", " ", text).splitlines()
        return "\n".join(line for each in filled for line in _lines(each, width) or [""])


def _lines(line: str, width: int) -> list[str]:
    listed = re.fullmatch(r"(  \S.*?)(  +)(\S.*)", line)
    head, tells = (listed[1] + listed[2], listed[3]) if listed else ("", line)
    if listed and len(head) + NARROW > width:
        return [listed[1], *textwrap.wrap(tells, width, initial_indent=BELOW, subsequent_indent=BELOW)]
    return textwrap.wrap(tells, width, initial_indent=head, subsequent_indent=" " * len(head))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="longhaul",
        description=__doc__,
        formatter_class=_Wrapped,
        usage="longhaul [-h] [--version] COMMAND …",
    )
    parser.add_argument("--version", action="version", version=f"longhaul {VERSION}", help="print the version and exit")
    commands = Commands(parser)
    for title, subject in SUBJECTS.items():
        commands.group(title)
        subject.add(commands)
    commands.finish()
    return parser
