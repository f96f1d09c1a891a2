"""A step of every task on CUDA, full and LoRA, beside the same step on a CPU in float64; and nothing that waits.

Each test says what it would show. `LONGHAUL_TEST_DEVICE=cpu` runs them there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from jobs.spec import LoraMethod
from tests.support.samples import dataset_summary
from tests.training.tasks.causal import families as causal
from tests.training.tasks.classification import families as classification
from tests.training.tasks.seq2seq.comparison import make_model
from worker.training.adapters.lora import Lora
from worker.training.adapters.method import Full, Method
from worker.training.dataset.data import PreparedDataset, Writer
from worker.training.loop import accumulate
from worker.training.tasks.causal.task import Causal
from worker.training.tasks.classification.task import Classification
from worker.training.tasks.seq2seq.task import Seq2Seq
from worker.training.tasks.task import Batch, Task

pytestmark = pytest.mark.gpu
DEVICE = torch.device(os.environ.get("LONGHAUL_TEST_DEVICE", "cuda"))
LENGTHS = (24, 17, 9, 24, 30, 5)
TASKS: dict[str, tuple[Task, Callable[[], PreTrainedModel]]] = {
    "t5": (Seq2Seq(), lambda: make_model(gated=True, tied=False).double()),
    "qwen2": (Causal(positions=64), lambda: causal.model_of("qwen2")),
    "roberta": (Classification(), lambda: classification.model_of("roberta")),
}
METHODS: dict[str, Callable[[], Method]] = {
    "full": Full,
    "lora": lambda: Lora(LoraMethod(type="lora", rank=4)),
}
STEPS = [("t5", "full"), ("t5", "lora"), ("qwen2", "full"), ("qwen2", "lora"), ("roberta", "full"), ("roberta", "lora")]


def batches_of(task: Task, folder: Path) -> Sequence[Batch]:
    """Six rows in two micro-batches, on the CPU; what is learned is another text, some of the tokens, or a label."""
    draw = np.random.default_rng(0)
    inputs = [[*draw.integers(4, 60, length - 1).tolist(), 1] for length in LENGTHS]
    learned = {
        "seq2seq": [row[::2] for row in inputs],
        "causal": [list(range(len(row) // 2, len(row))) for row in inputs],
        "classification": [[number % 2] for number in range(len(inputs))],
    }[task.name]
    with Writer(folder, causal.VOCABULARY) as writer:
        writer.add(inputs, learned)
        writer.finish({"train": np.arange(len(inputs)), "validation": np.arange(0)}, dataset_summary())
    rows = PreparedDataset.open(folder).train
    return task.limit(rows, 3).batches(rows, [np.array([0, 3, 4]), np.array([1, 2, 5])], 0)


def model_for(name: str, method: str, *, exact: bool) -> PreTrainedModel:
    """As it trains, without dropout: in float64 on the CPU, or in bf16 on the device; the same adapters in both."""
    task, make = TASKS[name]
    model = make().bfloat16()
    model.to(DEVICE)  # type: ignore[arg-type]  # wrapped by transformers
    task.configure(model, fused=True, dropout=0.0)
    METHODS[method]().inject(model, 0, task.layout(model.config.to_dict()).head_modules)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "lora_B" in parameter_name:  # zeros: with them nothing of A would have a gradient
                parameter.copy_(torch.sin(torch.arange(parameter.numel()).view_as(parameter)) * 0.1)
    if exact:
        torch.nn.Module.to(model, torch.device("cpu"), torch.float64)
    model.train()
    return model


def gradient(model: PreTrainedModel) -> torch.Tensor:
    """[numbers] of all that is trained, in float64 on the CPU."""
    return torch.cat([each.grad.double().cpu().flatten() for each in model.parameters() if each.grad is not None])


@pytest.mark.parametrize(("name", "method"), STEPS)
def test_a_step_has_the_loss_and_the_gradient_of_the_cpu(name: str, method: str, tmp_path: Path) -> None:
    """Shows that attention without a mask, padded rows, adapters and frozen heads are right on the kernels of a GPU."""
    batches = batches_of(TASKS[name][0], tmp_path)
    expected, model = model_for(name, method, exact=True), model_for(name, method, exact=False)
    loss, found = accumulate(expected, batches), accumulate(model, batches)
    assert float(found) == pytest.approx(float(loss), rel=0.02)
    right = gradient(expected)
    assert right.norm() > 0 and (gradient(model) - right).norm() <= 0.05 * right.norm()


@pytest.mark.no_numbers
@pytest.mark.parametrize(("name", "method"), STEPS)
def test_the_host_never_waits_in_a_step(
    name: str, method: str, tmp_path: Path, refuse_waits: Callable[[], None]
) -> None:
    """Shows by CUDA's own count of synchronizations that a step of every task only queues work."""
    batches, model = batches_of(TASKS[name][0], tmp_path), model_for(name, method, exact=False)
    accumulate(model, batches)
    refuse_waits()
    accumulate(model, batches)
