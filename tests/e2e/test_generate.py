"""Trying finished models through the service: whole, streamed, by OpenAI's client, in turns, when a part is gone."""

from __future__ import annotations

import http.client
import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import openai
import pytest
import requests

from jobs.disk.rundir import RunDir
from jobs.redis.connection import connect
from longhaul import ApiError, Longhaul
from longhaul.main import main
from tests.support.processes import children
from tests.support.shared_stack import data_of, mended, stop, succeeds
from tests.support.stack import ROOT, Stack, tiny_job, warm_of_all_tests

CHATS = [
    {"messages": [{"role": "user", "content": f"What is in pot {n}, {word} or not?"},
                  {"role": "assistant", "content": f"There is {word} in it."}]}
    for n in range(16) for word in ("bread", "soup", "cake")
]  # fmt: skip
ROW = {"title": "Roasted Peach Ice Cream", "ingredients": ["peach", "cream"]}
LONG = {
    "rows": [{"title": f"Peach Ice Cream {n}", "ingredients": ["peach", "cream"]} for n in range(64)],
    "temperature": 2.0,
    "seed": 0,
    "max_new_tokens": 4000,
}
"""So many that some of them are long, whatever a machine makes of a seed."""


class AskedPlace:
    """A stack with a T5 and a chat model that were trained, and the worker `generate`."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        (data_of(stack) / "chats.jsonl").write_text("".join(json.dumps(c) + "\n" for c in CHATS))
        chat = {"name": "asked-chat", "model": "builtin:qwen-tiny", "data": {"train": "chats.jsonl", "validation": 0.2}}
        unobserved = {"integrations": {"wandb": None}}
        training = {"epochs": 4, "batch_size": 8, "learning_rate": 0.01}
        self.t5 = stack.submit(tiny_job(name="asked", **unobserved))
        self.chat = stack.submit(chat | {"training": training, **unobserved})
        succeeds(stack, self.t5, self.chat)

    def post(self, run: RunDir, body: Any, **options: Any) -> requests.Response:
        return requests.post(f"{self.stack.url}/jobs/{run.id}/generate", json=body, timeout=300, **options)

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.stack.url}/v1", api_key="none is needed here", max_retries=0)

    def model_processes(self) -> list[int]:
        """What the warm process has forked and takes only idle time of the CPU (tests/support/never_idle)."""
        forked = ((pid, Path(f"/proc/{pid}/comm")) for pid in children(warm_of_all_tests().pid))
        return [pid for pid, comm in forked if comm.exists() and comm.read_text() == f"policy {os.SCHED_IDLE}\n"]

    def model_process(self) -> int:
        [child] = self.model_processes()
        return child

    def kill_model(self) -> None:
        """It may be dead already."""
        for child in self.model_processes():
            os.kill(child, signal.SIGKILL)


@pytest.fixture(scope="module")
def place(package_stack: Stack) -> Iterator[AskedPlace]:
    stack = mended(package_stack)
    place = AskedPlace(stack)
    refused = place.post(place.t5, {"input": "x"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_worker")
    stack.start("generate")
    stack.wait_for(lambda: place.post(place.t5, {"input": "x"}).status_code == 200 or None, "the worker generate")
    yield place
    stop(stack, "generate")


def events_of(answer: requests.Response) -> list[tuple[str, dict[str, Any]]]:
    """Of a stream of server-sent events."""
    blocks = [block for block in answer.content.decode().split("\n\n") if block and not block.startswith(":")]
    parts = [dict(line.split(": ", 1) for line in block.splitlines()) for block in blocks]
    return [(part["event"], json.loads(part["data"])) for part in parts]


def test_an_answer_streamed_is_the_answer_whole(place: AskedPlace) -> None:
    whole = place.post(place.t5, {"row": ROW, "base": True}).json()
    events = events_of(place.post(place.t5, {"row": ROW, "base": True, "stream": True}))
    assert events[-1][0] == "done"
    assert events[-1][1]["outputs"] == whole["outputs"]
    tuned, base = whole["outputs"]
    for output in (tuned, base):
        pieces = [each["text"] for name, each in events if name == "text" and each["model"] == output["model"]]
        assert "".join(pieces) == output["text"]
    assert (tuned["model"], base["model"]) == ("trained", "base")
    assert (whole["device"], whole["why"]) == ("cpu", "this box uses no GPU")
    process = place.model_process()
    assert os.getsid(process) == os.getsid(place.stack.processes["generate"].pid) != process
    assert whole["tokens_per_s"] > 0


def test_openais_client_talks_to_it(place: AskedPlace) -> None:
    client = place.openai()
    listed = [model.id for model in client.models.list() if place.chat.id in model.id or place.t5.id in model.id]
    assert listed == [f"ft:{place.chat.id}", f"ft:{place.t5.id}"]
    assert client.models.retrieve("ft:asked-chat").id == f"ft:{place.chat.id}"
    messages: Any = CHATS[1]["messages"][:1]
    reply = client.chat.completions.create(model="ft:asked-chat", messages=messages)
    ours = place.post(place.chat, {"messages": messages}).json()["outputs"][0]
    assert reply.choices[0].message.content == ours["text"]
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None and reply.usage.completion_tokens == ours["tokens"]
    stream = client.chat.completions.create(
        model=f"ft:{place.chat.id}", messages=messages, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ours["text"]
    assert chunks[-1].usage == reply.usage
    t5 = client.chat.completions.create(model="ft:asked", messages=[{"role": "user", "content": "Peach Ice Cream"}])
    assert (
        t5.choices[0].message.content == place.post(place.t5, {"input": "Peach Ice Cream"}).json()["outputs"][0]["text"]
    )
    with pytest.raises(openai.NotFoundError, match="there is no model"):
        client.chat.completions.create(model="ft:nobody", messages=messages)
    with pytest.raises(openai.UnprocessableEntityError, match="n: "):
        client.chat.completions.create(model="ft:asked-chat", messages=messages, n=2)
    with pytest.raises(openai.UnprocessableEntityError, match="named by its step") as refused:
        client.chat.completions.create(model="ft:asked-chat/newest", messages=messages)
    assert refused.value.param == "model"


def test_twenty_people_at_once_take_turns(place: AskedPlace) -> None:
    """Each from an address of its own; the first has asked eight times before the others come."""
    order: list[str] = []
    answered = threading.Lock()

    def person(number: int) -> None:
        connection = http.client.HTTPConnection(
            "127.0.0.1", place.stack.port, timeout=300, source_address=(f"127.0.0.{number}", 0)
        )
        body = json.dumps({"input": "x", "max_new_tokens": 2})
        connection.request("POST", f"/jobs/{place.t5.id}/generate", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        with answered:
            order.append(f"person {number}")
        connection.close()

    ahead = place.post(place.t5, LONG | {"stream": True}, stream=True)  # nobody's turn comes while this is answered
    with ahead, connect(place.stack.redis.url) as client:
        assert any(line == b"event: text" for line in ahead.iter_lines())
        model = place.model_process()
        os.kill(model, signal.SIGSTOP)
        first = [threading.Thread(target=person, args=(2,)) for _ in range(8)]
        for thread in first:
            thread.start()

        def wait_for(number: int, count: int) -> None:
            key = f"longhaul:requests:generate:of:127.0.0.{number}"
            place.stack.wait_for(lambda: int(cast(int, client.llen(key))) == count or None, f"the queue {key}")

        wait_for(2, 8)
        others = [threading.Thread(target=person, args=(number,)) for number in range(3, 22)]
        for thread in others:
            thread.start()
        for number in range(3, 22):
            wait_for(number, 1)
        ahead.close()
        os.kill(model, signal.SIGCONT)
        for thread in (*first, *others):
            thread.join()
    assert len(order) == 27
    # One turn each, then the rest of the first; who hears of an answer a moment earlier is for the threads to say.
    assert order[:18].count("person 2") <= 2 and order[-6:].count("person 2") >= 4, order


def test_a_model_killed_in_the_middle_fails_one_answer_and_nothing_else(place: AskedPlace) -> None:
    stack = place.stack
    training = stack.submit(tiny_job(name="beside", training={"epochs": 6, "batch_size": 8, "learning_rate": 0.003}))
    stack.wait_for_event(training, "attempt.started")
    with place.post(place.t5, LONG | {"stream": True}, stream=True) as answer:
        lines = answer.iter_lines()
        assert any(line == b"event: text" for line in lines)
        os.kill(place.model_process(), signal.SIGKILL)
        rest = b"\n".join(lines)
    assert b"event: error" in rest and b"model_process_ended" in rest and b"signal 9" in rest
    assert place.post(place.t5, {"row": ROW}).status_code == 200, "it started anew"
    succeeds(stack, training)
    assert training.record().attempt == 1
    assert all(process.poll() is None for process in stack.processes.values())


def test_whoever_leaves_gives_the_request_up_and_the_model_stays(place: AskedPlace) -> None:
    with place.post(place.t5, LONG | {"stream": True}, stream=True) as answer:
        assert any(line == b"event: text" for line in answer.iter_lines())
        process = place.model_process()
    log = place.stack.home / "generate.log"
    place.stack.wait_for(lambda: "was given up" in log.read_text() or None, "the request to be given up")
    assert place.post(place.t5, {"row": ROW}).json()["loading_s"] < 1
    assert place.model_process() == process
    with connect(place.stack.redis.url) as client:
        assert client.keys("longhaul:requests:generate:of:*") == []


def test_a_request_that_waits_is_told_when_the_worker_is_gone(place: AskedPlace) -> None:
    answers: list[requests.Response] = []
    with place.post(place.t5, LONG | {"stream": True}, stream=True) as ahead, connect(place.stack.redis.url) as client:
        lines = ahead.iter_lines()
        assert any(line == b"event: text" for line in lines)
        waiting = threading.Thread(target=lambda: answers.append(place.post(place.t5, {"input": "x"})))
        waiting.start()
        place.stack.wait_for(lambda: client.keys("longhaul:requests:generate:of:*") or None, "a request that waits")
        place.stack.kill("generate")
        waiting.join()
        rest = b"\n".join(lines)
    [answer] = answers
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (503, "no_worker")
    assert "python -m worker generate" in error["hint"]
    assert b"event: error" in rest and b"request_lost" in rest
    place.stack.start("generate")
    place.stack.wait_for(lambda: place.post(place.t5, {"input": "x"}).status_code == 200 or None, "the worker generate")


def test_mistakes_are_answered_in_the_one_shape(place: AskedPlace) -> None:
    for run, body, status, code in (
        (place.t5, {}, 422, "invalid_value"),
        (place.t5, {"input": "x", "row": {}}, 422, "invalid_value"),
        (place.t5, {"input": "x", "temperatur": 1}, 422, "invalid_value"),
        (place.t5, {"row": {"other": "x"}}, 422, "bad_input"),
        (place.t5, {"input": "x", "checkpoint": "step-00009999"}, 409, "no_checkpoint"),
        (RunDir("job-none"), {"input": "x"}, 404, "not_found"),
    ):
        answer = place.post(run, body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text


@dataclass(frozen=True)
class EndedCommand:
    """A command that has ended."""

    returncode: int
    stdout: str
    stderr: str


def longhaul(place: AskedPlace, *words: str, input: str | None = None) -> EndedCommand:
    """The command, in this process: its start takes longer than what it does."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setenv("LONGHAUL_URL", place.stack.url)
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO((input or "").encode())))
        try:
            code = main(words)
        except SystemExit as left:  # of argparse
            code = int(left.code or 0)
        return EndedCommand(code, out.getvalue(), err.getvalue())


