"""Jobs whose model is float16: what prepare writes, what the trainer checks, and runs with planted overflows."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from jobs.disk.rundir import RunDir
from jobs.errors import Rejected
from jobs.events import AnyFact
from jobs.gpus import REFERENCE
from jobs.metrics import MetricRow
from jobs.trainer_facts import ModelLoaded, UpdateSkipped
from tests.support.samples import read_lines
from tests.training.attempts import attempt, facts, finished, logged, same_tensors, trained
from tests.training.forked import fork
from tests.training.snippets import blocks, run_snippet
from tests.training.workplace import Workplace, pairs
from tests.training.workplace import of_rows as of_rows
from worker.training.adapters.lora import Lora, check
from worker.training.adapters.merging import adapted_layers
from worker.training.checkpoints.checkpoint import newest_first
from worker.training.journal import Journal
from worker.training.models.model_store import seal
from worker.training.network.model import load
from worker.training.optimizers.loss_scaling import FIRST_SCALE, LossScaling
from worker.training.tasks.causal.task import Causal

CPU = torch.device("cpu")
LORA: dict[str, Any] = {"type": "lora", "rank": 4, "base_dtype": "float16"}
JOB: dict[str, Any] = {
    "model": "builtin:qwen-tiny",
    "data": {"validation": 0.2},
    "training": {"epochs": 2, "batch_size": 8, "learning_rate": 0.01},
    "memory": {"micro_batch": 4, "optimizer": "adamw"},
    "log": {"every_steps": 1},
    "evaluation": {"every_steps": 5, "max_rows": 6, "samples": 1, "sample_tokens": 4},
    "checkpoint": {"every_steps": 3, "every_minutes": None},
}
SHORT = JOB["training"] | {"max_steps": 2}
OVERFLOWS = (4, 7)
"""Steps with a planted overflow."""


def prepared(workplace: Workplace, method: dict[str, Any] = LORA, **parts: Any) -> RunDir:
    if not (workplace.data / "rows.jsonl").exists():
        workplace.rows("rows.jsonl", pairs(60))
    run = workplace.job(method=method, **JOB | parts)
    workplace.prepare(run)
    return run


def plant(monkeypatch: pytest.MonkeyPatch, *planted: int) -> None:
    """At these steps one gradient overflows."""
    real = LossScaling.step

    def step(self: LossScaling, number: int, rate: float, loss: torch.Tensor) -> torch.Tensor:
        if number in planted:
            gradient = next(each.grad for each in self._parameters if each.grad is not None)
            gradient.view(-1)[5] = float("inf")
        return real(self, number, rate, loss)

    monkeypatch.setattr(LossScaling, "step", step)


def killed_behind(run: RunDir, last: int) -> None:
    """An attempt, killed once the update of this step is skipped. What is being saved then is saved first."""
    real = Journal.note

    def note(journal: Journal, fact: AnyFact) -> None:
        real(journal, fact)
        if isinstance(fact, UpdateSkipped) and fact.step == last:
            for thread in threading.enumerate():
                if thread.name.startswith("save-"):
                    thread.join()
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "note", note)
        attempt(run)


def rows_of(run: RunDir) -> list[tuple[int, float | None, int | None]]:
    return [(row.step, row.loss_scale, row.skipped_updates) for row in read_lines(run.metrics_file, MetricRow)]


def test_a_job_learns_and_its_adapter_opens_beside_a_model_in_float16(tmp_path: Path) -> None:
    run = prepared(Workplace(tmp_path / "planned"))
    plan = run.plan()
    assert plan.memory is not None and plan.resolved.dtype == plan.memory.dtype == "float16"
    assert "model in float16, adapters in float32" in plan.memory.text
    stored = load_file(Path(str(plan.model.folder)) / "model.safetensors")
    assert {each.dtype for each in stored.values()} == {torch.float16}
    trained_bytes = 4 * plan.memory.trained_parameters
    buffers = plan.memory.parts["weights"] - sum(each.nbytes for each in stored.values()) - trained_bytes
    assert 0 <= buffers < 1024
    assert plan.memory.parts["gradients"] == trained_bytes

    assert attempt(run) == 0
    [loaded] = facts(run, ModelLoaded)
    assert loaded.dtype == "float16"
    assert (trained(run).loss or 99.0) < (trained(run).first_loss or 0.0)
    assert {(scale, skipped) for _, scale, skipped in rows_of(run)} == {(FIRST_SCALE, 0)}
    adapter = load_file(run.model / "adapter_model.safetensors")
    assert {each.dtype for each in adapter.values()} == {torch.float32}

    page = (run.model / "README.md").read_text()
    assert "float16, adapters in float32" in page
    assert 'dtype="float16"' in blocks(page, "python")[0] and run_snippet(run.model)

    method = Lora(run.spec().method, torch.float16)  # type: ignore[arg-type]  # it is one of LoRA
    folder = Path(str(plan.model.folder))
    own = load(folder, CPU, task=Causal(), dropout=None, fused=False, activation_checkpointing=0, method=method)
    with torch.no_grad():
        for name, tensor in method.weights(own.model).items():
            tensor.copy_(adapter[name])
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16)
    theirs = PeftModel.from_pretrained(base, run.model).eval()
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    with torch.no_grad():
        assert torch.equal(own.model.eval()(input_ids=ids).logits, theirs(input_ids=ids).logits)
    targets = list(adapted_layers(own.model))
    check(own.model, targets, torch.float32)
    with pytest.raises(Rejected, match=r"not torch\.bfloat16"):
        check(own.model, targets, torch.bfloat16)


@pytest.mark.parametrize(("optimizer", "behind", "resumed"), [("adamw", 2, 6), ("adafactor", 1, 3)])
def test_planted_overflows_are_skipped_counted_and_repeated_by_a_resumed_run(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch, optimizer: str, behind: int, resumed: int
) -> None:
    # Killed behind so many overflows; the checkpoint before the second one has the state that the first one left.
    plant(monkeypatch, *OVERFLOWS)
    memory = {"memory": {"micro_batch": 4, "optimizer": optimizer}}
    whole, broken = (prepared(workplace, **memory, evaluation={"every_steps": 5, "samples": 0}) for _ in range(2))
    assert attempt(whole) == 0
    skipped = facts(whole, UpdateSkipped)
    assert [(each.step, each.loss_scale, each.next_loss_scale) for each in skipped] == [
        (4, FIRST_SCALE, FIRST_SCALE / 2), (7, FIRST_SCALE / 2, FIRST_SCALE / 4),
    ]  # fmt: skip
    steps = whole.plan().steps
    assert [count for _, _, count in rows_of(whole)] == [0] * 3 + [1] * 3 + [2] * (steps - 6)
    norms = {row.step: row.grad_norm for row in read_lines(whole.metrics_file, MetricRow)}
    assert [step for step, norm in norms.items() if norm is None] == list(OVERFLOWS)

    code, _, said = fork(lambda: killed_behind(broken, OVERFLOWS[behind - 1])).wait()
    assert code == -signal.SIGKILL, said
    assert attempt(broken, 2) == 0
    assert facts(broken, ModelLoaded, 2)[0].resumed_step == resumed
    assert logged(broken) == logged(whole) and rows_of(broken) == rows_of(whole)
    assert finished(broken, 2).result == finished(whole).result
    assert same_tensors(broken.model / "adapter_model.safetensors", whole.model / "adapter_model.safetensors")
    [last, other] = [newest_first(run)[0] for run in (whole, broken)]
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert same_tensors(last / file, other / file)
    assert load_file(last / "optimizer.safetensors")["loss_scaling.skipped"] == 2
    print(json.dumps({"skipped": [each.step for each in skipped], "steps": steps, "optimizer": optimizer}))


def test_what_the_model_computes_beyond_float16_ends_the_run_with_a_hint(workplace: Workplace) -> None:
    run = prepared(workplace)
    folder = Path(str(run.plan().model.folder))
    weights = load_file(folder / "model.safetensors")
    for name in ("gate_proj", "up_proj", "down_proj"):
        each = weights[f"model.layers.0.mlp.{name}.weight"]
        weights[f"model.layers.0.mlp.{name}.weight"] = torch.full_like(each, 60_000.0)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").unlink()
    seal(folder, manifest["source"])
    with pytest.raises(Rejected, match="does not work in float16: the loss of 7 tokens is nan") as caught:
        attempt(run)
    assert caught.value.detail_code == "no_float16" and "method.base_dtype: bfloat16" in str(caught.value.hint)


def test_merged_weights_are_float16_like_the_model(workplace: Workplace) -> None:
    run = prepared(workplace, LORA | {"merge": True}, training=SHORT)
    assert attempt(run) == 0
    config = json.loads((run.model / "config.json").read_text())
    assert config["dtype"] == "float16"
    assert {each.dtype for each in load_file(run.model / "model.safetensors").values()} == {torch.float16}
    assert "Merged in fp16: " in (run.model / "README.md").read_text()
    AutoModelForCausalLM.from_pretrained(run.model)


def test_a_family_that_transformers_keeps_in_float32_is_refused_at_check(workplace: Workplace) -> None:
    workplace.planned = True  # which makes the model
    workplace.rows("rows.jsonl", pairs(60))
    with pytest.raises(Rejected, match=r"T5ForConditionalGeneration does not work in float16: .* its wo in") as caught:
        workplace.check(workplace.job(model="builtin:t5-tiny", method=LORA))
    assert (caught.value.detail_code, caught.value.param) == ("no_float16", "method.base_dtype")


def test_the_same_model_in_both_types_is_stored_twice_and_once_each(workplace: Workplace) -> None:
    half, again, full = prepared(workplace), prepared(workplace), prepared(workplace, {"type": "lora", "rank": 4})
    folders = [Path(str(run.plan().model.folder)) for run in (half, again, full)]
    assert folders[0] == folders[1] != folders[2] and folders[0].name == f"{folders[2].name}-float16"
    mine, theirs = (load_file(folder / "model.safetensors") for folder in (folders[0], folders[2]))
    assert all(torch.equal(mine[name], theirs[name].half()) for name in theirs)


def test_weights_that_become_0_are_said_at_every_preparation(
    workplace: Workplace, caplog: pytest.LogCaptureFixture
) -> None:
    workplace.rows("rows.jsonl", pairs(60))
    known = prepared(workplace).plan().model.underflow
    folder = workplace.data / "mine"
    base = prepared(workplace, {"type": "lora", "rank": 4}).plan().model.folder
    shutil.copytree(str(base), folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][:3] = 1e-9
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for _ in range(2):
        caplog.clear()
        run = prepared(workplace, model="./mine")
        assert run.plan().model.underflow == known + 3
        assert f"{known + 3} of {run.plan().model.parameters} weights are too small for float16 and have become 0" in (
            caplog.text
        )
        assert "model.norm.weight" in caplog.text


@pytest.mark.parametrize("began", [False, True], ids=["float16", "bfloat16"])
def test_a_run_keeps_the_type_that_it_began_with(workplace: Workplace, began: bool) -> None:
    auto: dict[str, Any] = {"type": "lora", "rank": 4}
    settings = workplace.settings
    workplace.settings = dataclasses.replace(settings, gpu=dataclasses.replace(REFERENCE, native_bf16=began))
    first = prepared(workplace, auto, training=SHORT)
    assert first.plan().resolved.dtype == ("bfloat16" if began else "float16")
    assert attempt(first) == 0
    more = {"training": SHORT | {"max_steps": 3}, "resume_from": first.id}
    workplace.settings = dataclasses.replace(settings, gpu=dataclasses.replace(REFERENCE, native_bf16=not began))
    if began:
        with pytest.raises(Rejected, match=r"trains in bfloat16, and .* has no native bf16") as caught:
            prepared(workplace, auto, **more)
        assert (caught.value.detail_code, caught.value.param) == ("no_native_bf16", "resume_from")
        return
    second = prepared(workplace, auto, **more)
    assert second.plan().resolved.dtype == "float16"
    assert attempt(second) == 0
    assert facts(second, ModelLoaded)[0].resumed_step == first.plan().steps
