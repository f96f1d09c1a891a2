"""Uploads to the hub: a real client, a small hub on loopback; the token is where it belongs and nowhere else."""

from __future__ import annotations

import hashlib
import json
import signal
from collections.abc import Iterator

import huggingface_hub.constants
import pytest

from jobs.attempt import Finished
from jobs.disk.rundir import RunDir
from jobs.export import ExportFormat
from tests.training.adapters.test_adapter_runs import LORA
from tests.training.attempts import attempt
from tests.training.conftest import MakeRun
from tests.training.export.test_export import SHORT, exported, flip
from tests.training.forked import Forked, fork
from tests.training.hub_server import COMMIT, Hub, running_hub
from worker.training.__main__ import main
from worker.training.models.manifest import describe, write_manifest

TOKEN = "hf_plantedPlantedPlantedPlanted"
NAME = "cooks/tuned"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)  # which `push` sets before the import
    with running_hub(monkeypatch) as server:
        server.token = TOKEN
        yield server


def started(run: RunDir, hub: Hub, *more: str, token: str | None = TOKEN) -> Forked:
    """`python -m worker.training push`, with the token in its environment."""
    arguments = ("push", str(run.path), NAME, "--license", "apache-2.0", *more)
    return fork(lambda: main([*arguments]), **({"HF_TOKEN": token} if token else {}))


def pushed(run: RunDir, hub: Hub, *more: str, token: str | None = TOKEN) -> tuple[Finished, str]:
    """Its last line, and what it printed."""
    _, out, err = started(run, hub, *more, token=token).wait()
    last = run.attempt_lines("push")[-1]
    assert isinstance(last, Finished), err
    return last, out + err


def test_a_push_killed_in_the_middle_is_repeated_and_sends_only_what_is_missing(make_run: MakeRun, hub: Hub) -> None:
    run = make_run(**SHORT)
    assert attempt(run) == 0
    files = {file.name: file.read_bytes() for file in run.model.iterdir()}
    weights = hashlib.sha256(files["model.safetensors"]).hexdigest()
    tokenizer = hashlib.sha256(files["tokenizer.json"]).hexdigest()
    hub.stalls_at = weights
    process = started(run, hub)
    assert hub.stalled.wait(120), process.log
    process.send(signal.SIGKILL)
    code, *said = process.wait()
    assert code == -signal.SIGKILL and hub.commits == [], "all of a model or nothing"
    hub.proceed.set()
    hub.objects[tokenizer] = files["tokenizer.json"]  # had come in, or was about to
    sent = len(hub.received)
    last, also_said = pushed(run, hub)
    assert last.reason == "done" and hub.received[sent:] == [weights]
    [commit] = hub.commits
    assert hub.created == {NAME: True}, "private"
    page = commit.pop("README.md").decode()
    assert commit == {name: content for name, content in files.items() if name not in ("README.md", "manifest.json")}
    assert page.startswith("---\nlicense: apache-2.0\nlibrary_name: transformers\n")
    assert "| licence | apache-2.0; of the base model: not known" in page
    for part in ("| data |", "prepared as `", "| rows of ", "| limits |", "## Use", "## Quality", "## Curve"):
        assert part in page
    written = "".join(file.read_text(errors="replace") for file in run.path.rglob("*") if file.is_file())
    for text in (*said, also_said, written, json.dumps([page, *map(str, hub.asked)])):
        assert TOKEN not in text


def test_what_the_hub_refuses_is_said_without_the_token(make_run: MakeRun, hub: Hub) -> None:
    run = make_run(**SHORT)
    assert attempt(run) == 0
    hub.token = "another"
    last, said = pushed(run, hub)
    assert last.error is not None and last.error.code == "hub_refused" and TOKEN not in said + last.error.message
    last, _ = pushed(run, hub, token=None)
    assert last.error is not None and last.error.code == "no_token"
    last, _ = pushed(run, hub, "--export", "gguf")
    assert last.error is not None and last.error.code == "no_export"
    assert hub.commits == [] and hub.created == {}


