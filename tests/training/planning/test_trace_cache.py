"""Traces of earlier jobs: used where everything that decides them is the same, and nowhere else."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from jobs.spec import LoraMethod, TrainingSpec
from worker.training.adapters.lora import Lora
from worker.training.planning import predictor
from worker.training.planning.ladder import Prediction, Setting
from worker.training.planning.predictor import Predictor, TraceCache
from worker.training.steps.shape import MicroBatchShape
from worker.training.tasks.seq2seq.task import Seq2Seq

CONFIG = {
    "model_type": "t5", "vocab_size": 1024, "d_model": 64, "d_kv": 16, "d_ff": 64, "num_heads": 4, "num_layers": 1,
    "num_decoder_layers": 1, "tie_word_embeddings": False, "decoder_start_token_id": 0,
}  # fmt: skip
SHAPE = MicroBatchShape(4, 16, 8)
FOLDER = "traces"


def asked(home: Path | None, config: dict[str, Any] | None = None, **more: Any) -> tuple[int, Prediction, Any]:
    """Traces that were needed for it, a prediction, and the size of the model."""
    training = TrainingSpec(**more.pop("training", {}))
    options: dict[str, Any] = {"task": Seq2Seq(), "device": "cuda", "fused": True, "dropout": None}
    one = Predictor(CONFIG | (config or {}), training=training, traces=home and home / FOLDER, **options | more)
    prediction = one.predict(SHAPE, Setting(0, "adamw"))
    one.keep()
    return one.traced, prediction, (one.size, one.uncompiled(0))


@pytest.fixture(scope="module")
def _traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[int, Prediction, Any]]:
    home = tmp_path_factory.mktemp("traced")
    return home, asked(home)


@pytest.fixture
def first(tmp_path: Path, _traced: tuple[Path, tuple[int, Prediction, Any]]) -> tuple[int, Prediction, Any]:
    """What a job found that left its traces in `tmp_path`."""
    home, found = _traced
    shutil.copytree(home, tmp_path, dirs_exist_ok=True)
    return found


def test_the_second_job_traces_nothing_and_predicts_the_same(
    tmp_path: Path, first: tuple[int, Prediction, Any]
) -> None:
    assert first[0] > 0
    other = {"learning_rate": 1e-3, "epochs": 1, "seed": 7, "batch_size": 3, "max_grad_norm": 0.5}
    assert asked(tmp_path, training=other) == (0, *first[1:])
    assert asked(None) == first


@pytest.mark.parametrize(
    "different",
    [
        {"config": {"d_ff": 128}}, {"dropout": 0.0}, {"fused": False}, {"device": "cpu"}, {"flash": False},
        {"training": {"weight_decay": 0.1}}, {"training": {"max_grad_norm": None}}, {"task": Seq2Seq((16, 8))},
        {"method": Lora(LoraMethod(type="lora", rank=4, targets=["q", "v"]))},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.usefixtures("first")
def test_what_may_decide_it_is_traced_anew(tmp_path: Path, different: dict[str, Any]) -> None:
    assert asked(tmp_path, **different)[0] > 0
    assert asked(tmp_path, **different)[0] == 0


def test_trials_of_lora_that_differ_in_alpha_or_rates_are_traced_once(tmp_path: Path) -> None:
    def found(home: Path | None, **settings: Any) -> tuple[int, Prediction]:
        plain: dict[str, Any] = {"type": "lora", "rank": 4, "targets": ["q", "v"], "dropout": 0.1}
        return asked(home, method=Lora(LoraMethod(**plain | settings)))[:2]

    traces, first = found(tmp_path, alpha=8)
    assert traces > 0
    for settings in ({"alpha": 32}, {"rslora": True}, {"dropout": 0.3}):
        assert found(tmp_path, **settings) == (0, first)
    assert found(None, alpha=32, rslora=True, dropout=0.3)[1] == first
    assert found(tmp_path, dropout=0.0)[0] > 0 and found(tmp_path, rank=8)[0] > 0


def test_rates_that_count_as_one_need_the_same() -> None:
    low, high = (
        asked(None, dropout=dropout, training={"weight_decay": decay, "max_grad_norm": norm})
        for dropout, decay, norm in ((0.01, 0.01, 1e-3), (0.5, 1.0, 9.0))
    )
    assert low == high


@pytest.mark.usefixtures("first")
def test_other_code_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictor, "code", lambda: ["another version"])
    assert asked(tmp_path)[0] > 0


@pytest.mark.parametrize("content", [b"", b"[1, 2]", b"{", b"null", b"\xff"])
def test_a_damaged_file_is_written_again(tmp_path: Path, first: tuple[int, Prediction, Any], content: bytes) -> None:
    (file,) = (tmp_path / FOLDER).iterdir()
    file.write_bytes(content)
    assert asked(tmp_path) == first
    assert asked(tmp_path) == (0, *first[1:])


@pytest.mark.parametrize("change", [(b"passes", b"parses"), (b": [", b": [9")], ids=str)
def test_a_changed_answer_is_traced_again(
    tmp_path: Path, first: tuple[int, Prediction, Any], change: tuple[bytes, bytes]
) -> None:
    (file,) = (tmp_path / FOLDER).iterdir()
    file.write_bytes(file.read_bytes().replace(*change))
    assert asked(tmp_path) == first
    assert asked(tmp_path) == (0, *first[1:])


def test_a_folder_that_cannot_be_written_costs_time_only(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("no folder")
    traces, *first = asked(tmp_path)
    assert asked(tmp_path) == (traces, *first)


def test_the_files_not_used_for_longest_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictor, "MOST_FILES", 2)

    def ask(number: int) -> bool:
        """Whether it was known."""
        cache = TraceCache(tmp_path / FOLDER, [number])
        known = not cache.empty
        cache.answer("what", lambda: [number])
        cache.keep()
        for file in (tmp_path / FOLDER).iterdir():  # ten seconds pass
            os.utime(file, (file.stat().st_mtime - 10,) * 2)
        return known

    assert [ask(1), ask(2), ask(1), ask(3), ask(1), ask(2)] == [False, False, True, False, True, False]


def test_a_trace_does_not_depend_on_those_before_it() -> None:
    options: dict[str, Any] = {"task": Seq2Seq(), "device": "cuda", "fused": True, "dropout": None}
    options["method"] = Lora(LoraMethod(type="lora", rank=4, targets=["q", "v"]))
    one, other = (Predictor(CONFIG, training=TrainingSpec(), **options) for _ in range(2))
    for every in (2, 1):
        other.predict(SHAPE, Setting(every, "adamw"))
    assert other.predict(SHAPE, Setting(0, "adamw")) == one.predict(SHAPE, Setting(0, "adamw"))
