"""Head and loss in one: the numbers of cross entropy on fp32 logits, in a fraction of the memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.training.conftest import tiny_model
from worker.training.kernels import head_loss
from worker.training.tasks.seq2seq.fused import fuse
from worker.training.tasks.seq2seq.loss import FusedHead, token_loss_sum

ROWS, WIDTH, VOCABULARY = 37, 24, 100
BOUNDS = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2**-7}


def make(dtype: torch.dtype) -> tuple[torch.Tensor, FusedHead, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    head = FusedHead(WIDTH, VOCABULARY, bias=False).to(dtype)
    with torch.no_grad():
        head.weight.copy_(torch.randn(VOCABULARY, WIDTH, generator=generator))
    labels = torch.randint(VOCABULARY, (ROWS,), generator=generator)
    labels[[3, 4, -1]] = -100
    return torch.randn(ROWS, WIDTH, generator=generator).to(dtype).requires_grad_(), head, labels


def plain(hidden: torch.Tensor, head: FusedHead, labels: torch.Tensor) -> torch.Tensor:
    logits = head(hidden)
    exact = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(exact, labels, ignore_index=-100, reduction="sum")


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("rows", [1, 8, 37, 1000])
@pytest.mark.parametrize("most_kept", [0, 2**28])
def test_loss_and_gradients_are_those_of_cross_entropy(
    most_kept: int, rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_loss, "_MOST_KEPT", most_kept)
    monkeypatch.setattr(head_loss, "_rows", lambda weight: rows)
    hidden, head, labels = make(dtype)
    results = []
    for function in (FusedHead.loss_sum, lambda head, hidden, labels: plain(hidden, head, labels)):
        loss = function(head, hidden, labels)
        (loss / 34).backward()
        assert hidden.grad is not None and head.weight.grad is not None
        results.append([loss.detach(), hidden.grad, head.weight.grad])
        hidden.grad = head.weight.grad = None
    assert results[0][0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert float(results[0][0]) == pytest.approx(float(results[1][0]), rel=1e-6 if dtype != torch.float64 else 1e-13)
    for one, other in zip(results[0][1:], results[1][1:], strict=True):
        assert float((one - other).double().norm()) <= BOUNDS[dtype] * float(other.double().norm())
    assert not results[0][1][[3, 4, -1]].any(), "what does not count has no gradient"


def test_a_head_is_trained_alone_on_hidden_states_that_are_not() -> None:
    hidden, head, labels = make(torch.float64)
    gradients = []
    for function in (FusedHead.loss_sum, lambda head, hidden, labels: plain(hidden, head, labels)):
        function(head, hidden.detach(), labels).backward()
        gradients.append(head.weight.grad)
        head.weight.grad = None
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


def test_a_step_of_padding_alone_is_zero() -> None:
    hidden, head, labels = make(torch.float32)
    loss = head.loss_sum(hidden, torch.full_like(labels, -100))
    loss.backward()
    assert loss == 0 and hidden.grad is not None and not hidden.grad.any()


def test_without_gradients_logits_are_never_held_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_loss, "_rows", lambda weight: 8)
    hidden, head, labels = make(torch.float32)
    largest = Largest(ROWS * VOCABULARY)
    with torch.no_grad(), largest:
        loss = head.loss_sum(hidden, labels)
    assert not loss.requires_grad and largest.bytes == 0
    torch.testing.assert_close(loss, plain(hidden, head, labels).detach())


class Largest(TorchDispatchMode):
    """Bytes of all tensors with as many numbers as the logits that were made, views left out."""

    def __init__(self, numbers: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.numbers = numbers
        self.seen: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.numel() == self.numbers:
                self.seen[tensor.untyped_storage().data_ptr()] = tensor  # kept, so that no address is used twice
        return result

    @property
    def bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self.seen.values())


def test_logits_are_held_once_and_in_the_precision_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_loss, "_rows", lambda weight: 8)
    hidden, head, labels = make(torch.bfloat16)

    def made(loss: Callable[[], torch.Tensor]) -> int:
        largest = Largest(ROWS * VOCABULARY)
        with largest:
            loss().backward()
        return largest.bytes

    assert made(lambda: head.loss_sum(hidden, labels)) == 2 * ROWS * VOCABULARY
    assert made(lambda: plain(hidden, head, labels)) >= 14 * ROWS * VOCABULARY


def test_of_a_frozen_head_no_logits_are_held_and_no_gradient_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_loss, "_rows", lambda weight: 8)
    hidden, head, labels = make(torch.bfloat16)
    head.weight.requires_grad_(False)
    largest = Largest(ROWS * VOCABULARY)
    with largest:
        head.loss_sum(hidden, labels).backward()
    assert largest.bytes == 0 and head.weight.grad is None
    frozen, hidden.grad = hidden.grad, None
    plain(hidden, head, labels).backward()
    assert frozen is not None and hidden.grad is not None
    assert float((frozen - hidden.grad).double().norm()) <= BOUNDS[torch.bfloat16] * float(hidden.grad.double().norm())


@pytest.mark.parametrize("fused", [True, False])
def test_the_loss_is_a_sum_over_labels_that_count_in_fp32(fused: bool) -> None:
    model = tiny_model(dropout_rate=0.0).bfloat16()
    if fused:
        fuse(model)
    ids, labels = torch.tensor([[5, 6, 7, 1], [8, 9, 1, 0]]), torch.tensor([[4, 3, 1, -100], [9, 1, -100, -100]])
    together = token_loss_sum(model, ids, (ids != 0).long(), labels)
    alone = [
        token_loss_sum(model, ids[:1], None, labels[:1, :3]),
        token_loss_sum(model, ids[1:, :3], None, labels[1:, :2]),
    ]
    assert together.dtype == torch.float32 and together.ndim == 0
    assert together.item() == pytest.approx(sum(loss.item() for loss in alone), rel=5e-3)
    assert together.item() / 5 == pytest.approx(torch.tensor(64.0).log().item(), rel=0.3)
