"""Compiled layers: the same gradients, the same graphs for every shape, the same bits for the same seed; else eager.

Most tests trace graphs and differentiate them without generating code (`aot_eager`), which would take minutes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.compilers import nop

from jobs.attempt import Heartbeat
from jobs.disk.rundir import RunDir
from jobs.trainer_facts import ModelLoaded
from tests.training.attempts import attempt, facts, finished
from tests.training.conftest import tiny_model
from tests.training.tasks.seq2seq.comparison import SHAPES, by_us, distances, draw_batch, run_by
from worker.training.journal import Journal
from worker.training.network import guards
from worker.training.optimizers.adamw import AdamW
from worker.training.steps.randomness import seed_step
from worker.training.tasks.compiled import set_dropout
from worker.training.tasks.seq2seq import compiled
from worker.training.tasks.seq2seq.compiled import CompiledBlocks, compile_blocks
from worker.training.tasks.seq2seq.fused import fuse
from worker.training.tasks.seq2seq.loss import token_loss_sum

# Tracing looks at the gradient of everything that goes into a graph.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


def fused_model(dropout: float, **config: Any) -> Any:
    model = tiny_model(dropout_rate=dropout, **config).double().train()
    fuse(model)
    return model


def test_one_set_of_graphs_serves_every_shape_with_the_gradients_of_eager_layers(tmp_path: Path) -> None:
    model = fused_model(0.0, num_layers=2)
    pointers = guards.pointers_of(model)
    generator = torch.get_rng_state()
    journal = Journal(tmp_path / "journal.jsonl")
    counters.clear()
    blocks = compile_blocks(model, journal, "aot_eager")
    graphs = counters["stats"]["unique_graphs"]
    assert blocks.failure is None
    # Encoder: several rows padded or not, a row alone. Decoder: the same, and whether a row alone is padded.
    assert graphs == 7
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(parameter.grad is None for parameter in model.parameters())
    guards.check_not_copied(model, pointers)
    assert '"phase":"compile"' in (tmp_path / "journal.jsonl").read_text().replace(" ", "")

    for recompute in (False, True):
        if recompute:
            model.activation_checkpointing_enable({"use_reentrant": False}, every_n_layers=1)
        for shape in SHAPES:
            for padded in (True, False):
                batch = draw_batch(*shape, padded=padded)
                found = by_us(model, batch)
                run_by(model, None)
                assert max(distances(found, by_us(model, batch)).values()) < 1e-9
                run_by(model, blocks)
    model.eval()
    with torch.no_grad():
        token_loss_sum(model, **draw_batch(5, 16, 24))  # evaluation and generation are eager
        model.generate(input_ids=torch.tensor([[5, 6, 1]]), max_new_tokens=4)
    assert counters["stats"]["unique_graphs"] == graphs, "nothing was compiled after the warm-up"


class Backend:
    """Traces graphs like `aot_eager`; from the `ends`-th graph on it fails."""

    def __init__(self, ends: int, error: Exception) -> None:
        self.ends, self.error, self.graphs = ends, error, 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.graphs += 1
        if self.graphs >= self.ends:
            raise self.error
        return graph.forward


@pytest.mark.parametrize("ends", [1, 2])
def test_any_error_of_the_compiler_leaves_eager_layers_and_is_told(
    ends: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`ends` 2: the encoder is compiled already, and recomputed in the backward pass, when the decoder fails."""
    model, batch = fused_model(0.3), draw_batch(3, 16, 24)
    model.activation_checkpointing_enable({"use_reentrant": False}, every_n_layers=1)
    torch.manual_seed(1)
    expected = by_us(model, batch)
    blocks = compile_blocks(model, Journal(tmp_path / "journal.jsonl"), Backend(ends, RuntimeError("no such gcc")))
    assert blocks.failure is not None and "no such gcc" in blocks.failure
    assert [record.levelname for record in caplog.records if "no such gcc" in record.message] == ["WARNING"]
    torch.manual_seed(1)
    assert max(distances(by_us(model, batch), expected).values()) == 0


def test_an_error_in_the_middle_of_a_run_costs_nothing_but_speed(caplog: pytest.LogCaptureFixture) -> None:
    model, batch = fused_model(0.0), draw_batch(3, 16, 24)
    model.activation_checkpointing_enable({"use_reentrant": False}, every_n_layers=1)
    expected = by_us(model, batch)
    backend = Backend(2, ValueError("an unheard-of shape"))
    blocks = CompiledBlocks(backend)
    run_by(model, blocks)
    assert max(distances(by_us(model, batch), expected).values()) < 1e-9
    assert blocks.failure == "ValueError: an unheard-of shape"
    assert len([record for record in caplog.records if record.name == "longhaul.trainer"]) == 1
    tried = backend.graphs
    assert max(distances(by_us(model, batch), expected).values()) == 0
    assert backend.graphs == tried, "it is not tried again"


