"""Jobs with `method: lora`, as the trainer runs them: what they train, save, resume from and deliver."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from jobs.disk.rundir import RunDir
from jobs.errors import BaseChanged, NotPrepared, Rejected
from jobs.events import Adopted
from jobs.spec import LoraMethod
from jobs.trainer_facts import CheckpointRejected, ModelLoaded
from tests.training.attempts import attempt, checkpoints, facts, finished, logged, same_tensors, trained
from tests.training.checkpoints.damage import flip_a_bit
from tests.training.conftest import RISING, WORDS, MakeRun
from tests.training.snippets import blocks, run_snippet
from tests.training.workplace import Workplace, pairs
from tests.training.workplace import of_rows as of_rows
from worker.training import result, train
from worker.training.adapters import merging
from worker.training.adapters.lora import Lora
from worker.training.context import TrainingContext
from worker.training.models.model_store import seal
from worker.training.network.model import load
from worker.training.optimizers import adamw_8bit
from worker.training.tasks.seq2seq.task import Seq2Seq

CPU = torch.device("cpu")
LORA: dict[str, Any] = {"type": "lora", "rank": 4, "dropout": 0.1}
FAST = {"epochs": 2, "learning_rate": 0.1}
LAST = "checkpoints/step-00000011"
TENSORS = ("model.safetensors", "optimizer.safetensors")
STEP_7 = 4 + 7 + 3
"""Looks until an attempt stops at step 7, as in test_checkpoint.py."""


@pytest.mark.parametrize("settings", [{}, {"dora": True, "rslora": True}, {"adapter_dtype": "float32"}])
def test_a_job_learns_and_its_adapter_opens_with_the_same_logits(
    make_run: MakeRun, model_folder: Path, settings: dict[str, Any]
) -> None:
    before = (model_folder / "model.safetensors").read_bytes()
    run = make_run(method=LORA | settings, training=FAST)
    assert attempt(run) == 0
    assert (trained(run).loss or 9.0) < (trained(run).first_loss or 0.0) - 0.05
    assert (model_folder / "model.safetensors").read_bytes() == before
    assert {path.name for path in run.model.iterdir()} == {
        "manifest.json",
        "adapter_model.safetensors", "adapter_config.json", "generation_config.json", "README.md", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip
    config = json.loads((run.model / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(model_folder) and config["revision"] is None

    method = Lora(LoraMethod.model_validate(LORA | settings))
    own = load(
        model_folder, CPU, task=Seq2Seq(), dropout=None, fused=False, activation_checkpointing=0, method=method
    ).model.eval()
    saved = load_file(run.model / "adapter_model.safetensors")
    with torch.no_grad():
        for name, tensor in method.weights(own).items():
            tensor.copy_(saved[name])
    theirs = PeftModel.from_pretrained(
        AutoModelForSeq2SeqLM.from_pretrained(model_folder, dtype="bfloat16"),
        run.model,
        autocast_adapter_dtype="adapter_dtype" in settings,
    ).eval()
    ids = AutoTokenizer.from_pretrained(run.model)("w1 w2 w3 w4", return_tensors="pt").input_ids
    with torch.no_grad():
        one, other = (model(input_ids=ids, labels=ids).logits for model in (own, theirs))
        with theirs.disable_adapter():
            plain = theirs(input_ids=ids, labels=ids).logits
    assert torch.equal(one, other) and not torch.equal(one, plain)


def test_the_snippet_of_its_page_writes_what_the_job_wrote(make_run: MakeRun) -> None:
    run = make_run(method=LORA, training=FAST, evaluation={"every_steps": 5, "samples": 4})
    assert attempt(run) == 0
    page = (run.model / "README.md").read_text()
    assert run_snippet(run.model) == blocks(page, "text")[0] + "\n"
    assert page.startswith("---\nlibrary_name: peft\n")
    weights = sum(tensor.numel() for tensor in load_file(run.model / "adapter_model.safetensors").values())
    assert f"| method | LoRA: rank 4, alpha 4, dropout 0.1, targets all-linear, bfloat16; {weights:,} weights" in page


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_offload", "adamw_8bit", "adafactor"])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    monkeypatch.setattr(adamw_8bit, "LEAST_QUANTISED", 256)
    parts = {"memory": {"optimizer": optimizer, "micro_batch": 4}, "method": LORA, "training": FAST}
    whole, broken = make_run("whole", **parts), make_run("broken", **parts)
    assert attempt(whole) == 0
    assert attempt(broken, 1, stop_at=STEP_7) == 75
    torch.rand(5)
    assert attempt(broken, 2) == 0
    assert facts(broken, ModelLoaded, 2)[0].resumed_step == 7
    assert logged(broken) == logged(whole)
    assert finished(broken, 2).result == finished(whole).result
    assert same_tensors(broken.model / "adapter_model.safetensors", whole.model / "adapter_model.safetensors")
    for file in TENSORS:
        assert same_tensors(broken.path / LAST / file, whole.path / LAST / file)
    names = {name: load_file(whole.path / LAST / name).keys() for name in TENSORS}
    assert all("lora_" in name for name in names["model.safetensors"])
    assert all(
        "lora_" in name or name.startswith("table.") or name == "steps" for name in names["optimizer.safetensors"]
    )


def test_from_scratch_it_begins_with_the_same_bytes(make_run: MakeRun) -> None:
    one, other = (make_run(name, method=LORA, training={"epochs": 1}) for name in ("one", "other"))
    for run in (one, other):
        assert attempt(run) == 0
        torch.rand(7)
    assert same_tensors(one.model / "adapter_model.safetensors", other.model / "adapter_model.safetensors")


def test_the_best_checkpoint_becomes_the_adapter_and_a_damaged_one_is_passed_over(make_run: MakeRun) -> None:
    training = RISING["training"] | {"learning_rate": 1.0}
    run = make_run("best", **RISING | {"training": training}, method=LORA | {"dropout": 0.0})
    assert attempt(run) == 0 and trained(run).step < 21
    best = f"step-{trained(run).step:08d}"
    assert best in checkpoints(run)
    assert same_tensors(run.model / "adapter_model.safetensors", run.checkpoints / best / "model.safetensors")

    broken = make_run("broken", method=LORA)
    assert attempt(broken, 1, stop_at=STEP_7) == 75
    flip_a_bit(broken.checkpoints / "step-00000007")
    assert attempt(broken, 2) == 0
    assert [fact.path for fact in facts(broken, CheckpointRejected, 2)] == ["checkpoints/step-00000007"]
    assert facts(broken, ModelLoaded, 2)[0].resumed_step == 5


@pytest.mark.parametrize(
    ("settings", "fused", "wide"),
    [
        ({}, True, torch.float64),
        ({}, True, torch.float32),
        ({"dora": True, "alpha": 16.0}, True, torch.float64),
        ({"rslora": True, "adapter_dtype": "float32"}, False, torch.float64),
    ],
)
@pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer tied")  # peft, of every untied T5
def test_a_merged_model_is_the_model_with_its_adapters(
    make_run: MakeRun,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    fused: bool,
    wide: torch.dtype,
) -> None:
    monkeypatch.setattr(result, "wide_dtype", lambda loaded: wide)
    run = make_run(method=LORA | settings | {"merge": True}, training=FAST, speed={"fused": fused})
    caplog.set_level("INFO", "longhaul.trainer")
    assert attempt(run) == 0
    [(change, worst, exact)] = re.findall(
        r"changes by ([+-]\S+) nats \(of one row by (\S+) at most\), and by (\S+) before", caplog.text
    )
    assert float(exact) <= (1e-12 if wide == torch.float64 else 1e-6)
    assert 0 < abs(float(change)) <= float(worst) < 0.01
    page = (run.model / "README.md").read_text()
    assert change in page and page.startswith("---\nlibrary_name: transformers\n")

    assert {path.name for path in (run.model / "adapter").iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors",
    }  # fmt: skip
    whole, info = AutoModelForSeq2SeqLM.from_pretrained(run.model, dtype="auto", output_loading_info=True)
    assert not any(info.values()) and whole.dtype == torch.bfloat16
    base = AutoModelForSeq2SeqLM.from_pretrained(str(run.plan().model.folder), dtype=torch.float32)
    theirs: Any = PeftModel.from_pretrained(base, str(run.model / "adapter"))
    merged = theirs.merge_and_unload().state_dict()
    for name, weight in whole.state_dict().items():
        assert torch.allclose(weight.float(), merged[name], rtol=2**-8, atol=1e-6), name


def test_a_merge_that_differs_is_refused_and_the_adapters_stay(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = merging.merged_weight
    monkeypatch.setattr(merging, "merged_weight", lambda layer: real(layer) * 1.001)
    run = make_run(method=LORA | {"merge": True}, training=FAST)
    with pytest.raises(Rejected) as caught:
        attempt(run)
    assert caught.value.detail_code == "merge_differs"
    assert (run.model / "adapter_model.safetensors").exists() and not (run.model / "model.safetensors").exists()


def test_the_model_is_read_again_where_a_run_resumes(make_run: MakeRun, model_folder: Path) -> None:
    seal(model_folder, "x")
    run = make_run(method=LORA)
    assert attempt(run, 1, stop_at=STEP_7) == 75
    flip_a_bit(model_folder)
    with pytest.raises(NotPrepared, match="has changed"):
        attempt(run, 2)


def test_a_model_that_changes_in_memory_is_no_result(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run, real = make_run(method=LORA), train.training_loop

    def damaging(context: TrainingContext, traces: Path | None) -> None:
        real(context, traces)
        with torch.no_grad():
            context.loaded.model.get_parameter("shared.weight")[5, 5] += 1.0

    monkeypatch.setattr(train, "training_loop", damaging)
    with pytest.raises(BaseChanged) as caught:
        attempt(run)
    assert caught.value.reason.exit_code == 83 and not run.model.exists()


@pytest.mark.parametrize(
    ("settings", "code"), [({"rank": 17}, "rank_too_large"), ({"targets": ["q_proj"]}, "no_such_target")]
)
def test_what_the_model_cannot_have_is_refused_at_check(
    place: LoraWorkplace, settings: dict[str, Any], code: str
) -> None:
    place.planned = True  # which puts the adapters into the model
    with pytest.raises(Rejected) as caught:
        place.check(place.small_job(method=LORA | settings))
    assert caught.value.detail_code == code


class LoraWorkplace(Workplace):
    """A tiny model and 41 rows, for all three stages."""

    def small_job(self, **parts: Any) -> RunDir:
        settings: dict[str, Any] = {
            "model": "./model",
            "data": {"validation": "held_out.jsonl", "max_input_tokens": 32, "max_target_tokens": 32},
            "training": FAST | {"batch_size": 8},
            "memory": {"micro_batch": 4, "optimizer": "adamw"},
            "log": {"every_steps": 4},
            "evaluation": {"every_steps": 5, "max_rows": 6, "samples": 2, "generate_rows": 0},
            "checkpoint": {"every_steps": 5, "every_minutes": None, "keep": 2},
            "method": LORA,
        }
        return self.job(**settings | parts)

    def resuming(self, source: RunDir, **parts: Any) -> RunDir:
        return self.small_job(resume_from=source.id, **parts)


@pytest.fixture
def place(tmp_path: Path, model_folder: Path) -> LoraWorkplace:
    place = LoraWorkplace(tmp_path / "place", planned=False)
    shutil.copytree(model_folder, place.data / "model")
    draw = random.Random(7)
    rows = []
    for _ in range(41 + 8):
        words = [draw.choice(WORDS) for _ in range(draw.randint(3, 14))]
        rows.append({"input": " ".join(words), "target": " ".join(reversed(words[::2]))})
    place.rows("rows.jsonl", rows[:41])
    place.rows("held_out.jsonl", rows[41:])
    return place


def test_another_job_resumes_from_it_and_the_method_must_be_the_same(place: LoraWorkplace) -> None:
    whole, source = place.small_job(), place.small_job()
    place.prepare(whole)
    source.write_plan(whole.plan())
    assert attempt(whole) == 0
    assert attempt(source, stop_at=STEP_7) == 75
    run = place.resuming(source)
    assert Adopted.model_validate(place.prepare(run)["adopted"]).step == 7
    assert attempt(run) == 0
    assert [row for row in logged(whole) if row[0] > 7] == logged(run)
    for file in TENSORS:
        assert same_tensors(run.path / LAST / file, whole.path / LAST / file)
    for method in ("full", LORA | {"rank": 8}):
        with pytest.raises(Rejected) as caught:
            place.check(place.resuming(source, method=method))
        assert caught.value.detail_code == "other_run" and str(caught.value.param).startswith("method")
        if method == "full":
            assert "method is {'type': 'full'} here and {'type': 'lora'" in str(caught.value)
            assert 'set method={"type": "lora", "rank": 4, "dropout": 0.1},' in str(caught.value.hint)
    merged = place.resuming(source, method=LORA | {"merge": True})
    place.prepare(merged)
    assert attempt(merged) == 0
    assert same_tensors(merged.model / "adapter/adapter_model.safetensors", run.model / "adapter_model.safetensors")


def test_the_plan_counts_what_lora_needs(place: LoraWorkplace) -> None:
    place.planned = True
    plans = {}
    for method in ("full", LORA):
        run = place.small_job(method=method)
        place.prepare(run)
        plans["full" if method == "full" else "lora"] = run.plan(), run
    (full, _), (lora, run) = plans["full"], plans["lora"]
    assert full.memory and lora.memory and lora.memory.disk and lora.memory.host and full.memory.host
    trained = lora.memory.trained_parameters
    assert 0 < trained < full.memory.trained_parameters == full.model.parameters == lora.model.parameters
    assert lora.memory.parts["weights"] == full.memory.parts["weights"] + 2 * trained
    assert lora.memory.parts["gradients"] == 2 * trained
    assert lora.memory.disk.model_bytes == 2 * trained
    assert lora.memory.host.copy_bytes == lora.memory.disk.checkpoint_bytes < full.memory.host.copy_bytes
    assert lora.time and full.time and lora.time.model_flops < full.time.model_flops
    assert attempt(run) == 0
    [one] = {sum(file.stat().st_size for file in (run.path / LAST).glob("*.safetensors"))}
    assert lora.memory.disk.checkpoint_bytes <= one < lora.memory.disk.checkpoint_bytes + 40_000  # their headers


def test_a_causal_model_is_trained_merged_and_opened_alike(workplace: Workplace) -> None:
    workplace.rows("rows.jsonl", pairs(60))
    run = workplace.job(
        model="builtin:qwen-tiny",
        method=LORA | {"rank": 8, "merge": True},
        data={"validation": 0.2},
        training={"epochs": 1, "batch_size": 8, "learning_rate": 0.01},
        memory={"micro_batch": 4, "optimizer": "adamw"},
        evaluation={"every_steps": 100, "max_rows": 6, "samples": 2, "sample_tokens": 8},
    )
    workplace.prepare(run)
    assert attempt(run) == 0
    assert (trained(run).loss or 99.0) < (trained(run).first_loss or 0.0)
    base = AutoModelForCausalLM.from_pretrained(str(run.plan().model.folder), dtype=torch.float32)
    apart = PeftModel.from_pretrained(base, str(run.model / "adapter")).eval()
    merged = AutoModelForCausalLM.from_pretrained(run.model, dtype=torch.float32).eval()
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    with torch.no_grad():
        assert torch.allclose(apart(input_ids=ids).logits, merged(input_ids=ids).logits, atol=0.02)
