"""What a model raises in its self-check refuses it, whichever task asks; but for what is no fault of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from jobs.errors import Rejected
from jobs.spec import TrainingSpec
from tests.training.tasks.causal import families as causal
from tests.training.tasks.classification import families as classification
from tests.training.tasks.seq2seq import families as seq2seq
from worker.training.planning.predictor import Predictor
from worker.training.tasks.causal.task import Causal
from worker.training.tasks.classification.task import Classification
from worker.training.tasks.seq2seq.task import Seq2Seq
from worker.training.tasks.task import Task

TASKS: dict[str, tuple[Task, Callable[[], PreTrainedModel]]] = {
    "causal": (Causal(), lambda: causal.model_of("llama")),
    "classification": (Classification(), lambda: classification.model_of("bert")),
    "seq2seq": (Seq2Seq(), lambda: seq2seq.model_of("bart")),
}


def raising(monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel, error: BaseException) -> None:
    def forward(*arguments: Any, **options: Any) -> Any:
        raise error

    monkeypatch.setattr(model, "forward", forward)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Unsupported dtype\nand more"),
        KeyError("mask"),
        ZeroDivisionError(),
        RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"),
    ],
)
@pytest.mark.parametrize("task", TASKS)
def test_an_error_refuses_the_model_by_its_class_and_first_line(
    task: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, make = TASKS[task]
    model = make().train()
    raising(monkeypatch, model, error)
    line = [*str(error).splitlines(), ""][0]
    with pytest.raises(Rejected, match=f": {type(error).__name__}: {line}$") as caught:
        asked.configure(model, fused=True, dropout=None)
    assert (caught.value.detail_code, caught.value.param) == ("self_check_failed", "model")
    assert model.training, "it is in the mode in which it was"


@pytest.mark.parametrize(
    "error",
    [KeyboardInterrupt(), MemoryError(), torch.OutOfMemoryError("CUDA out of memory"),
     RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), torch.AcceleratorError("ECC error"),
     RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
     RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`")],
    ids=lambda error: f"{type(error).__name__} {str(error)[:10]}",
)  # fmt: skip
@pytest.mark.parametrize("task", TASKS)
def test_what_is_no_fault_of_the_model_passes(task: str, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, make = TASKS[task]
    model = make()
    raising(monkeypatch, model, error)
    with pytest.raises(type(error)) as caught:
        asked.configure(model, fused=True, dropout=None)
    assert caught.value is error


def test_a_model_of_which_no_step_can_be_planned_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaModel

    def forward(*arguments: Any, **options: Any) -> Any:
        raise TypeError("unsupported operand")

    monkeypatch.setattr(LlamaModel, "forward", forward)
    with pytest.raises(Rejected, match="TypeError: unsupported operand") as caught:
        Predictor(
            causal.config_of("llama"), task=Causal(), device="cpu", fused=True, dropout=None, training=TrainingSpec()
        )
    assert caught.value.detail_code == "self_check_failed"
