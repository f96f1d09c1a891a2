"""Prepared datasets on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jobs.errors import BadData
from tests.support.samples import dataset_summary
from worker.training.dataset.data import PreparedDataset, Writer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Five rows in two writes; rows 1 and 3 are for validation."""
    with Writer(tmp_path, 32_128) as writer:
        writer.add([np.array([5, 6, 1], np.uint32)] * 2, [np.array([7, 1], np.uint32), np.array([8, 9, 1], np.uint32)])
        writer.add([np.array([n, 1], np.uint32) for n in (2, 3, 4)], [np.array([1], np.uint32)] * 3)
        writer.finish({"train": np.array([0, 2, 4]), "validation": np.array([1, 3])}, dataset_summary(kept=5))
    return tmp_path


def test_rows_come_back_as_they_were_written(folder: Path) -> None:
    dataset = PreparedDataset.open(folder)
    assert (len(dataset.train), len(dataset.validation)) == (3, 2)
    assert dataset.train.input_lengths.tolist() == [3, 2, 2]
    assert dataset.train.input_lengths.dtype == np.int32
    assert dataset.validation.target_lengths.tolist() == [3, 1]
    assert dataset.validation.target(0).tolist() == [8, 9, 1]
    assert dataset.train.input(2).tolist() == [4, 1]
    assert dataset.train.input(2).dtype == np.uint16
    assert isinstance(dataset.train.input(2), np.memmap)
    assert dataset.manifest.report == dataset_summary(kept=5)


def test_gathering_pads_behind_the_rows(folder: Path) -> None:
    rows = PreparedDataset.open(folder).train
    assert rows.gather("input", np.array([2, 0]), 4, -1).tolist() == [[4, 1, -1, -1], [5, 6, 1, -1]]
    assert rows.gather("target", np.array([0]), 2, 0).dtype == np.int64


@pytest.mark.parametrize("file", ["input.tokens", "target.offsets", "train.rows", "manifest.json"])
def test_a_damaged_dataset_is_not_opened(folder: Path, file: str) -> None:
    content = (folder / file).read_bytes()
    (folder / file).write_bytes(content[:-1] if file != "manifest.json" else content[:20])
    with pytest.raises(BadData) as caught:
        PreparedDataset.open(folder)
    assert caught.value.detail_code == "prepared_damaged"
    (folder / file).unlink()
    with pytest.raises(BadData):
        PreparedDataset.open(folder)


def test_a_part_without_rows_is_empty(tmp_path: Path) -> None:
    with Writer(tmp_path, 100) as writer:
        writer.add([np.array([1], np.uint32)], [np.array([1], np.uint32)])
        writer.finish({"train": np.arange(1), "validation": np.arange(0)}, dataset_summary())
    assert len(PreparedDataset.open(tmp_path).validation) == 0
