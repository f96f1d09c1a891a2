"""What a pass adds to attention scores: made once for all layers, as small as can be, and without asking the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.training.tasks.seq2seq.comparison import by_transformers, by_us, make_batch, make_model
from worker.training.tasks.compiled import set_dropout
from worker.training.tasks.seq2seq import attention as t5_attention
from worker.training.tasks.seq2seq.fused import ALL, Patch, fuse
from worker.training.tasks.seq2seq.loss import token_loss_sum

WAITING = {"_local_scalar_dense", "is_nonzero", "nonzero", "item", "equal"}
"""Operations whose result the host needs: on a GPU, each waits until all that was asked before is done."""


class Operations(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))

    @property
    def waiting(self) -> int:
        return sum(self.counts[name] for name in WAITING)


def counted(run: Callable[[], object]) -> Operations:
    operations = Operations()
    with operations:
        run()
    return operations


@pytest.mark.parametrize("padded", [True, False])
def test_nothing_waits_for_the_device_forward_or_backward(padded: bool) -> None:
    model, batch = make_model(gated=True, tied=False), make_batch(padded)
    set_dropout(model, 0.1)
    full = make_batch(False) | {"attention_mask": torch.ones(4, 16, dtype=torch.int64)}
    assert counted(lambda: by_transformers(model, batch if padded else full)).waiting >= 2
    fuse(model)
    assert counted(lambda: by_us(model, batch)).waiting == 0
    assert counted(lambda: by_us(model, full)).waiting == 0


class Biases:
    """Remembers what was added to the scores of each attention, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[torch.Tensor | None] = []
        kernel = t5_attention._in_steps

        def noting(*arguments: Any) -> torch.Tensor:
            self.seen.append(arguments[3])
            return kernel(*arguments)

        monkeypatch.setattr(t5_attention, "_in_steps", noting)

    def shapes(self) -> list[tuple[int, ...] | None]:
        return [None if bias is None else tuple(bias.shape) for bias in self.seen]


@pytest.mark.parametrize("padded", [True, False])
def test_each_bias_is_made_once_and_only_as_large_as_it_must_be(padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    biases = Biases(monkeypatch)
    model, batch = make_model(gated=True, tied=False).bfloat16(), make_batch(padded)
    fuse(model)
    by_us(model, batch)
    encoder = (4 if padded else 1, 2, 16, 16)
    cross = (4, 1, 1, 16) if padded else None
    assert biases.shapes() == [encoder, encoder, (1, 2, 24, 24), cross, (1, 2, 24, 24), cross]
    assert biases.seen[0] is biases.seen[1] and biases.seen[2] is biases.seen[4] and biases.seen[3] is biases.seen[5]
    for bias in biases.seen:
        # What the memory-efficient kernel of CUDA asks of a bias; otherwise torch copies it in every layer.
        assert bias is None or (bias.is_contiguous() and bias.shape[-1] % 8 == 0 and bias.dtype == torch.bfloat16)
        assert bias is None or bool(bias.isfinite().all())


def test_one_row_of_padding_alone_and_one_token_alone_are_no_nan() -> None:
    model, batch = make_model(gated=True, tied=False).bfloat16(), make_batch(True)
    batch["attention_mask"][0] = 0  # no row is so; if one were, it should not spoil the others
    batch["labels"][0] = -100
    fuse(model)
    assert all(bool(tensor.isfinite().all()) for tensor in by_us(model, batch).values())


def test_a_mask_for_the_decoder_is_heeded() -> None:
    model, batch = make_model(gated=True, tied=False), make_batch(True)
    ids = batch["labels"].clamp(min=0)
    arguments = {
        "input_ids": batch["input_ids"],
        "attention_mask": batch["attention_mask"],
        "decoder_input_ids": ids,
        "decoder_attention_mask": (torch.arange(ids.shape[1]) > 2).long().expand(4, -1),
        "use_cache": False,
    }
    expected = model(**arguments).logits
    fuse(model, ["attention"])
    # The first three positions have nothing to look at: whatever they are, nobody looks at them.
    torch.testing.assert_close(model(**arguments).logits[:, 3:], expected[:, 3:], rtol=0, atol=1e-12)


@pytest.mark.parametrize("patches", [("gelu",), ("attention",), ("dropout",), ("head",)])
def test_each_patch_leaves_fewer_operations_or_smaller_ones(patches: tuple[Patch, ...]) -> None:
    """Of the CPU; `norm` and `dropout` make more and smaller ones there, and on a GPU one each."""
    model, batch = make_model(gated=True, tied=False), make_batch(True)
    stock = counted(lambda: by_us(model, batch))
    fuse(model, patches)
    ours = counted(lambda: by_us(model, batch))
    if patches in (("gelu",), ("attention",)):
        assert ours.counts.total() < stock.counts.total()
    else:
        assert ours.counts.total() < 1.1 * stock.counts.total()


def test_all_layers_share_one_bias_so_that_deeper_stacks_add_no_work_to_it() -> None:
    shallow, deep = make_model(gated=True, tied=False), make_model(gated=True, tied=False)
    deep.encoder.block.extend(make_model(gated=True, tied=False).encoder.block[1:])
    counts = []
    for model in (shallow, deep):
        fuse(model, ALL)
        batch = make_batch(True)
        counts.append(counted(partial(token_loss_sum, model, **batch)).counts)
    for name in ("embedding", "masked_fill_", "log", "where"):
        assert counts[0][name] == counts[1][name] > 0
