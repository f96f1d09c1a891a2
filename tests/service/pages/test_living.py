"""What happens to a job while somebody looks: the page follows; and what they do there happens to the job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import expect

from jobs.disk.files import append_line
from jobs.events import AttemptEnded, JobCancelled, JobPaused, JobQueued
from jobs.trainer_facts import CheckpointSaved, EvaluationFinished, OomRecovered, Sample
from tests.service.pages.watched import WatchedPage
from tests.service.running import Service
from tests.service.seeded import STARTED, TRAINED, leave_behind, row, train

HOSTILE = "<img src=x onerror=alert(1)>"
ODD = "‮" + "مرحبا 👩‍🍳 " + "x" * 1_000_000


def queued(service: Service, name: str, **more: object) -> str:
    job = service.submit(name=name, **more)
    train(service, job)
    return job


def test_a_page_follows_its_job(service: Service, watched: WatchedPage) -> None:
    job, page = queued(service, "chef"), watched.page
    page.goto(f"{service.url}/jobs/{job}")
    expect(page.locator(".now-line")).to_contain_text("Next in the queue")
    page.evaluate("window.untouched = true")
    service.append(job, STARTED, *TRAINED)
    expect(page.locator("h1 .state")).to_have_text("running")
    expect(page.locator(".events")).to_contain_text("step 10: checkpoint saved")
    run = service.run(job)
    leave_behind(run)
    service.store.set_latest(job, row(20))
    expect(page.locator("#charts")).to_have_attribute("data-drawn", "10")
    for step in (22, 24):
        append_line(run.metrics_file, row(step))
    service.store.set_latest(job, row(24))
    expect(page.locator("#charts")).to_have_attribute("data-drawn", "12")
    expect(page.locator(".figures")).to_contain_text("24 of 20")
    service.append(job, CheckpointSaved(step=30, path="checkpoints/step-00000030", bytes=1, seconds=1.0))
    expect(page.locator(".events")).to_contain_text("step 30: checkpoint saved")
    assert page.evaluate("window.untouched"), "the page was changed, not loaded anew"


CHARTS = """
let made;
window.charts = [];
Object.defineProperty(window, "uPlot", { get: () => made, set: (given) => {
  made = class extends given { constructor(...all) { super(...all); window.charts.push(this); } };
} });
"""
ACROSS = "[...new Set(charts.splice(0).map(({ scales: { x } }) => `${x.max - x.min} to ${x.max}`))]"


def test_charts_of_one_point_end_there(service: Service, watched: WatchedPage) -> None:
    job, page = queued(service, "chef"), watched.page
    service.append(job, STARTED)
    append_line(service.run(job).metrics_file, row(10))
    service.store.set_latest(job, row(10))
    page.add_init_script(CHARTS)
    page.goto(f"{service.url}/jobs/{job}")
    expect(page.locator("#charts")).to_have_attribute("data-drawn", "1")
    assert page.evaluate(ACROSS) == ["10 to 10"]
    page.locator("#axis").select_option("at")
    assert page.evaluate(ACROSS) == [f"120 to {row(10).at + 60:.0f}"]
    expect(page.locator(".figures")).to_contain_text("speed now")
    expect(page.locator("#charts")).to_contain_text("rows/s at this step")


SLOW = """
const asked = window.fetch;
let answered = 0;
window.fetch = async (...what) => {
  const answer = await asked(...what);
  if (!String(what[0]).includes("after_step")) return answer;
  await new Promise((done) => setTimeout(done, 750));
  document.documentElement.dataset.answered = ++answered;
  return answer;
};
const repeated = window.setInterval;
window.setInterval = (work, every) => repeated(work, every / 4);
"""


def test_answers_that_come_late_draw_no_row_twice(service: Service, watched: WatchedPage) -> None:
    job, page = queued(service, "chef"), watched.page
    service.append(job, STARTED, *TRAINED)
    leave_behind(service.run(job))
    service.store.set_latest(job, row(20))
    page.add_init_script(SLOW)
    page.goto(f"{service.url}/jobs/{job}")
    expect(page.locator("#charts")).to_have_attribute("data-drawn", "10")
    append_line(service.run(job).metrics_file, row(22))
    service.store.set_latest(job, row(22))
    expect(page.locator("html")).to_have_attribute("data-answered", "3", timeout=60_000)
    expect(page.locator("#charts")).to_have_attribute("data-drawn", "11")


def test_what_somebody_chose_stays_when_the_page_changes(service: Service, watched: WatchedPage) -> None:
    job, page = queued(service, "chef"), watched.page
    service.append(job, STARTED, *TRAINED)
    leave_behind(service.run(job))
    service.store.set_latest(job, row(20))
    page.goto(f"{service.url}/jobs/{job}")
    page.locator("#charts[data-drawn]").wait_for()
    page.get_by_label("x axis").select_option("epoch")
    page.get_by_label("smoothing").fill("0.5")
    chart = page.locator("#charts canvas").first.element_handle()
    halved = {"step": 12, "micro_batch_before": 8, "micro_batch_after": 4}
    service.append(job, OomRecovered(**halved, message="out of memory", milliseconds_lost=1.0))
    expect(page.locator(".events")).to_contain_text("step 12: memory ran out")
    expect(page.get_by_label("x axis")).to_have_value("epoch")
    expect(page.get_by_label("smoothing")).to_have_value("0.5")
    assert chart is not None and chart.evaluate("each => each.isConnected")
    service.append(job, AttemptEnded(reason="crash", step=20, checkpoint_step=10), JobQueued())
    expect(page.locator("h1 .state")).to_have_text("queued")
    service.append(job, STARTED)
    expect(page.locator("h1 .state")).to_have_text("running")
    expect(page.locator(".figures")).to_contain_text("10 of 20")
    expect(page.locator("#charts")).to_have_attribute("data-drawn", "10")
    assert chart.evaluate("each => each.isConnected"), "its curves stay while the next attempt begins"


def test_pause_can_be_undone_and_cancel_asks_first(service: Service, watched: WatchedPage) -> None:
    job, page = queued(service, "chef"), watched.page
    page.goto(service.url)
    page.get_by_role("button", name="Pause").click()
    expect(page.locator("td .state")).to_have_text("paused")
    page.get_by_role("button", name="Undo").click()
    expect(page.locator("td .state")).to_have_text("queued")
    page.goto(f"{service.url}/jobs/{job}")
    page.get_by_role("button", name="Cancel").click()
    page.keyboard.press("Escape")
    assert service.get(f"/jobs/{job}").json()["status"] == "queued"
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Yes").click()
    expect(page.locator("h1 .state")).to_have_text("cancelled")


def test_a_refusal_is_said_and_the_page_shows_what_is_true(service: Service, watched: WatchedPage) -> None:
    watched.expected = ["409"]
    job, page = queued(service, "chef"), watched.page
    page.goto(service.url)
    page.evaluate("document.getElementById('main').dataset.poll = ''")  # it has not heard yet
    service.append(job, JobPaused())
    service.post(f"/jobs/{job}/cancel")
    page.get_by_role("button", name="Pause").click()
    expect(page.locator(".toast.bad")).to_contain_text("there is nothing to pause")
    expect(page.locator("td .state")).to_have_text("cancelled")


def test_the_queue_is_ordered_by_keys_buttons_and_drag(service: Service, watched: WatchedPage) -> None:
    for name in ("one", "two", "three", "four"):
        queued(service, name)
    page = watched.page
    page.goto(service.url)

    def is_now(*expected: str) -> None:
        for place, name in enumerate(expected, start=1):
            expect(page.locator(f"tr[data-waiting='{place}'] td.name > a")).to_have_text(name)

    is_now("one", "two", "three", "four")
    names = page.locator("td.name > a")
    expect(names).to_have_text(["one", "two", "three", "four"])  # as they will run
    page.get_by_role("button", name="Move four up").click()
    expect(names).to_have_text(["one", "two", "four", "three"])
    page.get_by_role("button", name="Undo").click()
    expect(names).to_have_text(["one", "two", "three", "four"])
    page.get_by_role("button", name="Move three up").click()
    is_now("one", "three", "two", "four")
    page.get_by_role("link", name="four").focus()
    page.keyboard.press("Alt+ArrowUp")
    is_now("one", "three", "four", "two")
    page.keyboard.press("Alt+ArrowUp")
    is_now("one", "four", "three", "two")
    page.locator("tr", has_text="two").drag_to(page.locator("tr", has_text="one"))
    is_now("two", "one", "four", "three")
    page.get_by_role("button", name="Move one down").click()
    is_now("two", "four", "one", "three")
    page.locator("tr", has_text="two").drag_to(page.locator("tr", has_text="three"))
    is_now("four", "one", "three", "two")


def test_texts_from_data_are_texts(service: Service, watched: WatchedPage) -> None:
    job = queued(service, "Möhren ½", metadata={"team": HOSTILE, HOSTILE: ODD[:400]})
    service.append(job, STARTED)
    hostile = Sample(input=HOSTILE, target=ODD, generated=HOSTILE + ODD)
    service.append(job, EvaluationFinished(step=0, loss=1.0, rows=1, seconds=1.0, best=True, samples=[hostile]))
    service.run(job).trainer_log.write_text(HOSTILE + "\n")
    page = watched.page
    page.on("dialog", lambda dialog: watched.faults.append(dialog.message))
    page.goto(service.url)
    expect(page.locator(".labels")).to_contain_text(f"team={HOSTILE}")
    for tab in ("overview", "samples", "events", "log", "reproduce"):
        page.set_viewport_size({"width": 390, "height": 800})
        page.goto(f"{service.url}/jobs/{job}?tab={tab}")
        expect(page.locator("main")).to_contain_text("onerror")
        for width in (390, 1280):
            page.set_viewport_size({"width": width, "height": 800})
            wider = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert wider == 0, f"{tab} is {wider} px wider than a window of {width}"
        assert page.locator("img").count() == 0


def test_words_that_announce_a_secret_change_no_page(service: Service, watched: WatchedPage) -> None:
    job, page = (
        queued(service, "chef", data={"train": "rows.jsonl", "input": "{question}\nPassword:", "target": "{a}"}),
        watched.page,
    )
    service.append(job, STARTED)
    said = Sample(input="How do I choose a new password:", target='{"api_key": "abcdefgh12345678"}', generated="Sorry")
    service.append(job, EvaluationFinished(step=0, loss=1.0, rows=1, seconds=1.0, best=True, samples=[said]))
    page.goto(f"{service.url}/jobs/{job}?tab=samples")
    expect(page.locator("table.samples td")).to_have_text([said.input, '{"api_key": "***"}', "Sorry", "Sorry"])
    page.goto(f"{service.url}/new?clone={job}")
    expect(page.locator("[name='data.input']")).to_have_value("{question}\nPassword:")
    expect(page.locator("[name='data.target']")).to_have_count(1)


HIDE = """
Object.defineProperty(document, "hidden", { value: true, configurable: true });
document.dispatchEvent(new Event("visibilitychange"));
"""


def test_any_number_of_tabs_can_be_open(service: Service, watched: WatchedPage) -> None:
    job = queued(service, "chef")
    for _ in range(7):  # a browser has six connections to a service
        page = watched.page.context.new_page()
        page.goto(f"{service.url}/jobs/{job}")
        expect(page.locator("h1 .state")).to_have_text("queued")
        page.evaluate(HIDE)
    service.append(job, STARTED)
    page.evaluate("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
    expect(page.locator("h1 .state")).to_have_text("running")


def test_a_page_of_an_unknown_job_says_so(service: Service, watched: WatchedPage) -> None:
    watched.expected = ["404"]
    answer = watched.page.goto(f"{service.url}/jobs/job-00000000000000000000")
    assert answer is not None and answer.status == 404
    expect(watched.page.get_by_role("heading")).to_have_text("There is no job job-00000000000000000000")


def test_programs_get_what_they_always_got(service: Service) -> None:
    job = service.submit()
    for accept in ("*/*", "application/json", "application/json, text/html", ""):
        answer = service.get(f"/jobs/{job}", headers={"Accept": accept})
        assert answer.headers["Content-Type"] == "application/json", accept
        assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'")
    browsers = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8"
    assert service.get(f"/jobs/{job}", headers={"Accept": browsers}).headers["Content-Type"].startswith("text/html")


def test_jobs_are_found_by_state_label_and_text(service: Service, watched: WatchedPage) -> None:
    queued(service, "Lentils", metadata={"team": "kitchen"})
    service.append(queued(service, "Leeks", metadata={"team": "garden"}), JobPaused())
    service.post("/jobs?dry_run=true", json={"name": "dry", "data": {"train": "rows.jsonl"}})
    page = watched.page
    shown = page.locator("td.name > a")
    for path, expected in {
        "/": ["Lentils", "Leeks"], "/?status=paused": ["Leeks"], "/?label=team%3Dkitchen": ["Lentils"],
        "/?text=lENT": ["Lentils"], "/?text=t5-tiny&status=paused": ["Leeks"],
        "/?dry_run=true": ["Lentils", "dry", "Leeks"],
    }.items():  # fmt: skip
        page.goto(service.url + path)
        expect(shown).to_have_text(expected)
    page.goto(service.url + "/")
    page.get_by_label("Name, model or id").fill("leek")
    page.keyboard.press("Enter")
    expect(shown).to_have_text(["Leeks"])
    page.get_by_role("link", name="team=garden").click()
    expect(shown).to_have_text(["Leeks"])
    page.goto(service.url + "/?label=team")
    page.get_by_text("A label is looked for by key and value").wait_for()


def test_a_filter_that_somebody_writes_stays_while_the_table_is_fetched(service: Service, watched: WatchedPage) -> None:
    queued(service, "Lentils")
    page = watched.page
    page.goto(service.url)
    page.locator("#text").fill("lent")
    page.locator("#label").focus()
    with page.expect_response(lambda answer: answer.url == service.url + "/"):
        pass
    queued(service, "Leeks")
    expect(page.locator("td.name > a")).to_have_text(["Lentils", "Leeks"])
    assert page.locator("#text").input_value() == "lent"


def test_what_runs_and_what_comes_next_is_on_the_first_page(service: Service, watched: WatchedPage) -> None:
    first, _ = queued(service, "first"), queued(service, "second")
    service.append(first, STARTED)
    for number in range(52):
        service.append(service.submit(name=f"later {number}"), JobCancelled())
    page = watched.page
    page.goto(service.url)
    assert page.locator("td.name > a").all_inner_texts()[:3] == ["first", "second", "later 51"]
    page.get_by_role("link", name="Older").click()
    expect(page.locator("td.name > a")).to_have_text(["first", "second", "later 1", "later 0"])
    page.goto(service.url + "/?status=queued")
    expect(page.locator("td.name > a")).to_have_text(["second"])


def test_samples_are_leafed_through_and_an_empty_answer_is_one(service: Service, watched: WatchedPage) -> None:
    job, page = queued(service, "chef"), watched.page
    service.append(job, STARTED)
    for step, said in ((0, ""), (10, "So"), (20, "Sorry")):
        sample = Sample(input="a", target="b", generated=said)
        loss = {0: 3.0, 10: 1.0, 20: 1.5}[step]
        done = EvaluationFinished(step=step, loss=loss, rows=1, seconds=1.0, best=True, samples=[sample])
        service.append(job, done)
    page.goto(f"{service.url}/jobs/{job}")
    expect(page.locator(".figures div", has_text="validation loss")).to_contain_text("1.5000 from 3.0000, best 1.0000")
    page.goto(f"{service.url}/jobs/{job}?tab=samples")
    expect(page.locator("table.samples td")).to_have_text(["a", "b", "(nothing)", "Sorry"])
    page.get_by_role("link", name="Earlier").click()
    expect(page.locator("table.samples td").last).to_have_text("So")
    page.get_by_role("link", name="Earlier").click()
    expect(page.locator("table.samples td").last).to_have_text("(nothing)")
    expect(page.get_by_role("link", name="Earlier")).to_have_count(0)
    page.get_by_role("link", name="Later").click()
    expect(page.locator(".steps b")).to_have_text("step 10")


LOG = "2026-11-28 05:11:31,252 INFO one\n2026-11-28 05:11:32,115 ERROR two\nTraceback\n"


def test_the_log_is_read_searched_and_downloaded(service: Service, watched: WatchedPage) -> None:
    job, page = queued(service, "chef"), watched.page
    service.append(job, STARTED)
    service.run(job).trainer_log.write_text(LOG)
    page.goto(f"{service.url}/jobs/{job}?tab=log")
    expect(page.locator("#log")).to_contain_text("two")
    page.locator("#find").fill("three")
    expect(page.locator("#log")).to_have_text("No line has “three”.")
    page.locator("#follow").uncheck()
    with service.run(job).trainer_log.open("a") as log:
        log.write("three\n")
    expect(page.locator("#log")).to_have_text("three")
    page.locator("#find").fill("")
    page.get_by_label("warnings and errors only").check()
    expect(page.locator("#log")).to_have_text("2026-11-28 05:11:32,115 ERROR two\nTraceback\nthree")
    with page.expect_download() as download:
        page.get_by_role("link", name="Download the last 10,000 lines").click()
    assert download.value.suggested_filename == "chef.log"
    assert download.value.path().read_text() == LOG + "three\n"


def test_what_the_page_says_makes_the_job_again_does(
    service: Service, watched: WatchedPage, tmp_path: Path, data: Path
) -> None:
    service.settings.data.mkdir(exist_ok=True)
    (service.settings.data / "rows.jsonl").write_bytes((data / "rows.jsonl").read_bytes())
    job, page = queued(service, "chef"), watched.page
    page.goto(f"{service.url}/jobs/{job}?tab=reproduce")
    spec, terminal, curl, python = page.locator("pre").all_inner_texts()
    (tmp_path / "job.json").write_text(spec)
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    for command in (["bash", "-ec", terminal], ["bash", "-ec", curl], [sys.executable, "-c", python]):
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
    made = [service.run(each["id"]).spec() for each in service.get("/jobs").json()["data"]]
    assert len(made) == 6 and {spec.name for spec in made} == {"chef"}
    assert [spec.training.seed for spec in made] == [43, 43, 43, 42, 42, 42]


def test_an_address_that_leads_nowhere_is_a_page(service: Service, watched: WatchedPage) -> None:
    watched.expected = ["404", "422"]
    job = service.submit()
    for path in ("/nothing", "/jobs/", "/?status=foo", f"/jobs/{job}?tab=foo", "/?text=" + "x" * 300):
        answer = watched.page.goto(service.url + path)
        assert answer is not None and answer.status in (404, 422), path
        expect(watched.page.get_by_role("heading", level=1)).to_be_visible()
    assert service.get("/nothing").headers["Content-Type"] == "application/json"
