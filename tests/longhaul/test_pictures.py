"""The pictures of the terminal in docs/, drawn anew and compared; and what must hold at any width."""

from __future__ import annotations

import io

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from longhaul.tables import print_facts
from longhaul.watch import status_line
from service.openapi.examples import by_schema
from tests.longhaul.pictures import FOLDER, pictures


def test_the_pictures_of_the_terminal_are_those_in_docs() -> None:
    drawn = dict(pictures())
    assert {file.name for file in FOLDER.iterdir()} == drawn.keys()
    for name, picture in drawn.items():
        assert picture == (FOLDER / name).read_text(), f"{name} differs: python -m tests.longhaul.pictures"


@pytest.mark.parametrize("width", range(20, 160, 7))
def test_the_line_of_a_running_job_fits_any_terminal(width: int) -> None:
    job = by_schema()["Job"]
    screen = io.StringIO()
    console = Console(file=screen, width=width)
    console.print(status_line(job, console))
    [line, *more] = screen.getvalue().splitlines()
    assert cell_len(line.rstrip()) <= width
    assert not more or width < 40
    assert "step 4,200/85,157" in line or width < 40


@pytest.mark.parametrize("width", [30, 60, 80])
def test_no_word_of_a_fact_is_broken(width: int) -> None:
    path = "/srv/longhaul/runs/" + "job-06e1m8c4f0zt3qk5x9wb/" * 3
    text = "resumes from the newest complete checkpoint of the same job"
    screen = io.StringIO()
    print_facts([("model is in", path), ("hint", Text(text))], Console(file=screen, width=width))
    lines = screen.getvalue().splitlines()
    assert path in lines
    assert " ".join(" ".join(lines).split()).endswith(f"hint {text}")
