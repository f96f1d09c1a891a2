"""pytorch_model.bin: what is read of it, and what is refused."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from jobs.errors import Rejected
from tests.training.attempts import same_tensors
from worker.training.journal import Journal
from worker.training.models.model_files import read_pickle
from worker.training.models.model_store import convert
from worker.training.tasks.seq2seq.task import Seq2Seq


def bytes_of(file: Path) -> dict[str, torch.Tensor]:
    """The tensors that lie where `read_pickle` says."""
    dtypes = {"F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64}
    content = bytearray(file.read_bytes())
    return {
        name: torch.frombuffer(content[one.begin : one.end], dtype=dtypes[one.dtype]).reshape(one.shape)
        for name, one in read_pickle(file, "x").items()
    }


@pytest.mark.parametrize("today", [True, False], ids=["zip archive", "as before torch 1.6"])
def test_tensors_lie_where_they_are_said_to_lie(tmp_path: Path, today: bool) -> None:
    shared = torch.randn(5, 7)
    saved = {
        "shared": shared,
        "tied": shared,
        "part": torch.randn(10)[3:6],
        "bf16": torch.nn.Parameter(torch.randn(2, 2).bfloat16()),
        "number": torch.arange(12).reshape(3, 4),
    }
    file = tmp_path / "pytorch_model.bin"
    torch.save(saved, file, _use_new_zipfile_serialization=today)
    found = bytes_of(file)
    assert list(found) == list(saved)
    assert all(torch.equal(found[name], tensor) for name, tensor in saved.items())
    places = read_pickle(file, "x")
    assert (places["shared"].begin, places["shared"].end) == (places["tied"].begin, places["tied"].end)


@pytest.mark.parametrize("today", [True, False], ids=["zip archive", "as before torch 1.6"])
def test_the_store_has_what_it_has_of_safetensors(
    model_folder: Path, tmp_path: Path, journal: Journal, today: bool
) -> None:
    weights = load_file(model_folder / "model.safetensors")
    expected, made = tmp_path / "expected", tmp_path / "made"
    for folder in (expected, made):
        folder.mkdir()
    convert(model_folder, expected, "x", Seq2Seq(), journal)
    for alias in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"):
        weights[alias] = weights["shared.weight"]
    torch.save(weights, model_folder / "pytorch_model.bin", _use_new_zipfile_serialization=today)
    (model_folder / "model.safetensors").unlink()
    convert(model_folder, made, "x", Seq2Seq(), journal)
    assert same_tensors(made / "model.safetensors", expected / "model.safetensors")


class Program:
    """Writes a file when it is unpickled without care."""

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mkdir, ("/nonexistent/written-by-a-pickle",)


def rewritten(file: Path, change: Callable[[str, bytes], bytes | None], compression: int = zipfile.ZIP_STORED) -> None:
    """The same archive with other records; None leaves one out."""
    with zipfile.ZipFile(file) as archive:
        content = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, data in content.items():
            if (changed := change(name.partition("/")[2], data)) is not None:
                archive.writestr(name, changed)


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 100)


REFUSED: dict[str, tuple[Any, str, str]] = {
    "code": ({"a": torch.zeros(2), "b": Program()}, "unsafe_pickle", r"posix\.mkdir"),
    "nested": ({"state_dict": {"a": torch.zeros(2)}}, "bad_pickle", "'state_dict' is a dict, not a tensor"),
    "no names": ([torch.zeros(2)], "bad_pickle", "holds a list"),
    "transposed": ({"a": torch.zeros(2, 3).t()}, "bad_pickle", "a is a torch.float32 of another layout"),
    "sparse": ({"a": torch.eye(3).to_sparse()}, "bad_pickle", "of another layout"),
    "complex": ({"a": torch.zeros(2, dtype=torch.complex64)}, "bad_pickle", "complex64"),
}


@pytest.mark.parametrize("today", [True, False], ids=["zip archive", "as before torch 1.6"])
@pytest.mark.parametrize(("content", "code", "named"), REFUSED.values(), ids=REFUSED)
def test_what_is_more_or_less_than_tensors_by_name_is_refused(
    tmp_path: Path, content: Any, code: str, named: str, today: bool
) -> None:
    file = tmp_path / "pytorch_model.bin"
    torch.save(content, file, _use_new_zipfile_serialization=today)
    with pytest.raises(Rejected, match=named) as caught:
        read_pickle(file, "./mine")
    assert (caught.value.detail_code, caught.value.param) == (code, "model")
    assert "weights_only" not in str(caught.value), "nobody is told how to run it all the same"


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut": cut,
    "empty": lambda file: file.write_bytes(b""),
    "a text": lambda file: file.write_text("version https://git-lfs.github.com/spec/v1"),
    "JSON": lambda file: file.write_text(json.dumps({"a": 1})),
}


@pytest.mark.parametrize("today", [True, False], ids=["zip archive", "as before torch 1.6"])
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_refused(tmp_path: Path, damage: Callable[[Path], object], today: bool) -> None:
    file = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.randn(100)}, file, _use_new_zipfile_serialization=today)
    damage(file)
    with pytest.raises(Rejected) as caught:
        read_pickle(file, "./mine")
    assert caught.value.detail_code == "bad_pickle"


def test_an_archive_whose_tensors_do_not_lie_as_they_are_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.zeros(100)}, file)
    rewritten(file, lambda _, data: data, zipfile.ZIP_DEFLATED)
    with pytest.raises(Rejected, match="it is compressed") as caught:
        read_pickle(file, "./mine")
    assert caught.value.detail_code == "bad_pickle"


def test_a_big_endian_archive_is_refused_and_read_once_it_is_written_as_the_hint_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file, tensor = Path("pytorch_model.bin"), torch.arange(6.0)
    torch.save({"a": tensor}, file)
    swapped = tensor.numpy().byteswap().tobytes()
    rewritten(file, lambda name, data: {"byteorder": b"big", "data/0": swapped}.get(name, data))
    with pytest.raises(Rejected, match=r"byte order of pytorch_model\.bin is 'big'") as caught:
        read_pickle(file, "./mine")
    assert (caught.value.detail_code, caught.value.param) == ("big_endian_pickle", "model")
    assert caught.value.hint is not None
    eval(caught.value.hint[caught.value.hint.index("torch.save(") :], {"torch": torch})
    assert torch.equal(bytes_of(file)["a"], tensor)


def test_an_archive_of_old_has_no_record_of_its_byte_order(tmp_path: Path) -> None:
    file, tensor = tmp_path / "pytorch_model.bin", torch.arange(6.0)
    torch.save({"a": tensor}, file)
    rewritten(file, lambda name, data: None if name == "byteorder" else data)
    assert torch.equal(bytes_of(file)["a"], tensor)


def test_a_tensor_does_not_reach_into_what_lies_behind_its_storage(tmp_path: Path) -> None:
    file = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.arange(6.0), "b": torch.arange(100.0)}, file)
    rewritten(file, lambda name, data: data[:4] if name == "data/0" else data)
    with pytest.raises(Rejected, match="a is longer than the data stored for it") as caught:
        read_pickle(file, "./mine")
    assert caught.value.detail_code == "bad_pickle"


def test_so_it_is_in_a_file_as_before_torch_1_6(tmp_path: Path) -> None:
    file = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.zeros(6), "b": torch.zeros(100)}, file, _use_new_zipfile_serialization=False)
    six, one = (b"K" + bytes([number]) + b"Nt" for number in (6, 1))
    content = file.read_bytes()
    assert content.count(six) == 1, "the elements of a storage, no view of another, end of the tuple"
    file.write_bytes(content.replace(six, one))
    with pytest.raises(Rejected, match="a is longer than the data stored for it"):
        read_pickle(file, "./mine")
