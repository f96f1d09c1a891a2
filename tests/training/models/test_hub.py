"""Models on a hub of our own."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from jobs.errors import DiskFull, Rejected, StageError
from tests.training.attempts import same_tensors
from tests.training.hub_server import COMMIT, NAME, Hub, at, running_hub
from tests.training.workplace import Workplace, pairs
from worker.training import store
from worker.training.models import hub
from worker.training.tasks.seq2seq import builtin
from worker.training.tasks.seq2seq.layout import layout_of


@pytest.fixture
def workplace(tmp_path: Path) -> Workplace:
    place = Workplace(tmp_path, offline=False, planned=False)
    place.rows("rows.jsonl", pairs(20))
    return place


@pytest.fixture
def own_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    builtin.build(folder, [text for row in pairs(20) for text in row.values()], seed=1)
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    (folder / "README.md").write_text("a model")
    with running_hub(monkeypatch) as server:
        server.repositories[f"models/{NAME}"] = folder
        yield server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What the hub has of the model."""
    (tmp_path / "hub").mkdir()
    return tmp_path / "hub"


def refusal(workplace: Workplace, model: str) -> StageError:
    with pytest.raises(StageError) as caught:
        workplace.check(workplace.job(model=model))
    assert caught.value.param == "model"
    assert caught.value.hint
    return caught.value


def test_check_resolves_the_commit_and_prepare_fetches_nothing_but_what_is_needed(
    workplace: Workplace, own_hub: Hub, folder: Path
) -> None:
    run = workplace.job(model=NAME)
    result = workplace.check(run)["plan"]
    assert result["parameters"] == layout_of(builtin.CONFIG).parameters
    assert run.plan().model.revision == COMMIT
    assert "model.safetensors" not in own_hub.fetched
    workplace.prepare(run)
    stored = Path(run.plan().model.folder or "")
    assert stored.parent == workplace.settings.models
    assert same_tensors(stored / "model.safetensors", folder / "model.safetensors")
    assert sorted(set(own_hub.fetched)) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"
    ]  # fmt: skip
    assert own_hub.fetched.count("model.safetensors") == 1


