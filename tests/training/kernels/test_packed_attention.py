"""Attention within rows behind each other against torch's, row by row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from worker.training.kernels.packed_attention import PackedRows, packed_attention

HEADS, WIDTH, SCALE = 3, 12, 0.4
LENGTHS = (
    np.array([5, 17, 8, 1, 16, 6, 23]),
    np.array([8, 8, 16]),
    np.array([3]),
)


def drawn(rows: PackedRows, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Query, key, value."""
    draw = torch.Generator().manual_seed(0)
    size = len(rows.places), WIDTH
    return [torch.randn(size, dtype=torch.float64, generator=draw).to(dtype).requires_grad_() for _ in range(3)]


def row_by_row(tensors: list[torch.Tensor], rows: PackedRows, lengths: list[int]) -> list[torch.Tensor]:
    """[length, H·D] of each row, in the order of groups."""
    found = []
    for first, length in zip(rows.firsts.tolist(), lengths, strict=True):
        alone = [
            each[first : first + length].view(1, length, HEADS, WIDTH // HEADS).transpose(1, 2) for each in tensors
        ]
        attended = F.scaled_dot_product_attention(alone[0], alone[1], alone[2], scale=SCALE)
        found.append(attended.transpose(1, 2).reshape(length, WIDTH))
    return found


@pytest.mark.parametrize("lengths", LENGTHS)
def test_places_are_those_of_the_tokens(lengths: np.ndarray) -> None:
    width = int(lengths.max()) + 3
    rows = PackedRows.of(lengths, width)
    padded = torch.arange(len(lengths) * width).view(len(lengths), width)
    packed = padded.flatten()[rows.places]
    tokens = int(lengths.sum())
    assert len(packed) > tokens and len(packed) % 16 == 0
    assert sorted(packed[:tokens].tolist()) == sorted(
        token for row, length in zip(padded, lengths, strict=True) for token in row[:length].tolist()
    )
    assert packed[rows.firsts[rows.order]].tolist() == padded[:, 0].tolist()
    assert rows.within[:tokens].tolist() == (packed[:tokens] % width).tolist()
    assert rows.together.argsort()[:tokens].tolist() == rows.apart[rows.apart < tokens].tolist()


@pytest.mark.parametrize("one", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_results_and_gradients_are_those_of_torch(lengths: np.ndarray, one: bool) -> None:
    rows = PackedRows.of(lengths, int(lengths.max()))
    tensors = drawn(rows)
    sorted_lengths = lengths[rows.order.argsort().numpy()].tolist()
    wanted = row_by_row(tensors, rows, sorted_lengths)
    query, key, value = tensors
    if one:
        expected = torch.stack([row[0] for row in wanted])
        found = packed_attention(query[rows.firsts], key, value, rows, HEADS, SCALE, 0.0)
    else:
        expected = torch.cat(wanted)
        found = packed_attention(query, key, value, rows, HEADS, SCALE, 0.0)
        assert found.shape == query.shape and not found[len(expected) :].any()
        found = found[: len(expected)]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    given = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for gradient, other in zip(
        torch.autograd.grad(found, tensors, given), torch.autograd.grad(expected, tensors, given), strict=True
    ):
        torch.testing.assert_close(gradient, other, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("one", [False, True])
def test_gradients_with_dropout_are_those_of_what_was_dropped(one: bool) -> None:
    lengths = np.array([5, 8, 2])
    rows = PackedRows.of(lengths, 8)
    query, key, value = drawn(rows)

    def seeded(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        found = packed_attention(query, key, value, rows, HEADS, SCALE, 0.4)
        return found if one else found[: lengths.sum()]

    asked = query.detach()[rows.firsts].requires_grad_() if one else query
    assert not torch.equal(seeded(asked, key, value), packed_attention(asked, key, value, rows, HEADS, SCALE, 0.0))
    assert torch.autograd.gradcheck(seeded, (asked, key, value))


def test_bf16_is_computed_in_fp32() -> None:
    lengths = np.array([40, 64, 9])
    rows = PackedRows.of(lengths, 64)
    query, key, value = (each.detach() for each in drawn(rows, torch.bfloat16))
    exact = packed_attention(query.double(), key.double(), value.double(), rows, HEADS, SCALE, 0.0)
    found = packed_attention(query, key, value, rows, HEADS, SCALE, 0.0)
    assert found.dtype == torch.bfloat16
    assert float((found - exact).norm() / exact.norm()) < 0.003
