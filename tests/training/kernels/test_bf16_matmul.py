"""bf16 products where the CPU has no bf16 instructions: rounded once from fp32, and all else as torch has it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests.support.stack import ROOT
from worker.training.machine.numerics import use_fp32_where_bf16_is_slow

PROGRAM = """
import torch
from worker.training.machine.numerics import use_fp32_where_bf16_is_slow


def products(a, b, c):
    into, added = torch.full_like(c[0], 7), c[0].clone()
    assert torch.mm(a[0], b[0], out=into) is into and added.addmm_(a[0], b[0], beta=0.5) is added
    added_to = torch.addmm(c[0], a[0], b[0], beta=0.5, alpha=2)
    return [a[0] @ b[0], added_to, a @ b, torch.baddbmm(c, a, b, beta=0), into, added]


assert use_fp32_where_bf16_is_slow() is not None
torch.manual_seed(0)
matrices = [torch.randn(shape).bfloat16() for shape in ((3, 5, 64), (3, 64, 7), (3, 5, 7))]
exact = products(*(matrix.double() for matrix in matrices))
in_fp32 = products(*(matrix.float() for matrix in matrices))
for ours, rounded, truth in zip(products(*matrices), in_fp32, exact, strict=True):
    assert torch.equal(ours, rounded.bfloat16())
    torch.testing.assert_close(rounded.double(), truth, rtol=1e-5, atol=1e-5)

for into in (lambda a, b, c: torch.mm(a[0], b[0], out=c[0]), lambda a, b, c: c[0].addmm_(a[0], b[0])):
    with torch.profiler.profile() as profiler:
        into(*matrices)
    assert "aten::_to_copy" in {event.key for event in profiler.key_averages()}, "not torch's own kernel"

layer = torch.nn.Linear(64, 8, dtype=torch.bfloat16)
values = torch.randn(5, 64, dtype=torch.bfloat16, requires_grad=True)
kept = []
with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one.dtype) or one, lambda one: one):
    result = layer(values)
result.sum().backward()
assert kept and set(kept) == {torch.bfloat16}
assert values.grad.dtype is layer.weight.grad.dtype is torch.bfloat16
print("as it should be")
"""


@pytest.mark.skipif(sys.platform != "linux" or os.uname().machine != "x86_64", reason="oneDNN's limit is one of x86-64")
def test_products_are_those_of_fp32_rounded_once() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        cwd=ROOT,
        env=os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "as it should be\n", done.stderr


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no bf16 instructions: see the test above"
)
def test_a_cpu_with_bf16_instructions_keeps_the_kernels_of_torch() -> None:
    assert use_fp32_where_bf16_is_slow() is None
