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
from jobs.text.units import GIB
from tests.training.hub_server import NAME, Hub, running_hub
from tests.training.workplace import EXAMPLES, Workplace
from worker.training.tasks.causal import builtin

QWEN_7B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
    "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "tie_word_embeddings": False,
    "vocab_size": 152064,
}  # fmt: skip
GPU = GpuFacts("NVIDIA GeForce RTX 4090", int(23.5 * GIB))


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


def assert_only_small_files(server: Hub) -> None:
    assert "model.safetensors" not in server.fetched


def job(workplace: Workplace, tokens: int, *, adapter_dtype: str = "bfloat16", **memory: Any) -> RunDir:
    return workplace.job(
        "chats.jsonl",
        model=NAME,
        method={"type": "lora", "rank": 128, "adapter_dtype": adapter_dtype},
        memory=memory,
        data={"max_tokens": tokens},
        training={"batch_size": 16},
    )


@pytest.mark.parametrize("tokens", [512, 2048])
def test_it_fits_a_gpu_of_24_gb(tokens: int, workplace: Workplace) -> None:
    run = job(workplace, tokens)
    checked = workplace.check(run)["plan"]
    assert (checked["task"], checked["parameters"]) == ("causal", 7_615_616_512)
    memory = run.plan().memory
    assert memory is not None and memory.micro_batch >= 1 and memory.peak_bytes <= GPU.memory_bytes
    assert memory.trained_parameters == 322_961_408
    weights = memory.parts["weights"] / GIB
    assert weights == pytest.approx(14.79, abs=0.01), "all of it in bf16, the adapters too"


def test_fp32_adapters_with_fp32_states_and_nothing_recomputed_do_not_and_the_hint_says_what_would(
    workplace: Workplace,
) -> None:
    settings = {"optimizer": "adamw", "activation_checkpointing": 0, "micro_batch": 1}
    with pytest.raises(Rejected) as caught:
        workplace.check(job(workplace, 2048, adapter_dtype="float32", **settings))
    assert caught.value.detail_code == "does_not_fit"
    assert "with memory.activation_checkpointing:" in str(caught.value.hint)
    weights = job(workplace, 2048, adapter_dtype="float32")
    workplace.check(weights)
    memory = weights.plan().memory
    assert memory is not None and memory.parts["weights"] / GIB == pytest.approx(15.39, abs=0.01)
