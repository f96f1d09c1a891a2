"""What a job has learned: try, predict."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jobs.answers import Generation
from jobs.text.units import format_number, shares_alike
from longhaul.commands.command import BAD_INPUT, LEFT, OK, Call, Commands, print_json
from longhaul.jobfile import BadInput
from longhaul.predicting import Predictions, PredictionTask, parsed_row, predict

SAMPLING: Mapping[str, tuple[type, str, str]] = {
    "top_p": (float, "P", "with --temperature: among tokens of this probability"),
    "top_k": (int, "K", "with --temperature: among this many tokens"),
    "seed": (int, "N", "with --temperature: the same seed, the same text"),
}
"""Keys of GenerateBody that count beside a temperature alone, each with its type, its placeholder and its help."""
OPTIONS: Mapping[str, tuple[type, str, str]] = {
    "checkpoint": (str, "NAME", "weights of this checkpoint: its step, best or last"),
    "max_new_tokens": (int, "N", "tokens to write at most"),
    "temperature": (float, "T", "sample; 0 (default): the most probable tokens"),
    **SAMPLING,
    "num_beams": (int, "N", "beam search"),
}
"""The other keys that the commands take."""
ONE_INPUT = "give one of a text, --file and --row, or the text on standard input"
NOTHING = "(nothing)"
"""In place of an empty answer."""
GIVEN, NO_LABEL = "the model gives", "the model gives no label: none is above 50 %"
"""Above the labels of a classifier, as on the page (`try.js`)."""
MOST_LABELS = 10
"""Of a classifier: those that are shown."""
MOST_REASONS = 3
"""Why rows have no answer: those that are named."""
TITLES = {"trained": "after training", "base": "before training"}


def add(commands: Commands) -> None:
    """try, predict."""
    one = commands.add("try", _try, "let the model of a job answer a text", shown="ID [TEXT]")
    one.add_argument("id", metavar="ID")
    one.add_argument(
        "text", nargs="?", metavar="TEXT", help="as the job's template would write it; without it, or -: standard input"
    )
    one.add_argument("--file", type=Path, metavar="FILE", help="the text is in this file")
    one.add_argument("--row", metavar="JSON", help="in place of a text: columns, for the job's template")
    _add_options(one)
    many = commands.add("predict", _predict, "let it answer a file of rows; resumes if interrupted", shown="ID FILE")
    many.add_argument("id", metavar="ID")
    many.add_argument("file", type=Path, metavar="FILE", help="JSON lines, with the columns of the job's data")
    many.add_argument("--out", type=Path, required=True, metavar="FILE", help="a line of JSON for each row, in order")
    _add_options(many)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base", action="store_true", help="let the model before training answer, too")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; up to 4 times")
    for name, (kind, metavar, said) in OPTIONS.items():
        parser.add_argument(_option(name), type=kind, metavar=metavar, help=said)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _options(call: Call) -> dict[str, Any]:
    """Those that were given. Raises BadInput for one that would change nothing."""
    given = {name: value for name in OPTIONS if (value := getattr(call.given, name)) is not None}
    if not given.get("temperature"):
        for name in SAMPLING:
            if name in given:
                raise BadInput(f"{_option(name)} goes with --temperature above 0: without it nothing is drawn")
    given |= {"stop": call.given.stop} if call.given.stop else {}
    return given | ({"base": True} if call.given.base else {})


def _try(call: Call) -> int:
    options, input = _options(call), _input(call)
    shown = _Shown(call, titled=call.given.base)
    with call.connect() as api:
        answer = api.generate(call.given.id, input | options, on_part=_nothing if call.given.json else shown.part)
    if call.given.json:
        print_json(answer)
        return OK
    shown.end(answer)
    call.note(_how(answer))
    return OK


def _nothing(type: str, data: Mapping[str, Any]) -> None:
    """Nothing is shown."""


class _Shown:
    """An answer in the terminal, as it comes."""

    def __init__(self, call: Call, *, titled: bool) -> None:
        self._call, self._titled = call, titled
        self._model: str | None = None
        self._wrote = False

    def part(self, type: str, data: Mapping[str, Any]) -> None:
        """Text at once; what else happens is noted."""
        match type:
            case "waiting" if data["ahead"]:
                requests = "request" if data["ahead"] == 1 else "requests"
                self._call.note(f"waiting behind at most {data['ahead']} {requests}: clients take turns")
            case "loading":
                self._call.note(f"loading the model {TITLES[data['model']]} on the {_place(data['device'])}")
            case "text":
                self._begin(data["model"])
                self._print(data["text"])
                self._wrote |= bool(data["text"].strip())
            case "output" if data["labels"] is not None:
                self._begin(data["model"])
                self._print(f"{GIVEN}: {data['text']}\n" if data["text"] else f"{NO_LABEL}\n")
                shown = data["labels"][:MOST_LABELS]
                width = max(len(each["label"]) for each in shown)
                for each, share in zip(shown, shares_alike(*(each["probability"] for each in shown)), strict=True):
                    self._print(f"{each['label']:{width}}  {share:>8}\n")
            case "output":
                self._begin(data["model"])
                if not self._wrote and (self._titled or self._call.console.is_terminal):
                    self._print(NOTHING, style="dim")
                elif not self._wrote:  # whoever reads this has the answer as it is
                    self._call.note(NOTHING)
                self._wrote = False

    def end(self, answer: Generation) -> None:
        """The last line ends."""
        if answer["outputs"][0]["labels"] is None:
            self._print("\n")
        if any(output["input_cut"] for output in answer["outputs"]):
            self._call.note("the end of the input was cut off at the job's limit, as in training")

    def _begin(self, model: str) -> None:
        if self._titled and model != self._model:
            self._print(f"{'' if self._model is None else chr(10) * 2}{TITLES[model]}:\n")
        self._model = model

    def _print(self, text: str, style: str = "") -> None:
        self._call.console.print(text, end="", style=style, highlight=False, soft_wrap=True)


def _predict(call: Call) -> int:
    if not call.given.file.is_file():
        raise BadInput(f"there is no file {call.given.file}")
    told = False

    def on_answer(done: int, answer: Generation) -> None:
        nonlocal told
        if not told:
            told = True
            call.note(_how(answer))
        call.note(f"{done:,} rows")

    with call.connect() as api:
        wanted = PredictionTask(call.given.id, call.given.file, call.given.out, _options(call))
        try:
            found = predict(api, wanted, on_answer=on_answer, on_trouble=call.note)
        except OSError as error:
            raise BadInput(f"{error.filename or call.given.out}: {error.strerror}") from None
        except KeyboardInterrupt:
            call.note("interrupted: the same command continues")
            return LEFT
    counts = {"rows": found.rows, "answered": found.answered, "errors": found.errors.total()}
    call.answer(
        {**counts, "reasons": found.errors, "out": str(call.given.out)},
        lambda: call.say(f"{_counted(found)}, in {call.given.out}"),
    )
    if found.answered or not found.rows:
        return OK
    call.note(f"after correcting the rows, remove {call.given.out}, or give another file with --out")
    return BAD_INPUT


def _counted(found: Predictions) -> str:
    """`51 of 60 rows answered; 9 have an error (missing body: 9)`."""
    failed = found.errors.total()
    if not failed:
        return f"{found.rows:,} {'row' if found.rows == 1 else 'rows'} answered"
    reasons = [f"{why}: {count:,}" for why, count in found.errors.most_common(MOST_REASONS)]
    more = ", …" if len(found.errors) > MOST_REASONS else ""
    return (
        f"{found.answered:,} of {found.rows:,} rows answered; {failed:,} {'has' if failed == 1 else 'have'} an error "
        f"({', '.join(reasons)}{more})"
    )


def _input(call: Call) -> dict[str, Any]:
    """What is asked. Raises BadInput."""
    given = call.given
    said = sum(each is not None for each in (given.text, given.file, given.row))
    piped = said == 0 and sys.stdin is not None and not sys.stdin.isatty()  # `echo text | longhaul try ID`
    if said != 1 and not piped:
        raise BadInput(ONE_INPUT)
    if given.row is not None:
        try:
            row = parsed_row(given.row)
        except ValueError as error:
            raise BadInput(f"--row is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise BadInput('--row is a JSON object such as {"title": "Peach Ice Cream"}')
        return {"row": row}
    try:
        text = _read(given.file) if piped or given.file is not None or given.text == "-" else given.text
    except OSError as error:
        raise BadInput(f"--file {given.file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadInput(f"{given.file or 'standard input'} is not UTF-8 text") from None
    if piped and not text:
        raise BadInput(ONE_INPUT)
    return {"input": text}


def _read(file: Path | None) -> str:
    return sys.stdin.buffer.read().decode() if file is None else file.read_bytes().decode()


def _how(answer: Generation) -> str:
    """Where it ran, and how fast."""
    why = f" ({answer['why']})" if answer["why"] else ""
    speed = f", {format_number(answer['tokens_per_s'], 3)} tokens/s" if answer["tokens_per_s"] else ""
    seed = "" if answer["seed"] is None else f", seed {answer['seed']}"
    return f"on the {_place(answer['device'])}{why}{speed}{seed}"


def _place(device: str) -> str:
    return "CPU" if device == "cpu" else "GPU"