def test_try_prints_what_the_model_writes_and_says_where_it_ran(place: AskedPlace) -> None:
    [ours] = place.post(place.t5, {"row": ROW}).json()["outputs"]
    for words, given in (
        (["--row", json.dumps(ROW)], None), ([ours["input"]], None), (["-"], ours["input"]),
        ([], ours["input"]),
    ):  # fmt: skip
        done = longhaul(place, "try", "asked", *words, input=given)
        assert (done.returncode, done.stdout) == (0, ours["text"] + "\n"), done.stderr
        assert "on the CPU (this box uses no GPU), " in done.stderr and "tokens/s" in done.stderr
    both = longhaul(place, "try", "asked", "--row", json.dumps(ROW), "--base")
    assert both.stdout.startswith(f"after training:\n{ours['text']}\n\nbefore training:\n")
    assert json.loads(longhaul(place, "try", "asked", "x", "--json").stdout)["object"] == "generation"
    wrong = longhaul(place, "try", "asked")
    assert wrong.returncode == 2 and "give one of a text, --file and --row" in wrong.stderr


@pytest.mark.parametrize(
    ("options", "body"),
    [
        (["--max-new-tokens", "3"], {"max_new_tokens": 3}),
        (["--temperature", "1.5", "--seed", "0"], {"temperature": 1.5, "seed": 0}),
        (
            ["--temperature", "2", "--top-p", "0.9", "--top-k", "3", "--seed", "5"],
            {"temperature": 2, "top_p": 0.9, "top_k": 3, "seed": 5},
        ),
        (["--num-beams", "3", "--checkpoint", "last"], {"num_beams": 3, "checkpoint": "last"}),
        (["--num-beams", "3", "--base"], {"num_beams": 3, "base": True}),
    ],
)
def test_options_of_the_command_are_those_of_the_route(
    place: AskedPlace, tmp_path: Path, options: list[str], body: dict[str, Any]
) -> None:
    answer = place.post(place.t5, {"row": ROW} | body).json()
    whole = json.loads(longhaul(place, "try", "asked", "--row", json.dumps(ROW), *options, "--json").stdout)
    assert (whole["outputs"], whole["seed"]) == (answer["outputs"], body.get("seed"))
    shown = longhaul(place, "try", "asked", "--row", json.dumps(ROW), *options)
    assert shown.returncode == 0 and all(output["text"] in shown.stdout for output in answer["outputs"]), shown.stderr
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    longhaul(place, "predict", "asked", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "out.jsonl"), *options)
    assert json.loads((tmp_path / "out.jsonl").read_text())["text"] == answer["outputs"][0]["text"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--max-new-tokens", "0"], "greater than or equal to 1 (got 0)"),
        (["--num-beams", "0"], "greater than or equal to 1 (got 0)"),
        (["--num-beams", "2", "--temperature", "1"], "num_beams above 1 goes with neither stream nor temperature"),
        (["--top-p", "0.5"], "--top-p goes with --temperature"),
        (["--top-k", "0", "--temperature", "0"], "--top-k goes with --temperature"),
        (["--seed", "0"], "--seed goes with --temperature"),
    ],
)
def test_an_option_that_cannot_be_is_refused_and_leaves_no_file(
    place: AskedPlace, tmp_path: Path, options: list[str], said: str
) -> None:
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    rows.write_text(json.dumps(ROW) + "\n")
    for words in (["try", "asked", "x"], ["predict", "asked", str(rows), "--out", str(out)]):
        refused = longhaul(place, *words, *options)
        assert refused.returncode == 2 and said in " ".join(refused.stderr.split()), (words, refused.stderr)
    assert [file.name for file in tmp_path.iterdir()] == ["rows.jsonl"]
    assert longhaul(place, "predict", "asked", str(rows), "--out", str(out)).returncode == 0


