"""The budget as a hard limit, on the CPU for real: what it allows can be had, and no more."""

from __future__ import annotations

import multiprocessing
import resource
from pathlib import Path

import pytest
import torch

from jobs.memory_plan import TEST_LIMIT
from jobs.spec import TrainingSpec, parse_spec
from jobs.text.units import GIB, MIB
from tests.training.conftest import tiny_spec
from worker.training.dataset.data import PreparedDataset
from worker.training.machine.out_of_memory import is_out_of_memory
from worker.training.machine.usage import process_bytes
from worker.training.memory.hard_limit import gpu_fraction, limit_of, on_gpu, on_host, tensor_bytes, warm_up
from worker.training.network.model import LoadedModel, load
from worker.training.optimizers.optimizer import Optimizer, make_optimizer
from worker.training.planning.memory_plan import CONTEXT_BYTES
from worker.training.settings import from_environment
from worker.training.tasks.seq2seq.task import Seq2Seq

CPU = torch.device("cpu")
ROOM = 128 * MIB


@pytest.fixture
def loaded(model_folder: Path) -> LoadedModel:
    return load(model_folder, CPU, task=Seq2Seq(), dropout=None, fused=True, activation_checkpointing=0)


@pytest.fixture
def optimizer(loaded: LoadedModel) -> Optimizer:
    return make_optimizer("adamw", loaded.model.named_parameters(), TrainingSpec(), fused=True)


def test_the_limit_is_what_the_job_says_or_what_a_test_does(caplog: pytest.LogCaptureFixture) -> None:
    auto, set_ = tiny_spec().memory, parse_spec({"data": {"train": "a.jsonl"}, "memory": {"budget": 1.5}}).memory
    assert limit_of(auto, None) is None
    assert limit_of(set_, None) == int(1.5 * GIB)
    assert not caplog.records
    assert limit_of(auto, 7) == limit_of(set_, 7) == limit_of(auto, 7, 9) == 7
    assert limit_of(auto, None, 9) == limit_of(set_, None, 9) == 9, "a trial has what it reserves"
    assert f"{TEST_LIMIT} is set: this attempt gets 7 bytes" in caplog.text
    assert from_environment({"LONGHAUL_DEVICE": "cpu"}).test_memory_limit is None
    assert from_environment({"LONGHAUL_DEVICE": "cpu", TEST_LIMIT: "123"}).test_memory_limit == 123


def test_of_a_gpu_the_allocator_gets_what_the_context_leaves() -> None:
    assert gpu_fraction(16 * GIB + CONTEXT_BYTES, 32 * GIB) == 0.5
    assert gpu_fraction(64 * GIB, 32 * GIB) == 1.0
    assert gpu_fraction(CONTEXT_BYTES - 1, 32 * GIB) == 0.0


def test_tensors_get_what_the_limit_leaves_beside_weights_and_states(model_folder: Path, dataset_folder: Path) -> None:
    """In a process of its own: what a long test process has freed is still its own, and can be had again."""
    process = multiprocessing.get_context("spawn").Process(target=ask_for_room, args=(model_folder, dataset_folder))
    process.start()
    process.join(120)
    assert process.exitcode == 0, "the traceback is in what was captured"


def ask_for_room(model_folder: Path, dataset_folder: Path) -> None:
    """What may be had under a limit, and what not."""
    model = load(model_folder, CPU, task=Seq2Seq(), dropout=None, fused=True, activation_checkpointing=0)
    states = make_optimizer("adamw", model.model.named_parameters(), TrainingSpec(), fused=True)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    alive = tensor_bytes(model.model, states)
    assert alive == pytest.approx(model.parameters * (2 + 12), rel=0.1)
    with on_host(CPU, alive + ROOM, model, states, PreparedDataset.open(dataset_folder).train):
        kept = torch.empty(ROOM - 8 * MIB, dtype=torch.uint8)
        with pytest.raises(RuntimeError) as caught:
            torch.empty(ROOM // 2, dtype=torch.uint8)
        assert is_out_of_memory(caught.value)
        del kept
        torch.empty(ROOM - 8 * MIB, dtype=torch.uint8)
        with pytest.raises(RuntimeError):
            torch.empty(ROOM + 8 * MIB, dtype=torch.uint8)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    torch.empty(ROOM + 8 * MIB, dtype=torch.uint8)


def test_weights_that_are_mapped_from_their_file_are_in_the_limit_and_writing_to_them_costs_nothing(
    tmp_path: Path, loaded: LoadedModel, optimizer: Optimizer, dataset: PreparedDataset
) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(ROOM))
    data = process_bytes("VmData")
    mapped = torch.from_file(str(file), shared=False, size=ROOM, dtype=torch.uint8)
    assert process_bytes("VmData") - data == pytest.approx(ROOM, abs=MIB)
    loaded.model.register_buffer("mapped", mapped)
    limit = tensor_bytes(loaded.model, optimizer) + 8 * MIB
    with on_host(CPU, limit, loaded, optimizer, dataset.train):
        mapped.add_(1)
    assert int(mapped[-1]) == 1 and file.read_bytes()[-1] == 0


def test_the_warm_up_leaves_no_trace(loaded: LoadedModel, dataset: PreparedDataset) -> None:
    weights = {name: value.clone() for name, value in loaded.model.state_dict().items()}
    for training in (True, False):
        loaded.model.train(training)
        torch.manual_seed(3)
        state = torch.get_rng_state()
        warm_up(loaded, dataset.train)
        assert torch.equal(torch.get_rng_state(), state)
        assert loaded.model.training is training
        assert all(parameter.grad is None for parameter in loaded.model.parameters())
    assert all(torch.equal(value, weights[name]) for name, value in loaded.model.state_dict().items())


def test_without_a_limit_nothing_is_done(
    loaded: LoadedModel, optimizer: Optimizer, dataset: PreparedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "setrlimit", lambda *limits: pytest.fail("limited"))
    with on_gpu(CPU, 7), on_host(CPU, None, loaded, optimizer, dataset.train):
        pass
