"""Names of uploaded data sets. (Endings and hub data sets: test_spec.py.)"""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.data_names import DATA_SUFFIXES, dataset_file, hub_data, is_dataset_name, uploaded_name


@pytest.mark.parametrize("suffix", DATA_SUFFIXES)
def test_any_known_ending_will_do(suffix: str) -> None:
    assert is_dataset_name(f"recipes{suffix}")
    assert not is_dataset_name(suffix)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a", "a.txt", "../a.jsonl", "a/b.jsonl", "a\\b.jsonl", "a.jsonl\n", "a\0.jsonl",
             "about.json", " a.jsonl", "-a.jsonl", "ä.jsonl", "a.jsonl/", "a" * 123 + ".jsonl"],
)  # fmt: skip
def test_no_name_leads_anywhere_else(name: str) -> None:
    assert not is_dataset_name(name)


def test_a_job_says_dataset_in_front() -> None:
    assert uploaded_name("dataset:recipes.jsonl") == "recipes.jsonl"
    assert uploaded_name("dataset:../x") == "../x"
    assert uploaded_name("./dataset:recipes.jsonl") is None
    assert uploaded_name("recipes.jsonl") is None
    assert hub_data("dataset:recipes.jsonl", "auto") is None
    assert hub_data("dataset:org/recipes", "auto") is None
    assert dataset_file(Path("/uploads"), "r.csv") == Path("/uploads/r.csv/r.csv")
