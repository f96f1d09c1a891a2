"""`longhaul compare`: at any width, as JSON, as a picture; and on the real stack, a job that was refused."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console

from jobs.comparison.answer import Comparison
from jobs.comparison.compare import compare
from longhaul.comparison import print_comparison
from longhaul.comparison_picture import figure_of
from longhaul.main import main
from tests.jobs.comparison.test_compare import job, refused
from tests.service.running import Service
from tests.service.test_comparisons import trained
from tests.support.stack import Stack, tiny_job


def shown(found: Comparison, width: int) -> str:
    screen = io.StringIO()
    print_comparison(found, Console(file=screen, width=width))
    return screen.getvalue()


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("count", [2, 3, 10])
def test_it_fits_any_terminal_and_the_cause_comes_first(width: int, count: int) -> None:
    more = [job(f"more-{place}", training={"seed": place}, loss=2.0 + place) for place in range(count - 2)]
    text = shown(compare([job("fits"), refused("too-long"), *more]), width)
    assert max(cell_len(line.rstrip()) for line in text.splitlines()) <= width
    words = " ".join(text.split())
    cause = "too-long needs 9.0 GiB more than fits: memory.micro_batch is 16, not 8 (+9.0 GiB)."
    assert words.index(cause) < words.index("memory.peak_bytes")
    assert "labels (they change nothing)" in words and "other settings" in words
    assert count < 10 or "8 (A, C, D, E, F, G, H, I, J) · 16 (B) B +9.0 GiB" in words


def test_seeds_have_a_mean_and_a_spread() -> None:
    runs = [job(f"seed-{seed}", training={"seed": seed}, loss=loss) for seed, loss in ((1, 2.0), (2, 2.2))]
    text = shown(compare(runs), 80)
    assert "A, B: final loss 2.1000 ± 0.1414 (n = 2)" in text


def test_jobs_are_named_as_everywhere(
    service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    first, other = service.submit(name="first"), service.submit(name="other", training={"seed": 7})
    trained(service, first, 2.0)
    picture = tmp_path / "compare.png"
    assert main(["compare", "first", "last", "--png", str(picture)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"A  first · {first} · succeeded\nB  other · {other} · validating\n")
    assert "training.seed" in out
    assert picture.read_bytes().startswith(b"\x89PNG")

    assert main(["compare", first[:-1], "other", "--json"]) in (0, 2), "the beginning of an id may be that of both"
    capsys.readouterr()
    assert main(["compare", first, other, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert Comparison.model_validate(answer).reference == first

    assert main(["compare", "first"]) == 2
    err = " ".join(capsys.readouterr().err.split())
    assert "jobs names 1 job: 2 to 10 can be compared" in err and "`longhaul compare JOB JOB`" in err
    assert main(["compare", "first", "other", "--png", str(tmp_path / "nowhere" / "x.png")]) == 2
    assert "No such file or directory" in capsys.readouterr().err


def test_without_matplotlib_a_picture_is_refused_with_what_to_install(
    service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    service.submit(name="first"), service.submit(name="other")
    for name in [*filter(lambda name: name.startswith("matplotlib"), sys.modules), "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["compare", "first", "other", "--png", str(tmp_path / "x.png")]) == 2
    err = capsys.readouterr().err
    assert "--png needs matplotlib, which is not installed" in err and "hint: pip install matplotlib" in err
    assert main(["compare", "first", "other"]) == 0


def test_the_picture_has_a_bar_and_a_limit_for_each_plan_and_a_curve_for_each_run() -> None:
    found = compare([job("fits"), refused("refused"), job("unplanned", planned=False)])
    memory, losses = figure_of(found, {"job-fits": [(10, 3.0), (20, 2.0)], "job-unplanned": []}).axes
    assert [text.get_text() for text in memory.get_yticklabels()] == ["A fits", "B refused", "C unplanned"]
    assert [text.get_text() for text in memory.texts] == ["26.0 GiB", "35.0 GiB: does not fit"]
    limits = [line for line in memory.lines if line.get_linewidth() == 2.5]
    assert [np.asarray(line.get_xdata()).tolist() for line in limits] == [[30.0, 30.0], [30.0, 30.0]]
    assert len(memory.patches) == 2 * 6
    assert [np.asarray(line.get_ydata()).tolist() for line in losses.lines] == [[3.0, 2.0]]


def test_of_two_jobs_one_is_refused_by_the_real_check(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal but for the lengths of their rows; both may use the same budget."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("LONGHAUL_API_KEY", raising=False)
    settings = {"optimizer": "adamw", "activation_checkpointing": 0, "micro_batch": 8, "budget": 0.05}
    with Stack(tmp_path / "home", data=data) as stack:
        stack.start("service", "check")
        monkeypatch.setenv("LONGHAUL_URL", stack.url)
        runs = {}
        for name, tokens in (("short", 16), ("long", 128)):
            limits = {"max_input_tokens": tokens, "max_target_tokens": tokens}
            given = tiny_job(name=name, memory=settings)
            runs[name] = stack.submit({**given, "data": {**given["data"], **limits}})
            stack.wait_for_event(runs[name], "job.failed", "job.checked")
        assert runs["long"].record().error is not None
        assert main(["compare", "short", "long"]) == 0
    out = capsys.readouterr().out
    [cause] = [line for line in out.splitlines() if line.startswith("long needs ")]
    assert "more than short: data.max_input_tokens and data.max_target_tokens together (+" in cause
    assert re.search(r"data\.max_input_tokens +16 +128", out) and re.search(r"\d\d other settings", out)
