"""Why Qwen2.5-7B with adapters of rank 128 fits a GPU of 24 GB in one setting and not in another: from config.json."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.disk.rundir import RunDir
from jobs.errors import Rejected
from jobs.gpus import GpuFacts
from jobs.memory_plan import MemoryPlan
from jobs.spec import TrainingSpec
from jobs.text.units import GIB, MIB
from tests.training.hub_server import NAME, Hub, running_hub
from tests.training.workplace import EXAMPLES, Workplace
from worker.training.planning.ladder import Setting
from worker.training.planning.predictor import Predictor
from worker.training.steps.shape import MicroBatchShape
from worker.training.tasks.causal import builtin
from worker.training.tasks.causal.task import Causal

pytestmark = pytest.mark.usefixtures("traced_once")
QWEN_7B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
    "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "tie_word_embeddings": False,
    "vocab_size": 152064,
}  # fmt: skip
FLAT = QWEN_7B | {"num_hidden_layers": 4}
"""For choices that any depth has."""
FLOAT32 = {"adapter_dtype": "float32"}
GPU = GpuFacts("NVIDIA GeForce RTX 4090", int(23.5 * GIB))
TURING = GpuFacts("Quadro RTX 6000", 24_220 * MIB, native_bf16=False)
"""That of the people who could not train it (ADR 11)."""


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workplace]:
    """A hub that has config and tokenizer; its weights nobody could fetch."""
    folder = tmp_path / "hub"
    folder.mkdir()
    builtin.learn_tokenizer(["some text"]).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(QWEN_7B))
    (folder / "model.safetensors").write_bytes(b"no weights")
    place = Workplace(tmp_path / "place", offline=False)
    place.settings = dataclasses.replace(place.settings, device="cuda", gpu=GPU)
    (place.data / "chats.jsonl").write_bytes(EXAMPLES.with_name("chats.jsonl").read_bytes())
    with running_hub(monkeypatch) as server:
        server.repositories[f"models/{NAME}"] = folder
        yield place
        assert_only_small_files(server)


@pytest.fixture
def flat(workplace: Workplace, tmp_path: Path) -> Workplace:
    """The same hub; its model has few layers."""
    (tmp_path / "hub" / "config.json").write_text(json.dumps(FLAT))
    return workplace


def assert_only_small_files(server: Hub) -> None:
    assert "model.safetensors" not in server.fetched


def job(workplace: Workplace, tokens: int, *, method: Any = None, **memory: Any) -> RunDir:
    """`method`: settings besides the rank, or a name."""
    return workplace.job(
        "chats.jsonl",
        model=NAME,
        method=method if isinstance(method, str) else {"type": "lora", "rank": 128} | (method or {}),
        memory=memory,
        data={"max_tokens": tokens},
        training={"batch_size": 16},
    )


def planned(workplace: Workplace, run: RunDir, gpu: GpuFacts) -> MemoryPlan:
    """By check."""
    workplace.settings = dataclasses.replace(workplace.settings, gpu=gpu)
    workplace.check(run)
    memory = run.plan().memory
    assert memory is not None and memory.dtype == ("bfloat16" if gpu.native_bf16 else "float16")
    return memory


def test_it_fits_a_gpu_of_24_gb(workplace: Workplace) -> None:
    run = job(workplace, 512)
    memory = planned(workplace, run, GPU)
    plan = run.plan()
    assert (plan.task, plan.model.parameters) == ("causal", 7_615_616_512)
    assert (memory.optimizer, memory.activation_checkpointing, memory.micro_batch) == ("adamw_8bit", 0, 2)
    assert memory.peak_bytes <= GPU.limit_bytes and memory.trained_parameters == 322_961_408
    weights = memory.parts["weights"] / GIB
    assert weights == pytest.approx(14.79, abs=0.01), "all of it in bf16, the adapters too"


def test_fp32_adapters_with_fp32_states_and_nothing_recomputed_do_not_and_the_hint_says_what_would(
    flat: Workplace,
) -> None:
    settings = {"optimizer": "adamw", "activation_checkpointing": 0, "micro_batch": 1}
    with pytest.raises(Rejected) as caught:
        planned(flat, job(flat, 2048, method=FLOAT32, **settings), GpuFacts(GPU.name, 8 * GIB))
    assert caught.value.detail_code == "does_not_fit"
    assert "with memory.activation_checkpointing:" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("gpu", "tokens", "ours", "peak", "rows"),  # `auto` chooses what is set here (docs/lora.md)
    [
        (GPU, 512, ("adamw_8bit", 0, 2), 22.2, 1), (TURING, 512, ("adamw_8bit", 0, 1), 22.3, 1),
        (GPU, 1536, ("adamw_8bit", 3, 1), 22.1, 1), (TURING, 1536, ("adamw", 1, 3), 22.4, 1),
        (GPU, 2048, ("adamw", 1, 2), 21.7, 2), (TURING, 2048, ("adamw", 1, 2), 22.1, 2),
    ],
    ids=lambda each: {GPU: "bf16", TURING: "fp16"}.get(each) if isinstance(each, GpuFacts) else None,
)  # fmt: skip
def test_the_plan_says_what_fits_and_why_the_settings_of_others_do_not(
    workplace: Workplace, gpu: GpuFacts, tokens: int, ours: tuple[str, int, int], peak: float, rows: int
) -> None:
    # Others: as many rows, fp32 adapters with AdamW's fp32 states, every layer recomputed, and logits as plain torch
    # keeps them (kernels/head_loss.py): 14 bytes for each of the 152,064 at each token.
    settings = dict(zip(("optimizer", "activation_checkpointing", "micro_batch"), ours, strict=True))
    memory = planned(workplace, job(workplace, tokens, **settings), gpu)
    assert memory.peak_bytes <= gpu.limit_bytes and memory.peak_bytes / GIB == pytest.approx(peak, abs=0.05)
    assert memory.parts["weights"] / GIB == pytest.approx(14.79 if gpu.native_bf16 else 15.39, abs=0.01)
    large = dataclasses.replace(gpu, memory_bytes=2 * gpu.memory_bytes)
    settings = {"optimizer": "adamw", "micro_batch": rows, "activation_checkpointing": 1}
    theirs = planned(workplace, job(workplace, tokens, method=FLOAT32, **settings), large)
    assert theirs.parts["weights"] / GIB == pytest.approx(15.39, abs=0.01)
    logits = 14 * rows * tokens * QWEN_7B["vocab_size"]
    trained = sum(theirs.parts[part] for part in ("gradients", "optimizer")) + 4 * theirs.trained_parameters
    assert trained == pytest.approx(16 * theirs.trained_parameters, rel=1e-3), "4.8 GiB for adapters alone"
    assert (theirs.peak_bytes + logits > gpu.limit_bytes) is (tokens > 512)
    print(f"{gpu.name}, {tokens} tokens: {memory.text}")
    figures = {
        "gpu": gpu.name, "tokens": tokens, "limit_gib": gpu.limit_bytes / GIB, "peak_gib": memory.peak_bytes / GIB,
        "setting": ours, "their_rows": rows, "theirs_gib": theirs.peak_bytes / GIB, "their_logits_gib": logits / GIB,
        "their_adapters_gib": trained / GIB,
    }  # fmt: skip
    print(json.dumps({key: round(each, 2) if isinstance(each, float) else each for key, each in figures.items()}))


def test_full_fine_tuning_takes_weights_gradients_and_less_than_a_gibibyte() -> None:
    one = Predictor(QWEN_7B, task=Causal(), device="cuda", fused=True, dropout=None, training=TrainingSpec())
    setting, context = Setting(1, "adafactor"), 0.8
    predicted = one.predict(MicroBatchShape(1, 512, 512), setting)
    assert predicted.peak / GIB + context <= 30
    head = QWEN_7B["vocab_size"] * QWEN_7B["hidden_size"] * 2
    beside = predicted.pass_peak - predicted.parts["weights"] - predicted.parts["gradients"]
    assert beside < head, "neither the head's gradient is made beside the sum, nor the embedding's"


def test_full_fine_tuning_without_native_bf16_is_refused_and_the_hint_works(flat: Workplace) -> None:
    flat.settings = dataclasses.replace(flat.settings, gpu=TURING)
    with pytest.raises(Rejected, match="trains in bfloat16, and Quadro RTX 6000 has no native bf16") as caught:
        flat.check(job(flat, 512, method="full"))
    assert (caught.value.detail_code, caught.value.param) == ("no_native_bf16", "method")
    assert "set method: lora" in str(caught.value.hint)
    flat.check(job(flat, 512, method="lora"))
    for settings in ({"base_dtype": "bfloat16"}, {"adapter_dtype": "bfloat16"}):
        [key] = settings
        with pytest.raises(Rejected) as caught:
            flat.check(job(flat, 512, method=settings))
        assert caught.value.param == f"method.{key}" and f"leave method.{key} at auto" in str(caught.value.hint)
