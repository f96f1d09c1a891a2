"""The plan of a job over HTTP: as stored, drawn, and in the sentences of events."""

from __future__ import annotations

import json

from jobs.plan import DataPlan, ModelPlan, Plan, make_plan
from jobs.preview import DataPreview, RowPreview, TextPreview
from tests.service.running import Service
from tests.support.samples import checked, memory_plan, prepared, preview, time_summary


def test_a_plan_is_shown_as_it_is_stored(service: Service) -> None:
    job = service.submit()
    run = service.run(job)
    data = DataPlan(train="x", input="x", target="x", rows=8)
    plan = make_plan(run.spec(), ModelPlan(source="x", parameters=1), data, "cuda", memory_plan())
    run.write_plan(plan)
    (run.path / "memory.png").write_bytes(b"\x89PNG")
    answer = service.get(f"/jobs/{job}/plan")
    assert (answer.status_code, answer.headers["Content-Type"]) == (200, "application/json")
    assert answer.json() == json.loads(run.plan_file.read_bytes())
    assert Plan.model_validate(answer.json()) == plan
    picture = service.get(f"/jobs/{job}/plan.png")
    assert (picture.status_code, picture.headers["Content-Type"], picture.content) == (200, "image/png", b"\x89PNG")


def test_a_preview_is_shown_as_it_is_stored(service: Service) -> None:
    job = service.submit()
    text = TextPreview(text="½ {", characters=3, tokens=5, cut_characters=0, unknown={"{": 1})
    row = RowPreview(number=1, input=text, target=text, rewritten={"½": 2})
    shown = preview([row])
    service.run(job).write_preview(shown)
    answer = service.get(f"/jobs/{job}/preview")
    assert answer.status_code == 200
    assert DataPreview.model_validate(answer.json()) == shown


def test_what_is_damaged_is_said_to_be_so_and_not_to_be_missing(service: Service) -> None:
    job = service.submit()
    page = {"Accept": "text/html"}
    for file, path, tab in (("plan.json", "plan", "plan"), ("preview.json", "preview", "data")):
        (service.run(job).path / file).write_text('{"task": 1')
        error = service.get(f"/jobs/{job}/{path}")
        assert (error.status_code, error.json()["error"]["code"]) == (409, "damaged")
        assert error.json()["error"]["message"].startswith(f"{file} of job {job} is damaged")
        shown = service.get(f"/jobs/{job}?tab={tab}", headers=page)
        assert shown.status_code == 409 and f"{file} of job {job} is damaged".capitalize() in shown.text
        assert service.get(f"/jobs/{job}", headers=page).status_code == 200  # it has more to show


def test_before_check_there_is_none(service: Service) -> None:
    job = service.submit()
    for path in ("plan", "plan.png", "preview"):
        answer = service.get(f"/jobs/{job}/{path}")
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "no_plan"
        assert service.get(f"/jobs/job-unknown/{path}").json()["error"]["code"] == "not_found"


def test_the_sentences_of_check_and_prepare_say_what_memory_is_needed(service: Service) -> None:
    job = service.submit()
    first, then = memory_plan(micro_batch=4), memory_plan()
    time = time_summary(text="≥ 131 h")
    service.append(job, checked(steps=2, memory=first.summary(), time=time))
    service.append(job, prepared(2, time=time, memory=then.summary()))
    messages = [event["message"] for event in service.get(f"/jobs/{job}/events").json()["data"]]
    assert messages[1].endswith(f"about 8 rows and 2 steps; ≥ 131 h; {first.text}")
    assert messages[2] == f"prepared: 8 training rows, 2 steps to train; ≥ 131 h; {then.text}"
    assert service.get(f"/jobs/{job}").json()["plan"]["memory"]["micro_batch"] == 8
