"""A job that only evaluates a model: every surface tells its metrics with their intervals, and of no training."""

from __future__ import annotations

import pytest

from jobs.events import AttemptEnded, AttemptStarted, JobQueued, JobSucceeded
from jobs.trainer_facts import EvaluationFinished, Sample
from jobs.verdict import ConfidenceInterval
from longhaul.main import main
from tests.service.running import Service
from tests.support.samples import checked, prepared

OF_TRAINING = ("at first", "best", "before training", "training loss", "training time", "Curves", "of step", "at step")


def evaluated(service: Service, chrf: float) -> str:
    """A job that has succeeded."""
    intervals = {"chrf": ConfidenceInterval(low=chrf - 2.3, high=chrf + 2.4)}
    job = service.submit(kind="evaluate", name="held-out")
    measured = EvaluationFinished(
        step=0, loss=2.31, rows=40, seconds=1.0, best=False, metrics={"chrf": chrf}, intervals=intervals,
        samples=[Sample(input="leeks", target="Boil them.", generated="Boil boil.")], judged_by="chrf",
    )  # fmt: skip
    done = JobSucceeded(model=None, step=0, loss=2.31, metrics={"chrf": chrf}, intervals=intervals)
    service.append(
        job, checked(steps=0), prepared(0), JobQueued(), AttemptStarted(worker="w", device="cpu"), measured,
        AttemptEnded(reason="done", step=0), done,
    )  # fmt: skip
    return job


@pytest.fixture
def job(service: Service) -> str:
    return evaluated(service, 41.2)


def test_the_api_has_metrics_and_intervals(service: Service, job: str) -> None:
    told = service.get(f"/jobs/{job}").json()
    assert (told["final_loss"], told["first_loss"], told["best_loss"]) == (2.31, None, None)
    assert told["final_metrics"] == {"chrf": 41.2}
    assert told["final_intervals"]["chrf"] == {"low": pytest.approx(38.9), "high": pytest.approx(43.6)}


def test_the_command_line_tells_them(service: Service, job: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", job]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "validation loss 2.3100 chrF 41.2 (38.9 to 43.6)" in shown
    assert not [part for part in OF_TRAINING if part in shown]
    assert main(["watch", job]) == 0
    watched = " ".join(capsys.readouterr().out.split())
    assert "succeeded: the model is evaluated, validation loss 2.3100, chrF 41.2 (38.9 to 43.6)" in watched
    assert "best so far" not in watched and "trained for" not in watched
    assert main(["compare", job, evaluated(service, 33.9)]) == 0
    compared = capsys.readouterr().out
    assert "final_metrics.chrf" in compared and "41.2 (38.9 to 43.6)" in compared and "31.6 to 36.3" in compared
    assert "final_intervals" not in compared and "first_loss" not in compared


@pytest.mark.parametrize("path", ["", "/report"])
def test_pages_tell_them(service: Service, job: str, path: str) -> None:
    page = service.get(f"/jobs/{job}{path}", headers={"Accept": "text/html"}).text
    assert "<dt>chrF</dt><dd>41.2 (38.9 to 43.6)</dd>" in page
    assert "Evaluated in" in page and "Boil boil." in page
    main_part = page[page.index("<main") : page.index("Latest events") if not path else page.index("<h2>Events")]
    assert not [part for part in OF_TRAINING if part in main_part]


def test_samples_stand_beside_the_reference_alone(service: Service, job: str) -> None:
    page = service.get(f"/jobs/{job}?tab=samples", headers={"Accept": "text/html"}).text
    assert "<th>written</th>" in page and "before training" not in page and "step 0" not in page
