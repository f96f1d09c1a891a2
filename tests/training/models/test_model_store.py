"""The model store: whatever a model comes as, one folder of bf16, made once."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from jobs.attempt import Heartbeat
from jobs.errors import DiskFull, NotPrepared, Rejected
from jobs.plan import ModelPlan
from tests.training.attempts import attempt, same_tensors
from tests.training.conftest import tiny_model
from tests.training.stepping import Noting
from tests.training.workplace import Workplace, pairs
from worker.training import store
from worker.training.journal import Journal
from worker.training.models import model_store
from worker.training.models.model_store import damage, stored_model
from worker.training.network.model import load
from worker.training.tasks.seq2seq.layout import ALIASES, EMBEDDING, HEAD, UNUSED
from worker.training.tasks.seq2seq.task import Seq2Seq

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def workplace(tmp_path: Path, model_folder: Path) -> Workplace:
    """With the model folder `tiny` in its data."""
    place = Workplace(tmp_path, planned=False)
    place.rows("rows.jsonl", pairs(20))
    shutil.move(model_folder, place.data / "tiny")
    return place


def source_of(workplace: Workplace) -> Path:
    return workplace.data / "tiny"


def originals(*, tied: bool = False) -> Tensors:
    """Random fp32 weights that bf16 cannot hold exactly, each tensor once."""
    tensors = {name: tensor.clone() for name, tensor in tiny_model(seed=7).state_dict().items() if name not in ALIASES}
    if tied:
        del tensors[HEAD]
    return tensors


def write_source(folder: Path, tensors: Tensors, *, shards: int = 1, tied: bool = False) -> None:
    for old in folder.glob("*.safetensors*"):
        old.unlink()
    config = json.loads((folder / "config.json").read_text())
    config |= {"torch_dtype": "float32", "tie_word_embeddings": tied}
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(tensors.items())[shard::shards])
        save_file(part, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def prepared(workplace: Workplace, **parts: Any) -> Path:
    run = workplace.job(model="./tiny", **parts)
    workplace.prepare(run)
    return Path(run.plan().model.folder or "")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_every_source_becomes_one_file_of_bf16(
    workplace: Workplace, dtype: torch.dtype, shards: int, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_store, "PIECE", 512)  # so that tensors come in several pieces, the last one short
    tensors = {name: tensor.to(dtype) for name, tensor in originals(tied=tied).items()}
    write_source(source_of(workplace), tensors, shards=shards, tied=tied)
    folder = prepared(workplace)

    assert folder.parent == workplace.settings.models
    files = {file.name for file in folder.iterdir()}
    small = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert files == small | {"model.safetensors", "manifest.json"}
    made = load_file(folder / "model.safetensors")
    assert made.keys() == tensors.keys()
    assert all(torch.equal(made[name], tensor.to(torch.bfloat16)) for name, tensor in tensors.items())
    config = json.loads((folder / "config.json").read_text())
    assert (config["dtype"], config["tie_word_embeddings"], "torch_dtype" in config) == ("bfloat16", tied, False)
    model = load(folder, CPU, task=Seq2Seq(), dropout=None, fused=True, activation_checkpointing=0).model
    assert (model.get_parameter(HEAD) is model.get_parameter(EMBEDDING)) is tied
    assert damage(folder, Seq2Seq(), thorough=True) is None


def test_fp32_is_rounded_as_torch_rounds(workplace: Workplace) -> None:
    tensors = originals()
    odd = torch.tensor([1.00390625, 1.01171875, -0.0, 1e-45, 3.38e38, -1.0])
    tensors[EMBEDDING].view(-1)[: len(odd)] = odd
    write_source(source_of(workplace), tensors)
    made = load_file(prepared(workplace) / "model.safetensors")[EMBEDDING]
    assert torch.equal(made.view(torch.int16), tensors[EMBEDDING].to(torch.bfloat16).view(torch.int16))


def test_what_the_first_t5s_have_beside_their_weights_is_left_out(workplace: Workplace) -> None:
    tensors = originals(tied=True)
    more = {name: tensors[EMBEDDING].clone() for name in (*ALIASES, HEAD)} | {name: torch.zeros(4) for name in UNUSED}
    write_source(source_of(workplace), tensors | more, tied=True)
    assert load_file(prepared(workplace) / "model.safetensors").keys() == tensors.keys()
    only_alias = tensors | {ALIASES[0]: tensors[EMBEDDING].clone()}
    del only_alias[EMBEDDING]
    write_source(source_of(workplace), only_alias, tied=True)
    made = load_file(prepared(workplace) / "model.safetensors")
    assert torch.equal(made[EMBEDDING], tensors[EMBEDDING].to(torch.bfloat16))


def test_a_model_is_stored_once_and_found_by_content(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    write_source(source_of(workplace), originals(), shards=2)
    first = prepared(workplace)
    made = (first / "model.safetensors").stat().st_mtime_ns
    shutil.copytree(source_of(workplace), workplace.data / "copy")
    for name in ("./tiny", "./copy"):
        run = workplace.job(model=name)
        workplace.prepare(run)
        assert run.plan().model.folder == str(first)
    assert (first / "model.safetensors").stat().st_mtime_ns == made

    before = (first / "model.safetensors").read_bytes()
    write_source(source_of(workplace), {name: tensor + 1 for name, tensor in originals().items()})
    other = prepared(workplace)
    assert other != first
    assert (first / "model.safetensors").read_bytes() == before

    monkeypatch.setattr(model_store, "VERSION", model_store.VERSION + 1)
    assert prepared(workplace) not in (first, other)


def test_a_damaged_copy_is_made_anew(workplace: Workplace) -> None:
    folder = prepared(workplace)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-2])
    assert "bytes, not" in str(damage(folder, Seq2Seq()))
    assert prepared(workplace) == folder
    assert (folder / "model.safetensors").read_bytes() == whole

    (folder / "model.safetensors").write_bytes(whole[:-2] + b"xy")
    assert damage(folder, Seq2Seq()) is None  # sizes and header are as they should be
    assert "its sha256 has changed" in str(damage(folder, Seq2Seq(), thorough=True))
    (folder / "manifest.json").unlink()
    assert damage(folder, Seq2Seq()) is not None
    assert prepared(workplace) == folder
    assert damage(folder, Seq2Seq(), thorough=True) is None


@pytest.mark.parametrize("gone", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_copy_that_lacks_a_file_sends_the_job_back_to_prepare(workplace: Workplace, gone: str) -> None:
    run = workplace.job(training={"epochs": 1})
    workplace.prepare(run)
    folder = Path(run.plan().model.folder or "")
    (folder / gone).unlink()
    with pytest.raises(NotPrepared, match=gone):
        attempt(run)
    workplace.prepare(run)
    assert damage(folder, Seq2Seq(), thorough=True) is None
    assert attempt(run, 2) == 0


@pytest.mark.parametrize("store", ["model", "data"])
def test_a_flipped_bit_in_a_store_sends_the_job_back_to_prepare(workplace: Workplace, store: str) -> None:
    undisturbed, run = (workplace.job(training={"epochs": 1}) for _ in range(2))
    for each in (undisturbed, run):
        workplace.prepare(each)
    assert attempt(undisturbed) == 0
    plan = run.plan()
    file = {
        "model": Path(plan.model.folder or "") / "model.safetensors",
        "data": Path(plan.data.prepared or "") / "target.tokens",
    }[store]
    whole = file.read_bytes()
    file.chmod(0o644)
    file.write_bytes(whole[:-2] + bytes([whole[-2] ^ 1]) + whole[-1:])
    with pytest.raises(NotPrepared, match=f"{file.name} has changed"):
        attempt(run)
    workplace.prepare(run)
    assert file.read_bytes() == whole
    assert attempt(run, 2) == 0
    assert same_tensors(run.model / "model.safetensors", undisturbed.model / "model.safetensors")


def test_a_built_in_model_has_a_manifest_too(workplace: Workplace) -> None:
    run = workplace.job()
    workplace.prepare(run)
    assert damage(Path(run.plan().model.folder or ""), Seq2Seq(), thorough=True) is None


def test_a_model_that_does_not_fit_is_not_begun(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    run = workplace.job(model="./tiny")
    workplace.check(run)
    monkeypatch.setattr(store, "free_bytes", lambda folder: 1 << 20)
    with pytest.raises(
        DiskFull, match=r"\./tiny \(copy in bfloat16\) needs \d+ KiB .* besides 1\.0 GiB .* 1,024 KiB are free"
    ) as caught:
        workplace.prepare(run)
    assert caught.value.hint
    assert [path.name for path in workplace.settings.models.iterdir()] == [".locks"]


def test_a_folder_that_changes_while_it_is_copied_is_refused(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = workplace.job(model="./tiny")
    workplace.check(run)
    convert = model_store.convert

    def disturbed(source: Path, *arguments: Any) -> None:
        convert(source, *arguments)
        (source / "tokenizer_config.json").write_text("{}")

    monkeypatch.setattr(model_store, "convert", disturbed)
    with pytest.raises(Rejected, match="changed while it was copied") as caught:
        workplace.prepare(run)
    assert caught.value.detail_code == "model_changed"
    assert [path.name for path in workplace.settings.models.iterdir()] == [".locks"]


def test_progress_is_told_while_it_is_written(workplace: Workplace, tmp_path: Path) -> None:
    clock = iter(range(10_000))
    journal = Journal(tmp_path / "told.jsonl", clock=lambda: float(next(clock) * 6))
    journal.phase("prepare")
    stored_model(ModelPlan(source="./tiny", parameters=1), workplace.settings, Seq2Seq(), journal)
    lines = [json.loads(line) for line in (tmp_path / "told.jsonl").read_text().splitlines()]
    told = [Heartbeat.model_validate(line).progress for line in lines]
    fractions = [fraction for fraction in told if fraction is not None]
    assert fractions == sorted(fractions)
    assert len(fractions) == len(load_file(source_of(workplace) / "model.safetensors"))
    assert fractions[-1] == 1.0


# -- float16 ----------------------------------------------------------------------------------------------------------


def in_float16(workplace: Workplace, noting: Noting) -> Path:
    plan = ModelPlan(source="./tiny", parameters=sum(each.numel() for each in originals().values()))
    return stored_model(plan, workplace.settings, Seq2Seq(), noting, dtype="float16")


def test_floats_of_any_type_become_float16_and_what_is_float16_stays_as_it_is(
    workplace: Workplace, noting: Noting
) -> None:
    tensors = originals()
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        write_source(source_of(workplace), {name: each.to(dtype) for name, each in tensors.items()})
        folder = in_float16(workplace, noting)
        stored = load_file(folder / "model.safetensors")
        assert all(torch.equal(stored[name], each.to(dtype).half()) for name, each in tensors.items())
        assert json.loads((folder / "config.json").read_text())["dtype"] == "float16"
        assert model_store.underflow(folder) == {}
        assert damage(folder, Seq2Seq(), thorough=True) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("broken", [math.nan, -math.inf])
def test_weights_that_are_not_finite_are_refused_by_name_in_every_type(
    workplace: Workplace, noting: Noting, dtype: torch.dtype, broken: float
) -> None:
    tensors = originals()
    tensors[EMBEDDING][3, 4:6] = broken
    write_source(source_of(workplace), {name: each.to(dtype) for name, each in tensors.items()})
    plan = ModelPlan(source="./tiny", parameters=sum(each.numel() for each in tensors.values()))
    with pytest.raises(Rejected) as caught:
        stored_model(plan, workplace.settings, Seq2Seq(), noting, dtype="bfloat16")
    assert (caught.value.detail_code, caught.value.param) == ("weights_not_finite", "model")
    assert f"have values that are NaN, or infinite in bfloat16: {EMBEDDING} (2 values)" in str(caught.value)


def test_weights_beyond_float16_are_refused_by_name_and_nothing_is_stored(workplace: Workplace, noting: Noting) -> None:
    tensors = originals()
    tensors[EMBEDDING][3, 4], tensors[HEAD][0, 0], tensors[HEAD][0, 1] = 65_520.0, -7e4, 1e30
    write_source(source_of(workplace), tensors)
    with pytest.raises(Rejected) as caught:
        in_float16(workplace, noting)
    assert caught.value.detail_code == "weights_overflow" and "method.base_dtype: bfloat16" in str(caught.value.hint)
    message = str(caught.value)
    assert message.startswith("2 tensors of ./tiny have values beyond 65,504, the largest of float16: ")
    assert f"{EMBEDDING} (up to 65,520)" in message
    assert not list(workplace.settings.models.glob("*/model.safetensors"))
    tensors[EMBEDDING][3, 4], tensors[HEAD][0, 0], tensors[HEAD][0, 1] = 65_519.0, -65_504.0, 1.0
    write_source(source_of(workplace), tensors)
    assert load_file(in_float16(workplace, noting) / "model.safetensors")[EMBEDDING][3, 4] == 65_504.0


def test_weights_below_float16_become_0_and_are_counted_by_name(workplace: Workplace, noting: Noting) -> None:
    tensors = originals()
    tensors[EMBEDDING][3, :5] = torch.tensor([1e-8, -2.9e-8, 3.1e-8, 0.0, 6e-8])
    write_source(source_of(workplace), {name: each.bfloat16() for name, each in tensors.items()})
    folder = in_float16(workplace, noting)
    assert load_file(folder / "model.safetensors")[EMBEDDING][3, :5].tolist() == [0, 0, 2**-24, 0, 2**-24]
    assert model_store.underflow(folder) == {EMBEDDING: 2}
