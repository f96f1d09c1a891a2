"""Training on CUDA: loaded once onto the GPU, a NaN that changes nothing, real out of memory, the cache.

Each test says what it would show. `LONGHAUL_TEST_DEVICE=cpu` runs those that make sense there, to try the tests.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from jobs.disk.rundir import RunDir
from jobs.errors import NonFinite
from jobs.trainer_facts import ModelLoaded, OomRecovered
from tests.training.attempts import facts, finished
from tests.training.conftest import CONFIG, MakeRun, tiny_model, write_model
from worker.training.journal import Journal, StopSignal
from worker.training.network.model import load
from worker.training.settings import TrainerSettings
from worker.training.tasks.seq2seq.batches import PairBatch
from worker.training.tasks.seq2seq.task import Seq2Seq
from worker.training.train import train

pytestmark = pytest.mark.gpu
DEVICE = cast(Literal["cpu", "cuda"], os.environ.get("LONGHAUL_TEST_DEVICE", "cuda"))


def attempt(run: RunDir, number: int = 1) -> int:
    """One attempt on the GPU; StageErrors are raised."""
    settings = TrainerSettings(data=Path(), prepared=Path(), models=Path(), device=DEVICE, offline=True)
    return train(run, settings, Journal(run.attempt_file(number)), StopSignal(), number)


def test_a_whole_attempt_on_the_gpu(make_run: MakeRun) -> None:
    """Shows that a job learns on CUDA, in bf16, and clears the cache when it should."""
    run = make_run(memory={"empty_cache_steps": 5})
    assert attempt(run) == 0
    [loaded] = facts(run, ModelLoaded)
    assert (loaded.dtype, loaded.device) == ("bfloat16", DEVICE)
    rows = run.metrics()
    assert rows[-1].loss < rows[0].loss and rows[-1].memory_bytes > 0 and rows[-1].cache_clears == 4
    assert finished(run).reason == "done"


@pytest.mark.no_numbers
def test_the_peak_while_loading_is_the_weights(model_folder: Path) -> None:
    """Shows by the CUDA allocator that no second copy exists while loading: peak / parameter bytes ≤ 1.05."""
    shape = {"d_model": 512, "d_ff": 2048, "num_layers": 6, "num_decoder_layers": 6, "num_heads": 8, "d_kv": 64}
    large = tiny_model(**shape)
    aliases = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    tensors = {name: tensor.bfloat16() for name, tensor in large.state_dict().items() if name not in aliases}
    assert load_file(model_folder / "model.safetensors").keys() <= tensors.keys()
    save_file(tensors, model_folder / "model.safetensors", metadata={"format": "pt"})
    (model_folder / "config.json").write_text(json.dumps(CONFIG | shape))
    loaded = load(
        model_folder, torch.device(DEVICE), task=Seq2Seq(), dropout=None, fused=True, activation_checkpointing=0
    )
    assert all(parameter.device.type == DEVICE for parameter in loaded.model.parameters())
    if DEVICE == "cuda":
        assert loaded.peak_ratio <= 1.05


def test_a_nan_changes_no_weight_on_the_gpu(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shows that the flag on the device holds back the bad step and all after it, and that the step is named."""
    real, calls = PairBatch.loss_sum, 0

    def planted(batch: PairBatch, model: PreTrainedModel) -> torch.Tensor:
        nonlocal calls
        calls += model.training
        return real(batch, model) * (float("nan") if calls == 7 else 1.0)  # one micro-batch a step

    monkeypatch.setattr(PairBatch, "loss_sum", planted)
    run = make_run(memory={"micro_batch": 8}, checkpoint={"every_steps": 3}, evaluation={"every_steps": 100})
    with pytest.raises(NonFinite, match="step 7 is NaN or infinite; the weights are those of step 6"):
        attempt(run)
    newest = max(run.checkpoints.iterdir())
    assert newest.name == "step-00000006"
    assert all(tensor.isfinite().all() for tensor in load_file(newest / "model.safetensors").values())


@pytest.mark.no_numbers
@pytest.mark.skipif(DEVICE != "cuda", reason="a limit of the CUDA allocator")
def test_real_exhaustion_recovers_and_loses_no_step(make_run: MakeRun, model_folder: Path) -> None:
    """Shows that a real CUDA out-of-memory error inside a step is redone smaller: the same steps, similar losses."""
    write_model(model_folder, d_model=32, d_ff=16384)  # the activations of a step outweigh cuBLAS's workspaces
    job: dict[str, Any] = {
        "memory": {"micro_batch": 32}, "training": {"dropout": 0.0, "batch_size": 32, "learning_rate": 1e-4},
        "evaluation": {"every_steps": 1000, "samples": 0},
    }  # fmt: skip
    free = make_run("free", **job)
    assert attempt(free) == 0
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    tight = make_run("tight", **job)
    needed = max(row.memory_reserved_bytes for row in free.metrics())
    torch.cuda.set_per_process_memory_fraction(0.7 * needed / total)
    try:
        assert attempt(tight) == 0
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    recovered = facts(tight, OomRecovered)
    assert recovered and recovered[0].requested_bytes and recovered[0].reserved_bytes
    assert recovered[0].report is not None
    kept = {file.name for file in (tight.path / recovered[0].report).iterdir()}
    assert kept == {"report.json", "memory_summary.txt", "snapshot.pickle"}
    assert [row.step for row in tight.metrics()] == [row.step for row in free.metrics()]
    assert abs(tight.metrics()[-1].loss - free.metrics()[-1].loss) < 0.05
