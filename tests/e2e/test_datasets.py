"""A data set that is uploaded is prepared, reported on, and kept while it is needed."""

from __future__ import annotations

from pathlib import Path

import requests

from tests.stack import Stack, tiny_job


def test_an_upload_is_prepared_reported_on_and_kept(tmp_path: Path, data: Path) -> None:
    with Stack(tmp_path / "home", data=data) as stack:
        stack.start("service", "check", "prepare")
        names = ("rows.jsonl", "held_out.jsonl")
        for name in names:
            with open(data / name, "rb") as file:
                answer = requests.put(f"{stack.url}/datasets/{name}", data=file, timeout=10)
            assert answer.status_code == 201, answer.text
        job = tiny_job()
        parts = {"max_input_tokens": 48, "max_target_tokens": 32}
        rows = {"train": uri_of(stack, names[0]), "validation": uri_of(stack, names[1])}
        run = stack.submit({**job, "data": {**parts, **rows}})
        assert stack.wait_for_event(run, "job.queued", "job.failed").type == "job.queued"
        assert run.plan().data.train == str(tmp_path / "home" / "uploads" / names[0] / names[0])

        lines = len((data / names[0]).read_text().splitlines())
        dataset = requests.get(f"{stack.url}/datasets/{names[0]}", timeout=10).json()
        assert (dataset["jobs"], dataset["in_use"], dataset["report_job"]) == ([run.id], True, run.id)
        first = dataset["report"]["sources"][0]
        assert (first["name"], first["rows_read"]) == (rows["train"], lines)

        address = f"{stack.url}/datasets/{names[0]}"
        refused = requests.delete(address, timeout=10)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "dataset_in_use")
        assert stack.post(run, "cancel").status_code == 200
        assert requests.delete(address, timeout=10).status_code == 200
        gone = requests.post(f"{stack.url}/jobs", json={**job, "data": {**parts, **rows}}, timeout=10)
        assert (gone.status_code, gone.json()["error"]["param"]) == (422, "data.train")


def uri_of(stack: Stack, name: str) -> str:
    """How a job names this data set, as the service says."""
    return str(requests.get(f"{stack.url}/datasets/{name}", timeout=10).json()["uri"])