def test_what_is_not_what_was_delivered_or_verified_is_not_pushed(make_run: MakeRun, hub: Hub) -> None:
    run = make_run(**SHORT)
    assert attempt(run) == 0
    exported(run, ExportFormat.CTRANSLATE2)
    folder = run.path / "exports" / "ctranslate2"
    report = json.loads((folder / "export.json").read_text())
    worse = report["verification"] | {"difference": 1.0}

    def refused(code: str, why: str, *more: str) -> None:
        last, _ = pushed(run, hub, *more)
        assert last.error is not None and last.error.code == code and why in last.error.message
        assert last.error.hint and hub.commits == []

    for changed, why in (
        (report | {"verification": worse}, "differs from the model by 1, and 0.0001 is allowed"),
        (report | {"job": "job-other"}, "export.json is of ctranslate2 of job job-other"),
        ({}, "export.json cannot be read"),
    ):
        (folder / "export.json").write_text(json.dumps(changed))
        refused("export_damaged", why, "--export", "ctranslate2")
    (folder / "export.json").write_text(json.dumps(report))
    flip(folder / "model.bin")
    refused("export_damaged", "the content of model.bin has changed", "--export", "ctranslate2")
    flip(folder / "model.bin")
    (folder / "notes.txt").write_text("mine")
    refused("export_damaged", "notes.txt has been added", "--export", "ctranslate2")
    (folder / "notes.txt").unlink()
    (run.path / "exports").rename(run.path.parent / "elsewhere")
    (run.path / "exports").symlink_to(run.path.parent / "elsewhere")
    refused("no_export", "has no export ctranslate2", "--export", "ctranslate2")
    (run.path / "exports").unlink()
    (run.path.parent / "elsewhere").rename(run.path / "exports")
    flip(run.model / "model.safetensors")
    refused("model_damaged", "the content of model.safetensors has changed")
    last, _ = pushed(run, hub, "--export", "ctranslate2")
    assert last.reason == "done" and "model.bin" in hub.commits[0]


def test_adapters_of_a_local_base_are_pushed_merged_and_of_a_hub_base_as_they_are(make_run: MakeRun, hub: Hub) -> None:
    run = make_run(method=LORA, **SHORT)
    assert attempt(run) == 0
    last, _ = pushed(run, hub)
    assert last.error is not None and last.error.code == "base_is_local" and "--to merged" in (last.error.hint or "")
    exported(run, ExportFormat.MERGED)
    last, _ = pushed(run, hub, "--export", "merged", "--public")
    assert last.reason == "done" and hub.created == {NAME: False}
    assert "model.safetensors" in hub.commits[0] and "adapter_config.json" not in hub.commits[0]
    assert "Exported to merged: transformers" in hub.commits[0]["README.md"].decode()
    # The same adapters, as they are where the base model came from the hub.
    hub.repositories["models/cooks/base"], hub.card_data["models/cooks/base"] = run.model, {"license": "cc-by-4.0"}
    config = run.model / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": "cooks/base"}))
    write_manifest(run.model, describe(run.model))
    plan = run.plan()
    named = plan.model.model_copy(update={"source": "cooks/base", "revision": COMMIT})
    run.write_plan(plan.model_copy(update={"model": named}))
    last, _ = pushed(run, hub)
    assert last.reason == "done" and "adapter_model.safetensors" in hub.commits[1]
    assert "of the base model: cc-by-4.0 |" in hub.commits[1]["README.md"].decode()


def test_adapters_beside_their_merged_model_do_not_tell_where_the_base_was(make_run: MakeRun, hub: Hub) -> None:
    run = make_run(method=LORA | {"merge": True}, **SHORT)
    assert attempt(run) == 0
    last, _ = pushed(run, hub)
    assert last.reason == "done"
    config = json.loads(hub.commits[0]["adapter/adapter_config.json"])
    kept = json.loads((run.model / "adapter" / "adapter_config.json").read_text())
    assert config == kept | {"base_model_name_or_path": "x"}
    assert not [name for name, content in hub.commits[0].items() if str(run.path.parent.parent).encode() in content]