def test_python_gets_the_status_of_an_error_in_the_middle(place: AskedPlace) -> None:
    def kill_once_it_writes(type: str, _: object) -> None:
        if type == "text":
            place.kill_model()

    with Longhaul(place.stack.url) as api:
        for body, status, code in (({"row": {"other": "x"}}, 422, "bad_input"), (LONG, 503, "model_process_ended")):
            with pytest.raises(ApiError) as refused:
                api.generate(place.t5.id, body, on_part=kill_once_it_writes)
            assert (refused.value.status, refused.value.code) == (status, code)


def test_predict_that_was_killed_ends_with_the_same_file(place: AskedPlace, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    lines = (ROOT / "examples" / "recipes.jsonl").read_text().splitlines()[:40]
    rows.write_text("\n".join([*lines, json.dumps({"other": "no recipe"})]) + "\n")
    sampling = ("--temperature", "1", "--seed", "7")
    whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    done = longhaul(place, "predict", "asked", str(rows), "--out", str(whole), *sampling)
    assert done.returncode == 0, done.stderr
    written = [json.loads(line) for line in whole.read_text().splitlines()]
    assert [each["row"] for each in written] == list(range(41))
    assert written[40]["error"].startswith("missing ") and "text" in written[0]
    words = [sys.executable, "-m", "longhaul.main", "predict", "asked", str(rows), "--out", str(broken), *sampling]
    environment = {"PATH": os.environ["PATH"], "LONGHAUL_URL": place.stack.url}
    with subprocess.Popen(words, cwd=ROOT, env=environment) as process:
        place.stack.wait_for(lambda: (broken.exists() and broken.stat().st_size) or None, "the first rows")
        process.kill()
    kept = broken.read_bytes()
    broken.write_bytes(kept[:-5])  # a line that was being written
    other = longhaul(place, "predict", "asked", str(rows), "--out", str(broken), "--temperature", "1", "--seed", "8")
    assert other.returncode == 2 and "was begun with another job, other rows or other options" in other.stderr
    again = longhaul(place, "predict", "asked", str(rows), "--out", str(broken), *sampling)
    assert again.returncode == 0, again.stderr
    assert broken.read_bytes() == whole.read_bytes()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["broken.jsonl", "rows.jsonl", "whole.jsonl"]
    refused = longhaul(place, "predict", "asked", str(rows), "--out", str(whole), *sampling)
    assert refused.returncode == 2 and "is there already" in refused.stderr


def test_rows_larger_than_a_pipe_are_answered_while_the_model_loads(place: AskedPlace) -> None:
    assert place.post(place.chat, {"input": "x"}).status_code == 200, "another model is loaded"
    rows = [ROW | {"title": f"Peach {n} " + "ice cream " * 300} for n in range(64)]
    answer = place.post(place.t5, {"rows": rows, "max_new_tokens": 2})
    assert answer.status_code == 200, answer.text
    assert [each["index"] for each in answer.json()["outputs"]] == list(range(64))
    assert answer.json()["loading_s"] > 0
