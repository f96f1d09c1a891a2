"""Which card a train worker takes, and what it says when there is none. nvidia-smi is a script on PATH."""

from __future__ import annotations

from pathlib import Path

import pytest

from worker.card import Card, NoCard, find_card

TWO = "0, GPU-aaa, NVIDIA GeForce RTX 5090, 32607, 580.95.05\n1, GPU-bbb, NVIDIA GeForce RTX 5090, 32607, 580.95.05\n"


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all of PATH; `answer` puts an nvidia-smi into it."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def answer(folder: Path, text: str, code: int = 0) -> None:
    script = folder / "nvidia-smi"
    script.write_text(f"#!/bin/sh\n/bin/cat <<'END'\n{text}END\nexit {code}\n")
    script.chmod(0o755)


def test_the_first_card_or_the_one_that_is_named(smi: Path) -> None:
    answer(smi, TWO)
    assert find_card("") == Card("GPU-aaa", "NVIDIA GeForce RTX 5090", 32607 * 2**20, "580.95.05")
    assert find_card("1").uuid == find_card("GPU-bbb").uuid == "GPU-bbb"
    with pytest.raises(NoCard, match="CUDA_VISIBLE_DEVICES=GPU-ccc, but the cards here are GPU-aaa, GPU-bbb"):
        find_card("GPU-ccc")


def test_no_driver_no_card_and_a_driver_that_is_not_loaded(smi: Path) -> None:
    with pytest.raises(NoCard, match=r"no NVIDIA driver was found here .*driver 580 or newer"):
        find_card("")
    answer(smi, "No devices were found\n")
    with pytest.raises(NoCard, match="no usable card: nvidia-smi says 'No devices were found'"):
        find_card("")
    answer(smi, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", code=9)
    with pytest.raises(NoCard, match="couldn't communicate with the NVIDIA driver"):
        find_card("")
