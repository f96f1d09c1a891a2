"""Asking a model on the page of its job. What the worker would answer is put in by hand."""

from __future__ import annotations

from playwright.sync_api import expect

from jobs.events import JobChecked
from tests.service.answering import DONE, OUTPUT, answering
from tests.service.pages.watched import WatchedPage
from tests.service.running import Service
from tests.service.seeded import leave_behind, train
from tests.support.samples import checked, heartbeat

HOSTILE = "<b>bold</b>"


ROOM_FOR_PLACEHOLDER = """(each) => {
    const style = getComputedStyle(each), drawn = document.createElement("canvas").getContext("2d");
    drawn.font = style.font;
    const spinner = 20, padding = parseFloat(style.paddingLeft) + parseFloat(style.paddingRight);
    return each.clientWidth - padding - spinner - drawn.measureText(each.placeholder).width;
}"""


def test_a_phone_shows_every_tab_and_the_whole_placeholder(service: Service, watched: WatchedPage) -> None:
    job, page = service.submit(name="chef"), watched.page
    train(service, job)
    leave_behind(service.run(job))
    page.set_viewport_size({"width": 380, "height": 800})
    page.goto(f"{service.url}/jobs/{job}?tab=try")
    boxes = [each.bounding_box() for each in page.locator(".tabs a").all()]
    assert all(box is not None and box["x"] >= 0 and box["x"] + box["width"] <= 380 for box in boxes), boxes
    assert page.locator("[name='max_new_tokens']").evaluate(ROOM_FOR_PLACEHOLDER) >= 0


def test_a_text_is_answered_side_by_side(service: Service, watched: WatchedPage, redis_url: str) -> None:
    job, page = service.submit(name="chef"), watched.page
    train(service, job)
    page.goto(f"{service.url}/jobs/{job}?tab=try")
    expect(page.locator(".empty")).to_contain_text("No model yet")
    leave_behind(service.run(job))
    service.store.workers.report(heartbeat("generate-a"))
    page.goto(f"{service.url}/jobs/{job}?tab=try")
    page.get_by_label("Text").fill("Peach Ice Cream")
    page.get_by_label("also before training").check()
    worker, taken = answering(
        redis_url,
        [
            ("loading", {"model": "trained", "device": "cpu"}),
            ("text", {"model": "trained", "index": 0, "text": "Preheat "}),
            ("text", {"model": "trained", "index": 0, "text": HOSTILE}),
            ("output", {**OUTPUT, "model": "trained", "text": f"Preheat {HOSTILE}"}),
            ("output", {**OUTPUT, "model": "base", "text": "of of of"}),
            ("done", DONE),
        ],
    )
    page.get_by_role("button", name="Ask").click()
    expect(page.locator("#try-status")).to_have_text("On the CPU (a job trains on the GPU), 4.3 tokens/s.")
    worker.join()
    [request] = taken
    assert (request.job, request.payload["input"], request.payload["base"]) == (job, "Peach Ice Cream", True)
    after, before = page.locator("#try-answers .tile").all()
    expect(after).to_contain_text(f"Preheat {HOSTILE}")
    expect(before).to_contain_text("of of of")
    assert page.locator("#try-answers b").count() == 0
    assert watched.violations() == []


def test_a_refusal_says_what_to_do(service: Service, watched: WatchedPage) -> None:
    job, page = service.submit(name="chef"), watched.page
    train(service, job)
    leave_behind(service.run(job))
    page.goto(f"{service.url}/jobs/{job}?tab=try")
    page.get_by_label("Text").fill("x")
    watched.expected.append("503")
    page.get_by_role("button", name="Ask").click()
    expect(page.locator("#try-status")).to_contain_text("python -m worker generate")


def test_a_classifier_of_pairs_is_asked_two_texts(service: Service, watched: WatchedPage, redis_url: str) -> None:
    job, page = service.submit(name="chef"), watched.page
    pair = {"task": "classification", "input": "{premise} {} {hypothesis}"}
    service.append(job, JobChecked(plan=checked().plan.model_copy(update=pair)))
    leave_behind(service.run(job))
    service.store.workers.report(heartbeat("generate-a"))
    page.goto(f"{service.url}/jobs/{job}?tab=try")
    expect(page.locator("#about-input")).to_contain_text("{premise} {} {hypothesis}")
    page.get_by_label("Text").fill("A kettle leaks")
    page.get_by_label("and", exact=True).fill("It is new")
    worker, taken = answering(
        redis_url, [("output", {**OUTPUT, "model": "trained", "text": "neutral", "labels": []}), ("done", DONE)]
    )
    page.get_by_role("button", name="Ask").click()
    expect(page.locator("#try-answers")).to_contain_text("The model gives: neutral")
    worker.join()
    [request] = taken
    assert [turn["content"] for turn in request.payload["messages"]] == ["A kettle leaks", "It is new"]


def test_a_classifier_is_asked_without_what_only_writers_have(
    service: Service, watched: WatchedPage, redis_url: str
) -> None:
    job, page = service.submit(name="chef"), watched.page
    summary = checked().plan.model_copy(update={"task": "classification"})
    service.append(job, JobChecked(plan=summary))
    leave_behind(service.run(job))
    service.store.workers.report(heartbeat("generate-a"))
    page.goto(f"{service.url}/jobs/{job}?tab=try")
    page.get_by_label("Text").fill("My kettle leaks")
    assert page.locator("#try input[type=number]").count() == 0
    labels = [{"label": "bug", "probability": 0.446}, {"label": "wish", "probability": 0.00012}]
    outputs = [
        ("output", {**OUTPUT, "model": model, "text": text, "labels": labels})
        for model, text in (("trained", "bug"), ("base", ""))
    ]
    worker, taken = answering(redis_url, [*outputs, ("done", DONE)])
    page.get_by_role("button", name="Ask").click()
    trained, base = page.locator("#try-answers .tile[data-model=trained]"), page.locator("[data-model=base]")
    expect(trained).to_contain_text("The model gives: bug\nbug  44.6 %\nwish  < 0.1 %", use_inner_text=True)
    expect(base).to_contain_text("The model gives no label: none is above 50 %\nbug  44.6 %", use_inner_text=True)
    worker.join()
    assert [request.payload for request in taken] == [{"input": "My kettle leaks", "stream": True}]
