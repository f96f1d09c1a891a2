"""What is live, by category, and when it was most: the same with data and without."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from worker.training.planning import tracker as counted
from worker.training.planning.kernels import WithoutData
from worker.training.planning.tracker import MetaResults, Tracker

KIB = torch.Size([256])  # fp32


def test_storages_count_from_first_to_last_use_whoever_holds_them() -> None:
    with Tracker(torch.device("cpu")) as tracker:
        one = torch.empty(KIB)
        view = one.view(16, 16).t()
        two = one + view.reshape(-1)  # a transposed view is copied, then dropped
        assert tracker.total == 2048
        assert tracker.peak == 3072
        del one
        assert tracker.total == 2048  # the view holds it
        del view
        assert tracker.total == 1024
        del two
        assert tracker.total == 0


def test_categories_and_what_was_there_before() -> None:
    weight = torch.empty(KIB, requires_grad=True)
    tracker = Tracker(torch.device("cpu"))
    tracker.add([weight], counted.WEIGHTS)
    with tracker:
        tracker.category = counted.ACTIVATIONS
        loss = (weight * 2).exp().sum()
        tracker.category = counted.TEMPORARIES
        loss.backward()
    assert weight.grad is not None
    tracker.add([weight.grad], counted.GRADIENTS)
    assert tracker.live[counted.WEIGHTS] == tracker.live[counted.GRADIENTS] == 1024
    assert tracker.live[counted.ACTIVATIONS] == loss.nbytes
    assert sum(tracker.live) == tracker.total


def test_what_was_dropped_since_the_peak_is_known() -> None:
    with Tracker(torch.device("cpu")) as tracker:
        tracker.category = counted.ACTIVATIONS
        kept, dropped = torch.empty(KIB), torch.empty(KIB)
        del dropped
        parts, freed = tracker.at_peak()
        assert (parts[counted.ACTIVATIONS], freed[counted.ACTIVATIONS]) == (2048, 1024)
        tracker.begin()
        assert tracker.peak == kept.nbytes


def test_sizes_are_rounded_and_other_devices_do_not_count() -> None:
    with Tracker(torch.device("meta"), granularity=512) as tracker:
        on_host = torch.empty(100)
        empty = torch.empty(0, device="meta")
        small, larger = torch.empty(1, device="meta"), torch.empty(129, device="meta")
        assert tracker.total == 512 + 1024
        assert on_host.device.type == "cpu" and not empty.numel() and small.is_meta and larger.is_meta


def test_what_a_kernel_holds_inside_counts_at_its_time_only() -> None:
    with Tracker(torch.device("cpu"), inside=lambda *_: 5000) as tracker:
        one = torch.empty(KIB)
        assert (tracker.total, tracker.peak) == (one.nbytes, one.nbytes + 5000)
        parts, _ = tracker.at_peak()
        assert sum(parts) == tracker.peak


def test_questions_about_values_are_answered() -> None:
    count = torch.zeros((), dtype=torch.int64)
    with WithoutData(cuda=False):
        number, mask = torch.empty((), device="meta"), torch.empty(4, dtype=torch.bool, device="meta")
        assert number.item() == 1.0
        assert torch.stack([number, number]).tolist() == [1.0, 1.0]
        assert not mask.all()
        assert number.data_ptr() != mask.data_ptr()
        # What has data answers for itself.
        assert int(count) == 0 and count.item() == 0 and not bool(count)


@pytest.mark.parametrize("bias", [None, torch.bool, torch.bfloat16])
def test_attention_of_a_gpu_keeps_no_scores(bias: torch.dtype | None) -> None:
    heads = torch.empty(2, 4, 64, 16, dtype=torch.bfloat16, device="meta", requires_grad=True)
    mask = None if bias is None else torch.empty(1, 1, 64, 64, dtype=bias, device="meta")
    tracker = Tracker(torch.device("meta"))
    with WithoutData(cuda=True), tracker:
        out = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask, dropout_p=0.1)
        assert out.shape == heads.shape
        assert tracker.total < 2 * heads.nbytes + 64 * 64 * 2


def test_what_comes_out_on_meta_is_the_same_when_it_is_known_already() -> None:
    results, aten = MetaResults(), torch.ops.aten
    wide, half = torch.empty(4, 6, device="meta"), torch.empty(4, 6, dtype=torch.bfloat16, device="meta")
    whole = torch.empty(4, 6, dtype=torch.int64, device="meta")
    transposed = torch.empty(6, 4, device="meta").t()
    asked: list[tuple[Any, tuple[Any, ...]]] = [
        *((aten.add.Tensor, (one, other)) for one in (wide, half, whole) for other in (1, 1.0, True, wide, transposed)),
        *((aten.exp.default, (one,)) for one in (wide, half, transposed, wide[1:, ::2])),
        (aten.mm.default, (wide, wide.t())), (aten.sum.dim_IntList, (wide, [0])), (aten.sum.dim_IntList, (wide, [1])),
        (aten.native_dropout.default, (half, 0.1, True)), (aten.cat.default, ([wide, transposed], 1)),
        (aten.native_layer_norm_backward.default,
         (wide, wide, [6], wide[:, :1], wide[:, :1], None, None, [True, False, False])),
    ]  # fmt: skip

    def facts(result: Any) -> list[Any]:
        each = [result] if isinstance(result, torch.Tensor) else result
        return [
            one is not None and (one.shape, one.stride(), one.dtype, one.untyped_storage().nbytes()) for one in each
        ]

    plain = [facts(func(*args)) for func, args in asked]
    for _ in range(2):
        assert [facts(results.run(func, args, {})) for func, args in asked] == plain
    tensors = [results.run(aten.exp.default, (wide,), {}) for _ in range(3)]
    assert len({each.untyped_storage()._cdata for each in (wide, *tensors)}) == 4
    torch.set_default_dtype(torch.float64)
    try:
        assert results.run(aten.add.Tensor, (whole, 1.0), {}).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_views_changes_and_what_has_data_are_never_taken_for_known() -> None:
    results, aten = MetaResults(), torch.ops.aten
    given, on_host = torch.empty(4, 6, device="meta"), torch.zeros(3)
    for _ in range(2):
        view = results.run(aten._unsafe_view.default, (given, [24]), {})
        assert view.untyped_storage()._cdata == given.untyped_storage()._cdata
        assert results.run(aten.add_.Tensor, (given, given), {}) is given
        on_host += 1
        assert torch.equal(results.run(aten.exp.default, (on_host,), {}), on_host.exp())