def test_what_is_in_the_store_needs_no_hub(workplace: Workplace, own_hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    workplace.prepare(workplace.job(model=NAME))
    at(monkeypatch, "http://127.0.0.1:9")
    for model in (NAME, f"{NAME}@{COMMIT}"):
        run = workplace.job(model=model)
        workplace.prepare(run)
        assert run.plan().model.revision == COMMIT
    assert refusal(workplace, "cooks/another").detail_code == "hub_unreachable"


def test_what_was_converted_needs_not_even_the_download(workplace: Workplace, own_hub: Hub) -> None:
    first = workplace.job(model=NAME)
    workplace.prepare(first)
    assert not list((workplace.settings.models / "hub").rglob("*.safetensors")), "deleted once they were converted"
    sizes = [file.stat().st_size for file in (workplace.settings.models / "hub").rglob("blobs/*")]
    assert sizes and sum(sizes) < Path(str(first.plan().model.folder), "model.safetensors").stat().st_size
    fetched = own_hub.fetched.count("model.safetensors")
    second = workplace.job(model=NAME)
    workplace.prepare(second)
    assert second.plan().model == first.plan().model
    assert own_hub.fetched.count("model.safetensors") == fetched


def test_downloads_are_kept_where_that_is_wanted(workplace: Workplace, own_hub: Hub) -> None:
    workplace.settings = dataclasses.replace(workplace.settings, keep_downloads=True)
    workplace.prepare(workplace.job(model=NAME))
    [weights] = (workplace.settings.models / "hub").rglob("*.safetensors")
    assert weights.exists()


def test_a_damaged_copy_is_made_again_from_a_new_download(workplace: Workplace, own_hub: Hub) -> None:
    first = workplace.job(model=NAME)
    workplace.prepare(first)
    copy = Path(str(first.plan().model.folder), "model.safetensors")
    copy.chmod(0o644)
    copy.unlink()
    second = workplace.job(model=NAME)
    workplace.prepare(second)
    assert copy.exists() and own_hub.fetched.count("model.safetensors") == 2


def test_weights_that_another_commit_shares_stay(workplace: Workplace, own_hub: Hub) -> None:
    workplace.settings = dataclasses.replace(workplace.settings, keep_downloads=True)
    workplace.prepare(workplace.job(model=NAME))
    snapshots = workplace.settings.models / "hub" / f"models--{NAME.replace('/', '--')}" / "snapshots"
    shared = (snapshots / COMMIT / "model.safetensors").resolve()
    (snapshots / "another").mkdir()
    (snapshots / "another" / "model.safetensors").symlink_to(shared)
    hub.delete_weights(NAME, COMMIT, workplace.settings)
    assert shared.exists() and not (snapshots / COMMIT / "model.safetensors").exists()
    hub.delete_weights(NAME, "another", workplace.settings)
    assert not shared.exists()


def test_a_model_that_is_not_what_its_config_says_is_refused_once_it_is_here(
    workplace: Workplace, own_hub: Hub, folder: Path
) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_decoder_layers": 3}))
    run = workplace.job(model=NAME)
    workplace.check(run)  # sees the config only
    with pytest.raises(Rejected, match=r"missing from the weights.*: decoder\.block\.2\.") as caught:
        workplace.prepare(run)
    assert (caught.value.detail_code, caught.value.param) == ("missing_keys", "model")


def test_a_model_with_code_of_its_own_is_refused_at_check(workplace: Workplace, own_hub: Hub, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModel": "modeling.Mine"}}))
    assert refusal(workplace, NAME).detail_code == "remote_code"
    assert "model.safetensors" not in own_hub.fetched


def test_what_the_hub_does_not_have_is_refused(workplace: Workplace, own_hub: Hub, folder: Path) -> None:
    assert refusal(workplace, "cooks/t5-huge").detail_code == "model_not_found"
    error = refusal(workplace, f"{NAME}@nowhere")
    assert error.detail_code == "model_not_found"
    assert "branch, tag or commit" in str(error.hint)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").unlink()
    error = refusal(workplace, NAME)
    assert (error.detail_code, error.reason) == ("no_weights", "rejected")


def test_a_model_without_safetensors_is_converted_from_its_pickle_and_found_again(
    workplace: Workplace, own_hub: Hub, folder: Path
) -> None:
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    parts = {f"pytorch_model-0000{n}-of-00002.bin": names[n - 1 :: 2] for n in (1, 2)}
    for file, part in parts.items():
        torch.save({name: weights[name] for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (folder / "pytorch_model.bin").unlink()
    expected = (folder / "model.safetensors").rename(folder.parent / "expected.safetensors")
    first = workplace.job(model=NAME)
    workplace.prepare(first)
    assert same_tensors(Path(str(first.plan().model.folder), "model.safetensors"), expected)
    assert not list((workplace.settings.models / "hub").rglob("*.bin")), "deleted once they were converted"
    second = workplace.job(model=NAME)
    workplace.prepare(second)
    assert second.plan().model == first.plan().model
    assert own_hub.fetched.count("pytorch_model-00001-of-00002.bin") == 1


def test_a_hub_that_does_not_answer_is_given_up(
    workplace: Workplace, own_hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "LOOKUP_S", 0.5)
    own_hub.delay_s = 3
    assert refusal(workplace, NAME).detail_code == "hub_unreachable"


def test_weights_that_do_not_fit_are_not_fetched(
    workplace: Workplace, own_hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = workplace.job(model=NAME)
    workplace.check(run)
    monkeypatch.setattr(store, "free_bytes", lambda folder: 1 << 20)
    with pytest.raises(DiskFull, match="are free"):
        workplace.prepare(run)
    assert "model.safetensors" not in own_hub.fetched
