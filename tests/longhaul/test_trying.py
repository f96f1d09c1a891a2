"""What `longhaul try` shows of an answer."""

from __future__ import annotations

import argparse
import io

import pytest
from rich.console import Console

from longhaul.command_line import _parser as parser
from longhaul.commands.command import Call
from longhaul.commands.trying import _Shown

TEXTS = {"base": "", "trained": "an answer"}


def shown(texts: dict[str, str], *, titled: bool, terminal: bool) -> tuple[str, str]:
    """Standard output and standard error after these answers."""
    out, errors = io.StringIO(), io.StringIO()
    consoles = [Console(file=file, width=80, color_system=None, force_terminal=terminal) for file in (out, errors)]
    screen = _Shown(Call(argparse.Namespace(), {}, *consoles), titled=titled)
    for model, text in texts.items():
        if text:
            screen.part("text", {"model": model, "text": text})
        screen.part("output", {"model": model, "labels": None, "text": text})
    return out.getvalue(), errors.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_an_empty_answer_is_seen_beside_another(terminal: bool) -> None:
    out, _ = shown(TEXTS, titled=True, terminal=terminal)
    assert out == "before training:\n(nothing)\n\nafter training:\nan answer"
    out, _ = shown(dict(reversed(TEXTS.items())), titled=True, terminal=terminal)
    assert out == "after training:\nan answer\n\nbefore training:\n(nothing)"


def test_an_empty_answer_alone_is_said_beside_standard_output_where_that_is_a_file() -> None:
    assert shown({"trained": ""}, titled=False, terminal=True) == ("(nothing)", "")
    assert shown({"trained": " \n"}, titled=False, terminal=False) == (" \n", "(nothing)\n")


@pytest.mark.parametrize(
    ("text", "probabilities", "first"),
    [
        ("mail", (0.7, 0.25), "the model gives: mail"),
        ("mail; network", (0.7, 0.6), "the model gives: mail; network"),
        ("", (0.446, 0.4), "the model gives no label: none is above 50 %"),
    ],
)
def test_a_classifier_says_which_labels_it_gives_above_all_of_them(
    text: str, probabilities: tuple[float, float], first: str
) -> None:
    out = io.StringIO()
    console = Console(file=out, width=80, color_system=None)
    names = zip(("mail", "network"), probabilities, strict=True)
    labels = [{"label": name, "probability": each} for name, each in names]
    screen = _Shown(Call(argparse.Namespace(), {}, console, console), titled=False)
    screen.part("output", {"model": "trained", "labels": labels, "text": text})
    said, *listed = out.getvalue().splitlines()
    assert said == first
    assert listed == [f"mail       {100 * probabilities[0]:.1f} %", f"network    {100 * probabilities[1]:.1f} %"]


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("try cats --base late", "text", "late"),
        ("try cats late --base", "text", "late"),
        ("download cats --to folder model", "paths", ["model"]),
        ("download cats --to folder", "paths", parser().parse_args(["download", "cats"]).paths),
    ],
)
def test_what_may_be_left_out_stands_before_options_or_behind(words: str, name: str, value: object) -> None:
    assert getattr(parser().parse_args(words.split()), name) == value


def test_one_word_too_many_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ("try cats --base too late", "try cats late --base again", "try cats --bass late"):
        with pytest.raises(SystemExit):
            parser().parse_args(words.split())
        assert "unrecognized arguments" in capsys.readouterr().err
