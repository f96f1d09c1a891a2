"""Gradients that are added to `.grad` in the backward pass: those of plain autograd, without one as large beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.training.tasks.seq2seq.test_loss import Largest
from worker.training.kernels import head_loss
from worker.training.kernels.gradient_sums import SummedEmbedding

VOCABULARY, WIDTH, PADDING = 50, 6, 0
IDS = torch.tensor([[7, 7, 3, 49, 7, 3, 12], [12, 9, 7, 3, PADDING, PADDING, PADDING]])
LABELS = torch.tensor([7, 3, 49, -100, 3, 12, 30, 9, 7, 3, -100, -100, -100, 5])


@dataclass
class ToyModel:
    embedding: nn.Embedding
    between: torch.Tensor
    head: torch.Tensor

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.embedding(ids)
        return (found.flatten(0, 1) @ self.between).tanh()

    @property
    def gradients(self) -> list[torch.Tensor | None]:
        return [each.grad for each in (self.embedding.weight, self.between, self.head)]


def make(kind: type[nn.Embedding], *, tied: bool, dtype: torch.dtype = torch.float64, padding: bool = True) -> ToyModel:
    generator = torch.Generator().manual_seed(1)
    embedding = kind(VOCABULARY, WIDTH, padding_idx=PADDING if padding else None, dtype=dtype)
    with torch.no_grad():
        embedding.weight.copy_(torch.randn(VOCABULARY, WIDTH, generator=generator))
    between, head = (
        torch.randn(size, WIDTH, generator=generator).to(dtype).requires_grad_() for size in (WIDTH, VOCABULARY)
    )
    return ToyModel(embedding, between, embedding.weight if tied else head)


def ours(model: ToyModel, ids: torch.Tensor = IDS, labels: torch.Tensor = LABELS) -> torch.Tensor:
    return head_loss.head_loss(model.hidden(ids), model.head, labels)


def plain(model: ToyModel, ids: torch.Tensor = IDS, labels: torch.Tensor = LABELS) -> torch.Tensor:
    return F.cross_entropy(model.hidden(ids) @ model.head.T, labels, ignore_index=-100, reduction="sum")


def assert_equal(found: Iterable[torch.Tensor | None], expected: Iterable[torch.Tensor | None]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one is not None and other is not None
        assert float((one - other).norm()) <= 1e-12 * float(other.norm())


@pytest.mark.parametrize("most_kept", [0, 2**28], ids=["no logits", "kept logits"])
@pytest.mark.parametrize("padding", [True, False])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_sums_are_those_of_autograd(
    micro_batches: int, tied: bool, padding: bool, most_kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_loss, "_MOST_KEPT", most_kept)
    monkeypatch.setattr(head_loss, "_rows", lambda weight: 5)
    models = make(SummedEmbedding, tied=tied, padding=padding), make(nn.Embedding, tied=tied, padding=padding)
    for number in range(micro_batches):
        for model, loss in zip(models, (ours, plain), strict=True):
            (loss(model, (IDS + number) % VOCABULARY, LABELS.roll(3 * number)) / 17).backward()
    assert_equal(models[0].gradients, models[1].gradients)


@pytest.mark.parametrize("stock", ["head", "embedding"])
@pytest.mark.parametrize("tied", [True, False])
def test_one_of_the_two_may_be_left_to_autograd(tied: bool, stock: str) -> None:
    mixed = make(nn.Embedding if stock == "embedding" else SummedEmbedding, tied=tied)
    expected = make(nn.Embedding, tied=tied)
    for _ in range(2):
        (plain if stock == "head" else ours)(mixed).backward()
        plain(expected).backward()
    assert_equal(mixed.gradients, expected.gradients)


@pytest.mark.parametrize("tied", [True, False])
def test_a_recomputed_embedding_and_head_add_once(tied: bool) -> None:
    model, expected = make(SummedEmbedding, tied=tied), make(nn.Embedding, tied=tied)
    for _ in range(2):
        checkpoint(ours, model, use_reentrant=False).backward()
        plain(expected).backward()
    assert_equal(model.gradients, expected.gradients)


def test_a_weight_that_is_made_of_a_parameter_and_one_with_wider_sums_are_left_to_autograd() -> None:
    model, expected = make(SummedEmbedding, tied=False), make(nn.Embedding, tied=False)
    for one, loss in ((model, ours), (expected, plain)):
        for _ in range(2):
            loss(ToyModel(one.embedding, one.between, one.head * 2)).backward()
    assert_equal(model.gradients, expected.gradients)
    narrow = make(SummedEmbedding, tied=True, dtype=torch.bfloat16)
    narrow.head.grad_dtype = torch.float32
    for _ in range(2):
        ours(narrow).backward()
    assert narrow.head.grad is not None and narrow.head.grad.dtype == torch.float32


def test_what_is_frozen_has_no_gradient() -> None:
    model = make(SummedEmbedding, tied=False)
    model.embedding.weight.requires_grad_(False)
    model.head.requires_grad_(False)
    ours(model).backward()
    embedding, between, head = model.gradients
    assert embedding is None and head is None and between is not None and between.any()


def test_more_tokens_than_the_vocabulary_has_are_summed_up_by_torch() -> None:
    models = make(SummedEmbedding, tied=False), make(nn.Embedding, tied=False)
    for _ in range(2):
        for model, loss in zip(models, (ours, plain), strict=True):
            loss(model, IDS.repeat(4, 1), LABELS.repeat(4)).backward()
    assert_equal(models[0].gradients, models[1].gradients)


def test_in_bf16_the_sums_of_an_embedding_are_those_of_torch_bit_for_bit() -> None:
    models = [make(kind, tied=False, dtype=torch.bfloat16) for kind in (SummedEmbedding, nn.Embedding)]
    for number in range(16):
        for model in models:
            ids = (IDS + number) % VOCABULARY
            (model.embedding(ids) * torch.linspace(0.3, number, ids.numel()).view(*ids.shape, 1)).sum().backward()
    assert models[0].embedding.weight.grad is not None and models[1].embedding.weight.grad is not None
    assert torch.equal(models[0].embedding.weight.grad, models[1].embedding.weight.grad)


@pytest.mark.parametrize("micro_batches", [1, 16, 64])
def test_in_bf16_the_sums_of_a_head_are_no_less_exact(micro_batches: int) -> None:
    def error(kind: Callable[[int], torch.Tensor]) -> float:
        weight.grad = None
        for number in range(micro_batches):
            kind(number).backward()
        assert weight.grad is not None
        return float((weight.grad - exact).norm() / exact.norm())

    def whole(number: int) -> torch.Tensor:  # with a gradient that autograd adds up
        return head_loss.head_loss(hidden[number], weight * 1, labels)

    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(micro_batches, 64, 32, generator=generator).bfloat16()
    labels = torch.randint(500, (64,), generator=generator)
    weight = torch.randn(500, 32, generator=generator).bfloat16().requires_grad_()
    wide = weight.detach().double().requires_grad_()
    for one in hidden:
        head_loss.head_loss(one.double(), wide, labels).backward()
    assert wide.grad is not None
    exact = wide.grad
    found, before = error(lambda number: head_loss.head_loss(hidden[number], weight, labels)), error(whole)
    print(f"{micro_batches} micro-batches: {found:.3%}, before {before:.3%}")
    assert found <= before


@pytest.mark.parametrize("tied", [True, False])
def test_nothing_as_large_as_the_gradient_is_made_beside_it(tied: bool) -> None:
    model = make(SummedEmbedding, tied=tied)
    made = []
    for _ in range(3):
        known = [each for each in (model.embedding.weight, model.head, *model.gradients) if each is not None]
        addresses = {each.data_ptr() for each in known}
        largest = Largest(VOCABULARY * WIDTH)
        with largest:
            ours(model).backward()
        made.append(len(largest.seen.keys() - addresses))
    assert made == [1 if tied else 2, 0, 0], "the gradients themselves, in the first micro-batch"


@pytest.mark.parametrize("more", [{}, {"max_norm": 1.0}, {"scale_grad_by_freq": True}])
def test_an_embedding_in_compiled_code_or_set_to_do_more_is_that_of_torch(more: dict[str, Any]) -> None:
    torch.manual_seed(0)
    stock, ours = nn.Embedding(20, 4, **more), SummedEmbedding(20, 4, **more)
    ours.load_state_dict(stock.state_dict())
    tokens = torch.tensor([[1, 5, 5], [7, 1, 0]])
    called = ours if more else torch.compile(ours, fullgraph=True, backend="eager")
    for embedding in (stock, called):
        embedding(tokens).square().sum().backward()
    assert stock.weight.grad is not None and ours.weight.grad is not None
    assert torch.equal(stock.weight.grad, ours.weight.grad)
