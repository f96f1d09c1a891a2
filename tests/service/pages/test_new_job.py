"""The page where a job is made, in a browser. Here tests do what a check worker does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from jobs.disk.rundir import RunDir
from jobs.events import JobCancelled, JobFailed, JobValidated
from jobs.heartbeat import WorkerHeartbeat
from jobs.plan import DataPlan, ModelPlan, make_plan
from jobs.preview import DataPreview, RowPreview, SourcePreview, SpanPreview, TextPreview, UnrecognizedSource
from jobs.trainer_facts import Fault
from tests.service.pages.watched import WatchedPage
from tests.service.running import Service, running
from tests.support.samples import checked, memory_plan

HOSTILE = '<img src=x onerror="document.title=1">'
CHECKER: dict[str, Any] = {
    "name": "check-box-1-a1b2c3", "pid": 1, "stage": "check", "healthy": True, "why": None, "busy": False,
    "queue": "longhaul:check", "device": "cpu", "gpu": None, "versions": {},
}  # fmt: skip
RICH: dict[str, Any] = {
    "name": "Überall ½", "model": "builtin:qwen-tiny", "task": {"type": "causal", "loss_on": "all"},
    "method": {"type": "lora", "rank": 8, "targets": ["q_proj", "v_proj"]},
    "data": {"train": [{"source": "a.jsonl", "weight": 2.0}, {"source": "b.jsonl"}], "validation": 0.25,
             "input": 'line one: {a}\nline two: "{b}"', "target": "{c}", "normalize": False},
    "training": {"learning_rate": 1e-3, "max_grad_norm": None, "lr_scheduler": "cosine"},
    "memory": {"budget": 12.5, "optimizer": "adafactor"}, "resources": {"gpu_name": "5090"},
    "checkpoint": {"every_minutes": None, "best": None},
    "integrations": {"wandb": {"project": "here"}, "discord": False},
    "priority": -3, "metadata": {"team": HOSTILE},
}  # fmt: skip


def text(shown: str) -> TextPreview:
    """A whole one."""
    return TextPreview(text=shown, characters=len(shown), tokens=3, cut_characters=0, unknown={})


def row(number: int, source: str, target: str, spans: Sequence[SpanPreview] = ()) -> RowPreview:
    """One row of a preview."""
    return RowPreview(number=number, input=text(source), target=text(target), rewritten={}, spans=tuple(spans))


def validate(
    service: Service, job: str, *rows: RowPreview, read_as: str = "input and target", labels_noticed: str = ""
) -> None:
    """What check leaves of a dry run that is in order."""
    run = service.run(job)
    data = DataPlan(train="rows.jsonl", input="{input}", target="{target}", rows=64)
    source = SourcePreview(
        name="rows.jsonl", weight=1.0, read_as=read_as, input="{input}", target="{target}",
        rows=[*rows] or [row(1, "a question", "an answer")],
    )  # fmt: skip
    run.write_preview(DataPreview(sources=[source], labels_noticed=(labels_noticed,) if labels_noticed else ()))
    run.write_plan(make_plan(run.spec(), ModelPlan(source="m", parameters=10), data, "cuda", memory_plan()))
    service.append(job, checked(memory=memory_plan().summary()), JobValidated())


def has_checker(service: Service) -> None:
    """From now on somebody checks jobs, as far as the service has heard."""
    service.store.workers.report(WorkerHeartbeat(**CHECKER))


def shown_check(watched: WatchedPage, other_than: str = "") -> str:
    """The dry run that the page waits for."""
    page = watched.page
    page.locator(f"#check:not([data-job='']):not([data-job='{other_than}'])").wait_for()
    return page.locator("#check").get_attribute("data-job") or ""


def jobs_of(service: Service) -> list[RunDir]:
    """All that there are, dry runs as well, oldest first."""
    listed = service.get("/jobs?limit=100&dry_runs=true").json()["data"]
    return [service.run(job["id"]) for job in reversed(listed)]


def test_an_answer_is_planned_before_the_job_is_made(service: Service, watched: WatchedPage, tmp_path: Path) -> None:
    has_checker(service)
    file = tmp_path / "My rows (1).jsonl"
    file.write_text('{"input": "a", "target": "b"}\n' * 8)
    page = watched.page
    page.goto(service.url + "/new")
    assert page.locator("#start").is_disabled()
    page.set_input_files("#file", file)
    page.get_by_text("is uploaded as dataset:My-rows-1-.jsonl").wait_for()
    # No class is among these columns: another model is asked what they are.
    first = shown_check(watched)
    assert service.run(first).spec().model == "builtin:roberta-tiny"
    watched.expected = ["404"]  # a page of a dry run that is gone
    service.append(first, JobFailed(error=Fault(code="no_usable_columns", message="no columns", param="data.input")))
    second = shown_check(watched, first)
    assert service.run(second).spec().model == "builtin:qwen-tiny"
    validate(service, second)
    third = shown_check(watched, second)
    assert service.run(third).spec().model == "google/flan-t5-base", "what is suggested first for inputs with targets"
    page.get_by_text("Read as input and target").wait_for()
    assert page.locator("#plan .memory").count() == 0, "the plan of a model that nobody chose says nothing"
    assert page.locator("#start").is_disabled()
    page.get_by_role("button", name="builtin:t5-tiny").click()
    fourth = shown_check(watched, third)
    expect(page.locator("#field-model")).to_have_value("builtin:t5-tiny")
    validate(service, fourth)
    page.locator("#plan .memory").wait_for()
    assert page.locator("#plan .memory .free").get_attribute("width") == "1000.0", "its bar is to scale"
    expect(page.locator("#start")).to_be_enabled()
    expect(page.locator("#check")).to_contain_text("steps;")
    page.get_by_label("How many epochs?").fill("7")
    expect(page.locator("#start")).to_be_disabled()
    fifth = shown_check(watched, fourth)
    page.get_by_text("Planning …").wait_for()
    page.locator("#plan.stale .memory").wait_for()
    validate(service, fifth)
    expect(page.locator("#start")).to_be_enabled()
    page.locator("#start").click()
    page.wait_for_url("**/jobs/job-*")
    *dry_runs, job = jobs_of(service)
    assert job.id == page.url.rpartition("/")[2]
    wanted = {"model": "builtin:t5-tiny", "name": "My-rows-1-", "data": {"train": "dataset:My-rows-1-.jsonl"}}
    assert job.spec().model_dump(exclude_defaults=True) == wanted | {"training": {"epochs": 7}}
    assert [run.record().status for run in dry_runs] == ["cancelled"], "what nobody waits for is gone or cancelled"
    page.go_back()
    page.get_by_role("heading", name="Clone of My-rows-1-").wait_for()


def test_an_address_has_nothing_deleted_and_no_rows_read(service: Service, watched: WatchedPage) -> None:
    has_checker(service)
    service.request("PUT", "/datasets/unused.jsonl", data=b'{"input": "a", "target": "b"}\n')
    older, other = service.submit(), service.submit()
    service.append(other, JobCancelled())
    dry = service.post("/jobs?dry_run=true", json={"model": "builtin:t5-tiny", "data": {"train": "rows.jsonl"}}).json()
    validate(service, dry["id"])
    page, asked = watched.page, list[str]()
    watched.expected = ["422", "404"]
    page.on("request", lambda request: asked.append(request.method))
    for shown in ("../datasets/unused.jsonl", f"../jobs/{other}", other, older):
        page.goto(f"{service.url}/new?check={dry['id']}&shown={shown}")
        page.wait_for_load_state("networkidle")
    page.goto(f"{service.url}/new?data=dataset:unused.jsonl")
    page.get_by_text("Press Enter in the field of the rows").wait_for()
    page.wait_for_load_state("networkidle")
    assert set(asked) == {"GET"}
    assert service.get("/datasets/unused.jsonl").ok and service.get(f"/jobs/{other}").ok
    page.locator("[name='data.train']").press("Enter")
    shown_check(watched)
    page.goto(service.url + "/datasets")
    page.locator("a[href*='/new?data=']").click()  # here somebody wants it
    shown_check(watched)


def test_a_clone_begins_as_the_same_job_and_says_what_was_changed(service: Service, watched: WatchedPage) -> None:
    has_checker(service)
    source = service.submit(**RICH)
    page = watched.page
    page.goto(f"{service.url}/new?clone={source}")
    same = service.run(shown_check(watched))
    assert same.spec() == service.run(source).spec() and same.record().cloned_from == source
    page.get_by_text("Nothing yet: it would be the same").wait_for()
    page.locator("#more > summary").click()
    page.locator("#group-training > summary").click()
    page.locator("[name='training.learning_rate']").fill("0.002")
    page.locator("[name='training.max_grad_norm']").fill("")  # 1.0 again
    changed = service.run(shown_check(watched, same.id))
    expect(page.locator(".changes li")).to_have_text(
        ["training.learning_rate 0.001 → 0.002", "training.max_grad_norm null → 1.0"]
    )
    assert changed.record().cloned_from == source
    training = changed.spec().training
    assert (training.learning_rate, training.max_grad_norm, training.lr_scheduler) == (0.002, 1.0, "cosine")
    page.get_by_label("all of them").check()
    full = service.run(shown_check(watched, changed.id)).spec()
    assert full.method.type == "full" and full.data == service.run(source).spec().data
    assert page.locator("[name='method.rank']").is_hidden()


def test_a_change_that_no_patch_can_express_makes_the_same_job(service: Service, watched: WatchedPage) -> None:
    source = service.submit()
    page = watched.page
    page.goto(f"{service.url}/new?clone={source}")
    first = shown_check(watched)
    page.locator("#more > summary").click()
    page.locator("#group-checkpoint > summary").click()
    page.locator("[name='checkpoint.every_minutes']").fill("null")
    changed = service.run(shown_check(watched, first)).spec()
    assert changed.checkpoint.every_minutes is None and changed.model == service.run(source).spec().model


def test_every_error_of_a_job_stands_at_its_field(service: Service, watched: WatchedPage) -> None:
    watched.expected = ["422"]
    page = watched.page
    page.goto(f"{service.url}/new?data=rows.jsonl")
    page.locator("[name='data.train']").press("Enter")
    first = shown_check(watched)
    page.locator("#more > summary").click()
    page.locator("#group-training > summary").click()
    page.locator("[name='training.batch_size']").fill("0")
    page.locator("[name='training.learning_rate']").fill("fast")
    expect(page.locator("[id='error-training.batch_size']")).to_have_text("must be greater than or equal to 1 (got 0)")
    expect(page.locator("[id='error-training.learning_rate']")).to_contain_text("must be a number (got 'fast')")
    assert page.locator("[name='training.learning_rate']").get_attribute("aria-invalid") == "true"
    expect(page.get_by_role("alert").get_by_role("link")).to_have_text(
        ["training.batch_size", "training.learning_rate"]
    )
    assert page.locator("#start").is_disabled() and shown_check(watched) == first
    page.locator("#group-training > summary").click()
    page.locator("[name='training.learning_rate']").evaluate("(each) => each.value = 'slow'")
    page.get_by_label("How many epochs?").fill("many")
    expect(page.locator("[id='error-training.epochs']")).to_contain_text("must be an integer (got 'many')")
    expect(page.locator("#group-training")).to_have_attribute("open", "")
    page.locator("[name='training.batch_size']").fill("8")
    page.locator("[name='training.learning_rate']").fill("1e-3")
    page.get_by_label("How many epochs?").fill("3")
    second = shown_check(watched, first)
    expect(page.locator(".wrong:visible")).to_have_count(0)
    # And what check finds out, whose texts come from the data.
    hint = "name one of these columns"
    fault = Fault(code="no_usable_columns", message=f"data.input: no row has {HOSTILE}", hint=hint, param="data.input")
    page.get_by_label("Which model?").fill("builtin:t5-tiny")
    third = shown_check(watched, second)
    service.append(third, JobFailed(error=fault))
    expect(page.locator("[id='error-data.input']")).to_have_text(f"no row has {HOSTILE}\n{hint}")
    expect(page.locator("#columns")).to_have_attribute("open", "")
    expect(page.locator("#main").get_by_text("no row has")).to_have_count(1)
    expect(page.locator("#check")).to_contain_text("See data.input")
    assert page.title() == "New job · Longhaul" and page.locator("#main img").count() == 0


def test_columns_that_nobody_recognizes_are_asked_for(service: Service, watched: WatchedPage) -> None:
    has_checker(service)
    page = watched.page
    page.goto(f"{service.url}/new?data=fragen.csv")
    page.locator("[name='data.train']").press("Enter")
    fault = Fault(code="no_usable_columns", message="no columns are recognized", param="data.input")
    rows = [{"frage": HOSTILE, "antwort": "Das"}, {"frage": "Wo?", "antwort": "Hier"}]
    raw = UnrecognizedSource(name="fragen.csv", columns=("frage", "antwort", HOSTILE), rows=rows)
    last = ""
    watched.expected = ["404"]  # a page of a dry run that is gone
    for _ in range(2):
        last = shown_check(watched, last)
        service.run(last).write_preview(DataPreview(sources=[], unrecognized=(raw,)))
        service.append(last, JobFailed(error=fault))
    table = page.get_by_role("region", name="First rows")
    expect(table.locator("tbody tr").first).to_have_text(f"{HOSTILE}Das")
    expect(page.locator("#main").get_by_text("no columns are recognized")).to_have_count(1)
    page.locator("#columns-data\\.input").get_by_role("button", name="frage").click()
    expect(page.get_by_label("Which column is the input?")).to_have_value("{frage}")
    page.locator("#columns-data\\.target").get_by_role("button", name="antwort").click()
    named = shown_check(watched, last)
    spec = service.run(named).spec()
    assert (spec.data.input, spec.data.target, spec.model) == ("{frage}", "{antwort}", "builtin:qwen-tiny")
    validate(service, named)
    assert service.run(shown_check(watched, named)).spec().model == "google/flan-t5-base"
    assert page.locator("#main img").count() == 0
    page.locator("[name='data.train']").fill("others.csv")
    expect(page.get_by_label("Which column is the input?")).to_have_value("")
    expect(page.get_by_label("Which one is the target?")).to_have_value("")


def test_labels_are_offered_classifiers_and_hints_name_fields(service: Service, watched: WatchedPage) -> None:
    has_checker(service)
    page = watched.page
    watched.expected = ["404"]  # a page of a dry run that is gone
    page.goto(f"{service.url}/new?data=tickets.csv")
    page.locator("[name='data.train']").press("Enter")
    hint = (
        "looks like 4 labels: classify `body` by `queue`? "
        "Add --set 'data.input={body}' --set 'data.target={queue}' --set model=builtin:roberta-tiny"
    )
    fault = Fault(code="no_usable_columns", message="no columns are recognized", param="data.input", hint=hint)
    raw = UnrecognizedSource(name="tickets.csv", columns=("body", "queue"), rows=[{"body": "Help", "queue": "mail"}])
    last = ""
    for _ in range(2):
        last = shown_check(watched, last)
        service.run(last).write_preview(DataPreview(sources=[], unrecognized=(raw,)))
        service.append(last, JobFailed(error=fault))
    expect(page.locator("[id='error-data.input']")).to_contain_text(
        "Set data.input = {body}, data.target = {queue} and model = builtin:roberta-tiny"
    )
    page.locator("#columns-data\\.input").get_by_role("button", name="body").click()
    page.locator("#columns-data\\.target").get_by_role("button", name="queue").click()
    named = shown_check(watched, last)
    validate(service, named, labels_noticed="labels look like several; to learn each, add --set task.multi_label=true")
    chosen = shown_check(watched, named)
    assert service.run(chosen).spec().model == "answerdotai/ModernBERT-base", "what is suggested first for labels"
    expect(page.locator("#preview")).to_contain_text("to learn each, set task.multi_label = true")
    expect(page.locator("#models [data-model='builtin:roberta-tiny']")).to_be_visible()
    validate(service, chosen)  # nothing looks like labels any more, as after other columns
    expect(page.locator("#models [data-model='builtin:t5-tiny']")).to_be_visible()


def test_what_is_typed_outlives_a_check_that_is_deleted(service: Service, watched: WatchedPage) -> None:
    has_checker(service)
    page = watched.page
    watched.expected = ["404"]
    page.goto(f"{service.url}/new")
    page.locator("[name='data.train']").fill("rows.jsonl")
    page.get_by_label("Which model?").fill("builtin:t5-tiny")
    first = shown_check(watched)
    validate(service, first)
    expect(page.locator("#start")).to_be_enabled()
    assert service.request("DELETE", f"/jobs/{first}").ok
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")  # as when somebody comes back to it
    page.get_by_text("The check is gone").wait_for()
    expect(page.locator("[name='data.train']")).to_have_value("rows.jsonl")
    expect(page.get_by_label("Which model?")).to_have_value("builtin:t5-tiny")
    expect(page.locator("#start")).to_be_disabled()
    page.get_by_label("How many epochs?").fill("5")
    again = service.run(shown_check(watched, first)).spec()
    assert (again.model, again.data.train, again.training.epochs) == ("builtin:t5-tiny", "rows.jsonl", 5)


def test_the_name_of_a_file_keeps_its_letters(service: Service, watched: WatchedPage, tmp_path: Path) -> None:
    page = watched.page
    page.goto(service.url + "/new")
    for file, name in (("Übung.csv", "Ubung.csv"), ("Größe é.csv", "Grosse-e.csv"), ("日本.csv", "rows.csv")):
        (tmp_path / file).write_bytes(b"text,label\na,b\n")
        page.set_input_files("#file", tmp_path / file)
        page.get_by_text(f"is uploaded as dataset:{name}").wait_for()
        expect(page.get_by_label("Name", exact=True)).to_have_value(name.partition(".")[0])
    page.get_by_label("Name", exact=True).fill("mine")
    page.set_input_files("#file", tmp_path / "Übung.csv")
    page.get_by_text("is uploaded as dataset:Ubung.csv").wait_for()
    expect(page.get_by_label("Name", exact=True)).to_have_value("mine")


def test_what_comes_from_data_is_text(service: Service, watched: WatchedPage) -> None:
    has_checker(service)
    page = watched.page
    source = service.submit(data={"train": f"{HOSTILE}.jsonl"}, metadata={"a": HOSTILE})
    page.goto(f"{service.url}/new?clone={source}")
    spans = [SpanPreview(text=f"{HOSTILE} asks", learned=False), SpanPreview(text=f"{HOSTILE} answers", learned=True)]
    job = shown_check(watched)
    validate(service, job, row(1, HOSTILE, HOSTILE), row(2, "", "", spans), read_as=HOSTILE)
    expect(page.get_by_text(f"Read as {HOSTILE}")).to_be_visible()
    page.get_by_text("1 more").click()
    expect(page.locator(".mask mark").first).to_have_text(f"{HOSTILE} answers")
    colors = [page.locator(each).first.evaluate("(one) => getComputedStyle(one).backgroundColor") for each in (
        ".mask mark", ".mask span")]  # fmt: skip
    assert colors[0] != colors[1], "what is learned is marked"
    assert page.locator("#main img").count() == 0 and page.title() == "New job · Longhaul"


def test_without_a_worker_it_says_so_and_continues_when_there_is_one(service: Service, watched: WatchedPage) -> None:
    page = watched.page
    page.goto(f"{service.url}/new?data=rows.jsonl")
    page.locator("[name='data.train']").press("Enter")
    page.get_by_text("Nobody checks jobs right now").wait_for()
    assert page.locator("#start").is_disabled(), "nobody has chosen a model"
    page.get_by_label("Which model?").fill("builtin:t5-tiny")
    page.get_by_role("button", name="Submit unchecked").wait_for()
    expect(page.locator("#start")).to_be_enabled()
    has_checker(service)
    page.get_by_text("Planning …").wait_for()
    expect(page.get_by_role("button", name="Start training")).to_be_disabled()
    validate(service, shown_check(watched))
    expect(page.get_by_role("button", name="Start training")).to_be_enabled()


def test_files_that_cannot_be_taken_in_are_refused_before_a_byte_is_sent(
    redis_url: str, watched: WatchedPage, tmp_path: Path
) -> None:
    with running(redis_url, tmp_path / "home", max_upload_bytes=2048) as service:
        page = watched.page
        sent: list[str] = []
        page.on("request", lambda request: sent.append(request.method))
        page.goto(service.url + "/new")
        files = {name: tmp_path / name for name in ("notes.pdf", "large.csv", f"{HOSTILE.replace('/', '')}.doc")}
        files["notes.pdf"].write_bytes(b"%PDF")
        files["large.csv"].write_bytes(b"a,b\n" * 1000)
        files[f"{HOSTILE.replace('/', '')}.doc"].write_bytes(b"x")
        page.set_input_files("#file", files["notes.pdf"])
        page.get_by_text("notes.pdf does not say what it holds").wait_for()
        page.set_input_files("#file", files["large.csv"])
        page.get_by_text("large.csv has 3.91 KiB, and an upload 2 KiB at most").wait_for()
        page.set_input_files("#file", files[f"{HOSTILE.replace('/', '')}.doc"])
        page.get_by_text(f"{HOSTILE}.doc does not say").wait_for()
        assert set(sent) == {"GET"} and page.locator("#main img").count() == 0


def test_the_same_content_keeps_its_name_and_other_content_gets_another(
    service: Service, watched: WatchedPage, tmp_path: Path
) -> None:
    service.request("PUT", "/datasets/rows.csv", data=b"text,label\na,b\n")
    service.request("PUT", "/datasets/rows-2.csv", data=b"text,label\nlonger,b\n")
    watched.expected = ["409", "404"]
    page = watched.page
    for content, name in ((b"text,label\na,b\n", "rows.csv"), (b"text,label\nx,y\n", "rows-3.csv")):
        (tmp_path / "rows.csv").write_bytes(content)
        page.goto(service.url + "/new")
        page.set_input_files("#file", tmp_path / "rows.csv")
        page.get_by_text(f"is uploaded as dataset:{name}").wait_for()
        assert service.get(f"/datasets/{name}").json()["bytes"] == len(content)
        expect(page.locator("[name='data.train']")).to_have_value(f"dataset:{name}")


def test_only_a_dry_run_can_be_a_draft(service: Service) -> None:
    job = service.submit()
    answer = service.get(f"/new?check={job}", headers={"Accept": "text/html"})
    assert answer.status_code == 422 and f"/new?clone={job}" in answer.text
    assert service.get("/new?clone=job-none", headers={"Accept": "text/html"}).status_code == 404
    assert service.get("/new").status_code == 404, "a program asks the API"
    dry_run = service.post("/jobs?dry_run=true", json={"data": {"train": "rows.jsonl"}}).json()["id"]
    gone = service.get(f"/new?check={dry_run}&shown=job-gone", headers={"Accept": "text/html"})
    assert gone.status_code == 200


@pytest.mark.parametrize(("theme", "width"), [("light", 1280), ("dark", 390)])
def test_everybody_can_use_it_in_every_state(browser: Browser, service: Service, theme: str, width: int) -> None:
    source = service.submit(**RICH)
    found: dict[str, list[str]] = {}
    with WatchedPage(browser, color_scheme=theme, viewport={"width": width, "height": 800}) as watched:
        page = watched.page

        def look(state: str) -> None:
            if violations := watched.violations():
                found[state] = violations
            assert page.evaluate("document.documentElement.scrollWidth") <= width, f"{state}: wider than the screen"

        page.goto(service.url + "/new")
        look("empty")
        page.goto(f"{service.url}/new?clone={source}")
        first = shown_check(watched)
        look("nobody checks")
        has_checker(service)
        page.get_by_text("Planning …").wait_for()
        look("planning")
        validate(service, first)
        expect(page.locator("#start")).to_be_enabled()
        page.locator("#more > summary").click()
        for summary in page.locator(".group:visible > summary").all():
            summary.click()
        look("planned, with every setting")
        page.get_by_label("How many epochs?").fill("9")
        second = shown_check(watched, first)
        page.locator("#plan.stale").wait_for()
        look("changed")
        service.append(second, JobFailed(error=Fault(code="bad_data", message="it is bad", param="data.train")))
        page.get_by_text("Not planned.").wait_for()
        look("refused")
        page.get_by_label("How many epochs?").fill("8")
        third = shown_check(watched, second)
        raw = UnrecognizedSource(
            name="a.jsonl", columns=("frage", "antwort"), rows=[{"frage": "Was?", "antwort": "Das"}]
        )
        service.run(third).write_preview(DataPreview(sources=[], unrecognized=(raw,)))
        fault = Fault(code="no_usable_columns", message="no columns are recognized", param="data.input")
        service.append(third, JobFailed(error=fault))
        page.get_by_role("button", name="none: only the target is learned").click()
        look("columns asked for")
        assert watched.faults == []
    assert found == {}
