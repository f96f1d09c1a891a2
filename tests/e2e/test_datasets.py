"""A data set that is uploaded is prepared, reported on, and kept while it is needed."""

from __future__ import annotations

import requests

from tests.support.shared_stack import data_of, stop
from tests.support.stack import Stack, tiny_job


def test_an_upload_is_prepared_reported_on_and_kept(stack: Stack) -> None:
    stop(stack, "train")  # the job waits
    # Without their first rows: the report of what was prepared once has the names that it had then.
    content = {
        f"uploaded_{name}": (data_of(stack) / name).read_bytes().partition(b"\n")[2]
        for name in ("rows.jsonl", "held_out.jsonl")
    }
    for name, sent in content.items():
        answer = requests.put(f"{stack.url}/datasets/{name}", data=sent, timeout=60)
        assert answer.status_code == 201, answer.text
    name = next(iter(content))
    train, validation = (uri_of(stack, each) for each in content)
    parts = {"max_input_tokens": 48, "max_target_tokens": 32}
    job = tiny_job(data={"train": train, "validation": validation, **parts})
    run = stack.submit(job)
    assert stack.wait_for_event(run, "job.queued", "job.failed").type == "job.queued"
    assert run.plan().data.train == str(stack.home / "uploads" / name / name)

    address = f"{stack.url}/datasets/{name}"
    dataset = requests.get(address, timeout=60).json()
    assert (dataset["jobs"], dataset["in_use"], dataset["report_job"]) == ([run.id], True, run.id)
    first = dataset["report"]["sources"][0]
    assert (first["name"], first["rows_read"]) == (train, len(content[name].splitlines()))

    refused = requests.delete(address, timeout=60)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "dataset_in_use")
    assert stack.post(run, "cancel").status_code == 200
    assert requests.delete(address, timeout=60).status_code == 200
    gone = requests.post(f"{stack.url}/jobs", json=job, timeout=60)
    assert (gone.status_code, gone.json()["error"]["param"]) == (422, "data.train")


def uri_of(stack: Stack, name: str) -> str:
    """How a job names this data set, as the service says."""
    return str(requests.get(f"{stack.url}/datasets/{name}", timeout=60).json()["uri"])
