"""Every guard, on real model folders with one thing wrong in them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from jobs.errors import Refused
from tests.training.conftest import tiny_model
from worker.training import guards
from worker.training.model import LoadedModel, load

CPU = torch.device("cpu")
NORM = "encoder.final_layer_norm.weight"
QUERY = "encoder.block.0.layer.0.SelfAttention.q.weight"


def load_plainly(folder: Path) -> LoadedModel:
    return load(folder, CPU, dropout=None, fused=True, recompute_layers=0)


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def change_config(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


@pytest.mark.parametrize(
    ("code", "change", "named"),
    [
        ("missing_keys", lambda t: t.pop(NORM), NORM),
        ("unexpected_keys", lambda t: t.update({"encoder.extra": torch.zeros(2)}), "encoder.extra"),
        (
            "mismatched_shapes",
            lambda t: t.update({QUERY: torch.zeros(3, 3)}),
            rf"{QUERY} \(3, 3\) in the file, \(16, 32\)",
        ),
        ("tied_head", lambda t: t.pop("lm_head.weight"), "lm_head.weight is not among the weights"),
        ("tied_head", lambda t: t.update({"lm_head.weight": t["shared.weight"].clone()}), "has the same values"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(
    model_folder: Path, code: str, change: Callable[[dict[str, torch.Tensor]], object], named: str
) -> None:
    change_weights(model_folder, change)
    with pytest.raises(Refused, match=named) as caught:
        load_plainly(model_folder)
    assert caught.value.detail_code == code
    assert caught.value.hint


def test_a_head_of_its_own_is_refused_where_the_config_says_tied(model_folder: Path) -> None:
    change_config(model_folder, tie_word_embeddings=None)
    with pytest.raises(Refused, match=r"hold a lm_head\.weight of its own") as caught:
        load_plainly(model_folder)
    assert caught.value.detail_code == "untied_head"


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
        Refused, match=r"9 tensors missing .*: tensor\.0, tensor\.1, tensor\.2, tensor\.3, tensor\.4, …"
    ):
        guards.refuse_incomplete(info)


def test_misplaced_tensors_are_refused() -> None:
    def code_for(model: torch.nn.Module, device: torch.device = CPU) -> str:
        with pytest.raises(Refused, match=r"tensors|modules") as caught:
            guards.refuse_misplaced(model, torch.bfloat16, device)
        return caught.value.detail_code

    def bf16() -> torch.nn.Module:
        return tiny_model().to(torch.bfloat16)

    guards.refuse_misplaced(bf16(), torch.bfloat16, CPU)
    half_meta = bf16()
    half_meta.get_submodule("encoder.final_layer_norm").to("meta")
    assert code_for(half_meta) == "meta_tensor"
    assert code_for(tiny_model()) == "wrong_dtype"
    assert code_for(bf16(), torch.device("cuda")) == "wrong_device"
    hooked = bf16()
    hooked.get_submodule("encoder.block.0")._hf_hook = object()  # type: ignore[assignment]
    assert code_for(hooked) == "offload_hook"


def test_a_copied_parameter_is_noticed(model_folder: Path) -> None:
    loaded = load_plainly(model_folder)
    guards.refuse_copied(loaded.model, loaded.pointers)
    norm = loaded.model.get_parameter(NORM)
    norm.data = norm.data.clone()
    with pytest.raises(Refused, match=f"1 tensors no longer at the address they were loaded to: {NORM}"):
        guards.refuse_copied(loaded.model, loaded.pointers)


def test_cards_without_native_bf16_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Refused, match="sees no usable CUDA device"):
        guards.refuse_poor_device(cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(Refused, match=r"Tesla T4 \(compute capability 7\.5\) has no native bf16") as caught:
        guards.refuse_poor_device(cuda)
    assert caught.value.detail_code == "no_native_bf16"
    guards.refuse_poor_device(CPU)
