"""Long fine-tuning jobs on one GPU box: submit them, follow them, steer them, fetch what they made.

The service is found through LONGHAUL_URL (default http://127.0.0.1:8000) and LONGHAUL_API_KEY, if it asks for a key.
`longhaul submit recipes.jsonl --watch` is all that is needed to begin with.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from rich.console import Console

from client.api import ApiError, Unreachable
from client.commands import datasets, following, machine, queue, results, submitting
from client.commands.command import BAD_INPUT, LEFT, OK, UNREACHABLE, Call, Commands
from client.jobfile import BadInput

WIDE = 200
SUBJECTS = {
    "new jobs": submitting,
    "what a job does": following,
    "the queue": queue,
    "results": results,
    "rows": datasets,
    "the machine": machine,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code (client/commands/command.py says which there are)."""
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    # What is read by programs is not cut to a width of 80.
    console = Console(width=None if sys.stdout.isatty() else WIDE)
    call = Call(_parser().parse_args(argv), os.environ, console, errors)
    try:
        code: int = call.given.run(call)
        return code
    except BadInput as error:
        errors.print(f"longhaul: {error}", markup=False)
        return BAD_INPUT
    except ApiError as error:
        where = f"{error.param}: " if error.param and error.param not in str(error) else ""
        errors.print(f"longhaul: {where}{error}", markup=False)
        if hint := _way_out(error):
            errors.print(f"  way out: {hint}", markup=False)
        return UNREACHABLE if error.status >= 500 else BAD_INPUT
    except Unreachable as error:
        errors.print(f"longhaul: {error}", markup=False)
        errors.print("  way out: start it with `longhaul local`, or set LONGHAUL_URL", markup=False)
        return UNREACHABLE
    except KeyboardInterrupt:
        return LEFT
    except BrokenPipeError:  # `longhaul list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK


def _way_out(error: ApiError) -> str | None:
    if error.status != 401:
        return error.hint
    # A file of secrets that happens to lie here is not read unasked.
    return "export LONGHAUL_API_KEY=…; that of `make env`: export $(grep ^LONGHAUL_API_KEY= .env)"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="longhaul",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="longhaul [-h] COMMAND …",
    )
    commands = Commands(parser)
    for title, subject in SUBJECTS.items():
        commands.group(title)
        subject.add(commands)
    commands.finish()
    return parser


if __name__ == "__main__":
    sys.exit(main())
