"""Every guard: model folders with one thing wrong in them, taken through check, prepare and train."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM

from jobs.errors import GpuLost, NotPrepared, Rejected
from tests.training.attempts import attempt, finished
from tests.training.conftest import MakeRun
from tests.training.forked import stage
from tests.training.models.test_pickles import Program
from tests.training.threaded_loads import threaded_loads
from tests.training.workplace import Workplace, pairs
from worker.training.journal import Journal
from worker.training.network import guards
from worker.training.network.model import LoadedModel, load
from worker.training.prepare import prepare
from worker.training.tasks.seq2seq.layout import layout_of
from worker.training.tasks.seq2seq.task import Seq2Seq

CPU = torch.device("cpu")
NORM = "encoder.final_layer_norm.weight"
QUERY = "encoder.block.0.layer.0.SelfAttention.q.weight"


def load_plainly(folder: Path) -> LoadedModel:
    return load(folder, CPU, task=Seq2Seq(), dropout=None, fused=True, activation_checkpointing=0)


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def change_config(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def damage_config(**values: object) -> Callable[[Path], None]:
    return lambda folder: change_config(folder, **values)


def damage_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    return lambda folder: change_weights(folder, change)


def to_pickle(folder: Path) -> None:
    torch.save({**load_file(folder / "model.safetensors"), "more": Program()}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def to_int8(tensors: dict[str, torch.Tensor]) -> None:
    tensors[QUERY] = tensors[QUERY].to(torch.int8)


@dataclass(frozen=True)
class BrokenModel:
    """Something wrong with a model on disk, and how it is refused."""

    code: str
    damage: Callable[[Path], None]
    named: str
    """In the message, as a pattern."""


DEFECTS = {
    "missing": BrokenModel("missing_keys", damage_weights(lambda t: t.pop(NORM)), NORM),
    "unexpected": BrokenModel(
        "unexpected_keys", damage_weights(lambda t: t.update({"encoder.extra": torch.zeros(2)})), "encoder.extra"
    ),
    "mismatched": BrokenModel(
        "mismatched_shapes",
        damage_weights(lambda t: t.update({QUERY: torch.zeros(3, 3)})),
        rf"{QUERY} \(3, 3\) in the file, \(16, 32\) in the model",
    ),
    "int8": BrokenModel("wrong_dtype", damage_weights(to_int8), QUERY),
    "head lost": BrokenModel(
        "tied_head", damage_weights(lambda t: t.pop("lm_head.weight")), r"lm_head\.weight is not among the weights"
    ),
    "head overwritten": BrokenModel(
        "tied_head",
        damage_weights(lambda t: t.update({"lm_head.weight": t["shared.weight"].clone()})),
        r"lm_head\.weight has the same values as shared\.weight",
    ),
    "head not tied": BrokenModel(
        "untied_head", damage_config(tie_word_embeddings=None), r"hold a lm_head\.weight of its own"
    ),
    "pickle": BrokenModel("unsafe_pickle", to_pickle, r"pytorch_model\.bin holds more than tensors.*posix\.mkdir"),
    "code": BrokenModel("remote_code", damage_config(auto_map={"AutoModel": "mine.Mine"}), r"AutoModel.*mine\.Mine"),
    "quantized": BrokenModel(
        "quantized", damage_config(quantization_config={"quant_method": "int8"}), "quantized|quantized"
    ),
    "torn": BrokenModel(
        "bad_safetensors",
        lambda folder: os.truncate(folder / "model.safetensors", 9_000),
        r"model\.safetensors is damaged: 9000 bytes long",
    ),
}


@pytest.mark.parametrize("defect", DEFECTS.values(), ids=DEFECTS)
def test_a_defect_is_refused_by_every_stage_that_can_meet_it(
    tmp_path: Path, model_folder: Path, make_run: MakeRun, defect: BrokenModel
) -> None:
    place = Workplace(tmp_path / "place")
    place.rows("rows.jsonl", pairs(20))
    folder = Path(shutil.copytree(model_folder, place.data / "mine"))
    prepared_later, trained = place.job(model="./mine"), make_run()
    place.check(prepared_later)
    defect.damage(folder)
    defect.damage(model_folder)

    def refused(stage: Callable[[], object]) -> None:
        with pytest.raises(Rejected, match=defect.named) as caught:
            stage()
        assert (caught.value.reason, caught.value.detail_code) == ("rejected", defect.code)
        assert caught.value.hint

    refused(lambda: place.check(place.job(model="./mine")))
    settings = place.settings
    refused(lambda: prepare(prepared_later, settings, Journal(prepared_later.attempt_file("prepare"))))
    assert not list(settings.models.glob("*/model.safetensors"))
    if (model_folder / "model.safetensors").exists():
        refused(lambda: attempt(trained))
    else:  # the store never had another: prepare makes it again
        with pytest.raises(NotPrepared, match=r"model\.safetensors"):
            attempt(trained)


@pytest.mark.parametrize(
    "name", ["missing", "unexpected", "mismatched", "head lost", "head overwritten", "head not tied"]
)
def test_what_was_loaded_is_judged_as_well(model_folder: Path, name: str) -> None:
    defect = DEFECTS[name]
    defect.damage(model_folder)
    model, info = AutoModelForSeq2SeqLM.from_pretrained(
        model_folder, dtype=torch.bfloat16, output_loading_info=True, ignore_mismatched_sizes=True
    )

    def judge() -> None:
        guards.check_all_loaded(info)
        config = json.loads((model_folder / "config.json").read_text())
        guards.check_tie(model, layout_of(config), model_folder)

    with pytest.raises(Rejected, match=defect.named) as caught:
        judge()
    assert caught.value.detail_code == defect.code


def test_a_trainer_ends_with_the_reason_and_its_exit_code(model_folder: Path, make_run: MakeRun) -> None:
    run = make_run()
    DEFECTS["missing"].damage(model_folder)
    code, _, said = stage("train", run.path).wait()
    assert code == 77, said
    last = finished(run)
    assert last.reason == "rejected"
    assert last.error is not None and last.error.code == "missing_keys"
    assert NORM in last.error.message
    assert last.error.hint


# What no file can cause: another library, or another thread, has changed how this process loads.


def on_meta(model: torch.nn.Module) -> None:
    model.get_submodule("encoder.final_layer_norm").to("meta")


def in_fp32(model: torch.nn.Module) -> None:
    model.get_submodule("encoder.final_layer_norm").to(torch.float32)


def offloaded(model: torch.nn.Module) -> None:
    module = model.get_submodule("encoder.block.0")
    add_hook_to_module(module, AlignDevicesHook(execution_device="cpu", offload=False))


@pytest.mark.parametrize(
    ("code", "fault", "named"),
    [
        ("meta_tensor", on_meta, NORM),
        ("wrong_dtype", in_fp32, rf"{NORM} \(torch\.float32\)"),
        ("offload_hook", offloaded, r"encoder\.block\.0"),
    ],
)
def test_a_process_that_loads_wrongly_refuses_to_train(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, code: str, fault: Callable[[torch.nn.Module], None], named: str
) -> None:
    original = AutoModelForSeq2SeqLM.from_pretrained

    def faulty(*arguments: Any, **options: Any) -> Any:
        model, info = original(*arguments, **options)
        fault(model)
        return model, info

    monkeypatch.setattr(AutoModelForSeq2SeqLM, "from_pretrained", faulty)
    with pytest.raises(Rejected, match=named) as caught:
        attempt(make_run())
    assert caught.value.detail_code == code
    assert "this process is" in str(caught.value.hint) or code == "wrong_dtype"


def test_a_model_on_another_device_than_the_gpu_is_refused(model_folder: Path) -> None:
    model = load_plainly(model_folder).model
    with pytest.raises(Rejected, match=r"shared\.weight \(cpu\)|tensors not on cuda") as caught:
        guards.check_placement(model, torch.bfloat16, torch.device("cuda"))
    assert caught.value.detail_code == "wrong_device"


def converted(tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()})


def test_loads_from_eight_threads_are_all_good_and_bare_ones_are_not(model_folder: Path, tmp_path: Path) -> None:
    folders = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        folders.append(Path(shutil.copytree(model_folder, tmp_path / str(dtype))))
        change_weights(folders[-1], partial(converted, dtype=dtype))

    assert threaded_loads("ours", "seq2seq", folders) == {"counts": {"good": 200}, "afterwards": "good"}
    bare = threaded_loads("bare", "seq2seq", folders)
    assert bare["counts"].get("good", 0) < 100, "from_pretrained has become thread-safe: is our lock still needed?"
    assert bare["counts"]["meta"] > 100
    assert bare["afterwards"] in ("missing_keys", "meta_tensor"), "that process is spoilt, and our guards must see it"


def test_an_untied_model_as_transformers_5_saves_it_is_not_refused(tmp_path: Path, model_folder: Path) -> None:
    model = load_plainly(model_folder).model
    model.save_pretrained(model_folder)
    assert json.loads((model_folder / "config.json").read_text())["tie_word_embeddings"] is True
    assert load_plainly(model_folder).model.config.scale_decoder_outputs is False


def test_a_tied_model_loads_tied(model_folder: Path) -> None:
    change_config(model_folder, tie_word_embeddings=None)
    change_weights(model_folder, lambda tensors: tensors.pop("lm_head.weight"))
    model = load_plainly(model_folder).model
    assert model.get_parameter("lm_head.weight") is model.get_parameter("shared.weight")


def test_five_names_and_a_count_are_enough() -> None:
    info = {"mismatched_keys": [], "missing_keys": [f"tensor.{n}" for n in range(9)], "unexpected_keys": []}
    with pytest.raises(
        Rejected, match=r"9 tensors missing .*: tensor\.0, tensor\.1, tensor\.2, tensor\.3, tensor\.4, …"
    ):
        guards.check_all_loaded(info)


def test_a_copied_parameter_is_noticed(model_folder: Path) -> None:
    loaded = load_plainly(model_folder)
    guards.check_not_copied(loaded.model, loaded.pointers)
    norm = loaded.model.get_parameter(NORM)
    norm.data = norm.data.clone()
    with pytest.raises(Rejected, match=f"1 tensors no longer at the address they were loaded to: {NORM}"):
        guards.check_not_copied(loaded.model, loaded.pointers)


def test_gpus_without_native_bf16_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(GpuLost, match="sees no usable CUDA device"):
        guards.check_device(cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(Rejected, match=r"Tesla T4 \(compute capability 7\.5\) has no native bf16") as caught:
        guards.check_device(cuda, torch.bfloat16)
    assert caught.value.detail_code == "no_native_bf16" and "method: lora" in str(caught.value.hint)
    guards.check_device(cuda, torch.float16)
    guards.check_device(CPU, torch.bfloat16)