def no_backward(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    raise RuntimeError("no code for the backward pass")


def no_launch(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Compiles to what Triton refuses to launch."""

    def launch(*arguments: Any) -> Any:
        raise type("OutOfResources", (Exception,), {"__module__": "triton.runtime.errors"})("shared memory")

    return launch


@pytest.mark.parametrize(
    ("backend", "failure"),
    [
        (aot_autograd(fw_compiler=nop, bw_compiler=no_backward), "RuntimeError: no code for the backward pass"),
        (no_launch, "OutOfResources: shared memory"),
    ],
)
def test_errors_of_the_backward_pass_and_of_triton_leave_eager_layers(
    backend: Callable[..., Any], failure: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, batch = fused_model(0.0), draw_batch(3, 16, 24)
    expected = by_us(model, batch)
    blocks = CompiledBlocks(backend)
    run_by(model, blocks)
    assert max(distances(by_us(model, batch), expected).values()) == 0
    assert blocks.failure == failure
    logged = [record.message for record in caplog.records if record.name == "longhaul.trainer"]
    assert logged == [f"layers are not compiled from here on: {failure}"]


def test_memory_that_runs_out_while_compiling_is_not_an_error_of_the_compiler(tmp_path: Path) -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    model = fused_model(0.0)
    with pytest.raises(RuntimeError, match="out of memory"):
        compile_blocks(model, Journal(tmp_path / "journal.jsonl"), Backend(1, error))
    assert model.encoder.compiled.failure is None


def test_errors_of_the_model_itself_pass_through() -> None:
    model = fused_model(0.0)
    run_by(model, CompiledBlocks(Backend(99, RuntimeError())))
    with pytest.raises(IndexError):
        token_loss_sum(model, torch.tensor([[10**6] * 8]), None, torch.ones(1, 8, dtype=torch.int64))


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit_with_generated_code() -> None:
    """Dropout included: compiled code draws from seeds that come of the step's."""

    def model_and_optimizer() -> tuple[Any, AdamW]:
        model = fused_model(0.0).bfloat16()
        set_dropout(model, 0.2)
        model.encoder.compiled = blocks  # half of it is enough, and takes half the time
        return model, AdamW(model.named_parameters(), weight_decay=0.0, max_grad_norm=1.0, fused=True)

    def steps(model: Any, optimizer: AdamW, numbers: range) -> list[float]:
        losses = []
        for number in numbers:
            seed_step(42, number)
            loss = token_loss_sum(model, **draw_batch(3 + number, 16, 24)) / 50
            loss.backward()
            optimizer.step(number, 0.01, loss.detach())
            model.zero_grad()
            losses.append(loss.item())
        return losses

    blocks = CompiledBlocks()
    model, optimizer = model_and_optimizer()
    first = steps(model, optimizer, range(1, 3))
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    states = {name: tensor.clone() for name, tensor in optimizer.state_dict().items()}
    rest = steps(model, optimizer, range(3, 5))

    torch.rand(5)
    again, optimizer_again = model_and_optimizer()
    again.load_state_dict(weights)
    optimizer_again.load_state_dict(states)
    assert steps(again, optimizer_again, range(3, 5)) == rest
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())
    assert blocks.failure is None and len({*first, *rest}) == 4
    seed_step(43, 4)
    batch = draw_batch(7, 16, 24)
    losses = {token_loss_sum(again, **batch).item() for _ in range(3)}
    assert len(losses) == 3, "masks differ from pass to pass"


@pytest.mark.parametrize("works", [True, False])
def test_an_attempt_says_whether_its_layers_are_compiled(
    works: bool, make_run: Callable[..., RunDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not works:
        broken = Backend(1, RuntimeError("no such gcc"))
        monkeypatch.setattr(compiled, "compile_blocks", lambda model, journal: compile_blocks(model, journal, broken))
    run = make_run(speed={"compile": True}, training={"epochs": 1})
    with torch.compiler.set_stance("force_eager" if works else "default"):
        assert attempt(run) == 0
    assert [fact.compiled for fact in facts(run, ModelLoaded)] == [works]
    phases = [line.phase for line in run.attempt_lines(1) if isinstance(line, Heartbeat)]
    assert phases[:2] == ["load", "compile"]
    assert finished(run).reason == "done"
