"""Predicted memory is what really is allocated; nothing of the process changes by predicting."""

from __future__ import annotations

import itertools
import math
import warnings
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch

from benchmarks.memory_prediction import CLASSIFIER, LABELS, REGRESSION, Configuration, measured
from jobs.errors import Rejected
from jobs.memory_plan import OptimizerName
from jobs.spec import LoraMethod, TrainingSpec
from worker.training.adapters.lora import Lora
from worker.training.adapters.method import Full, Method
from worker.training.doctor.random_t5 import SHAPES
from worker.training.machine.numerics import use_fp32_where_bf16_is_slow
from worker.training.machine.usage import process_bytes
from worker.training.planning.ladder import Prediction, Setting
from worker.training.planning.predictor import Predictor
from worker.training.steps.shape import MicroBatchShape
from worker.training.tasks.causal.task import Causal
from worker.training.tasks.seq2seq.batches import PairBatch
from worker.training.tasks.seq2seq.layout import layout_of
from worker.training.tasks.seq2seq.task import Seq2Seq
from worker.training.tasks.task import Task

T5: dict[str, Any] = SHAPES["small"] | {
    "vocab_size": 1024, "d_model": 64, "d_kv": 16, "d_ff": 64, "num_heads": 4, "num_layers": 2,
    "num_decoder_layers": 2,  # few shapes: each is compiled for adamw_8bit
}  # fmt: skip
DEEP = T5 | {"num_layers": 3, "num_decoder_layers": 3}
SHALLOW = T5 | {"num_layers": 1, "num_decoder_layers": 1}
QWEN2: dict[str, Any] = {
    "model_type": "qwen2", "vocab_size": 1024, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
ROBERTA: dict[str, Any] = {
    "model_type": "roberta", "vocab_size": 1024, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 130, "type_vocab_size": 1, "pad_token_id": 1,
    "num_labels": LABELS, "architectures": ["RobertaForSequenceClassification"],
}  # fmt: skip
BART: dict[str, Any] = {
    "model_type": "bart", "vocab_size": 1024, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 160, "decoder_ffn_dim": 160,
    "max_position_embeddings": 128, "pad_token_id": 1, "decoder_start_token_id": 2,
}  # fmt: skip
SHAPE = MicroBatchShape(8, 64, 48)
ADAFACTOR = Setting(0, "adafactor")


def predictor(
    config: dict[str, Any] = T5, device: Literal["cpu", "cuda"] = "cpu", fused: bool = True, **options: Any
) -> Predictor:
    options = {"task": Seq2Seq(), "dropout": None, "training": TrainingSpec()} | options
    return Predictor(config, device=device, fused=fused, **options)


@pytest.fixture(autouse=True, scope="module")
def _products_of_torch() -> None:
    """What is measured here are torch's own kernels: an attempt in a test before may have replaced those of bf16."""
    if use_fp32_where_bf16_is_slow.cache_info().currsize and (library := use_fp32_where_bf16_is_slow()) is not None:
        library._destroy()
    use_fp32_where_bf16_is_slow.cache_clear()  # the next attempt replaces them again


@pytest.fixture(scope="module")
def on_gpu() -> Predictor:
    return predictor(device="cuda")


BF16, FP32 = torch.bfloat16, torch.float32
OF_PAIRS = replace(CLASSIFIER, pairs=True, separator=3)
UNTIED = QWEN2 | {"tie_word_embeddings": False}
WIDE_ADAPTERS = {"rank": 64, "adapter_dtype": "float32", "dropout": 0.1}


@pytest.mark.parametrize(
    ("task", "config", "optimizer", "every", "dtype", "fused", "padded", "adapters"),  # every n-th layer is recomputed
    [
        (Seq2Seq(), T5, "adamw", 0, BF16, True, True, None),
        (Seq2Seq(), T5, "adamw_8bit", 1, BF16, True, False, None),
        (Seq2Seq(), T5, "adafactor", 0, BF16, False, True, None),
        (Seq2Seq(), T5, "adafactor", 2, FP32, True, True, None),
        (Seq2Seq(), T5, "adamw", 2, FP32, False, False, None),
        (Seq2Seq(), T5, "adamw_offload", 0, BF16, True, False, None),
        (Causal(), QWEN2, "adafactor", 1, BF16, False, False, None),
        (Causal(), QWEN2, "adafactor", 1, BF16, True, True, None),
        (Causal(), UNTIED, "adafactor", 0, BF16, True, True, None),
        (CLASSIFIER, ROBERTA, "adafactor", 0, BF16, False, True, None),
        (CLASSIFIER, ROBERTA, "adafactor", 0, BF16, True, True, None),
        (CLASSIFIER, ROBERTA, "adafactor", 1, BF16, True, True, None),
        (OF_PAIRS, ROBERTA | {"model_type": "bert", "type_vocab_size": 2}, "adafactor", 0, BF16, True, True, None),
        (OF_PAIRS, ROBERTA | {"model_type": "bert", "type_vocab_size": 2}, "adafactor", 0, BF16, False, False, None),
        (REGRESSION, ROBERTA | {"num_labels": 1}, "adafactor", 0, BF16, True, True, None),
        (Seq2Seq(), SHALLOW | {"model_type": "mt5"}, "adafactor", 0, BF16, True, True, None),
        (Seq2Seq(), BART, "adafactor", 0, BF16, True, True, None),
        (Seq2Seq(), BART, "adafactor", 1, BF16, True, False, None),
        (Seq2Seq(), SHALLOW, "adamw", 0, BF16, True, True, {"rank": 8}),
        (Seq2Seq(), SHALLOW, "adafactor", 1, BF16, True, True, WIDE_ADAPTERS),
        (Seq2Seq(), SHALLOW, "adamw", 0, BF16, True, True, {"rank": 8, "dora": True}),
        (Causal(), QWEN2, "adamw", 1, BF16, False, True, {"rank": 8}),
    ],
)
def test_a_step_takes_what_was_predicted(
    task: Task, config: dict[str, Any], optimizer: OptimizerName, every: int, dtype: torch.dtype, fused: bool,
    padded: bool, adapters: dict[str, Any] | None,
) -> None:  # fmt: skip
    lora = None if adapters is None else LoraMethod.model_validate({"type": "lora"} | adapters)
    method = Full() if lora is None else Lora(lora)
    one = predictor(config, task=task, dtype=dtype, fused=fused, method=method)
    predicted = one.predict(SHAPE, Setting(every, optimizer), padded=padded)
    passes, evaluation = assert_taken(predicted, task, config, Configuration(
        "", "", optimizer, SHAPE.rows, SHAPE.input_width, SHAPE.target_width, every, dtype, fused, padded, lora
    ))  # fmt: skip
    assert evaluation <= passes
    assert list(predicted.parts) == ["weights", "gradients", "optimizer", "activations", "temporaries"]
    assert predicted.peak == max(predicted.pass_peak, predicted.update_peak) == sum(predicted.parts.values())


def assert_taken(predicted: Prediction, task: Task, config: dict[str, Any], asked: Configuration) -> tuple[int, int]:
    """That a real step takes so much; peaks of its passes and of the evaluation."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TF32 acceleration on top of oneDNN")  # of GPUs that are not there
        # Its scratch memory depends on the CPU that the test runs on.
        with torch.backends.mkldnn.flags(enabled=False):
            passes, update, evaluation = measured(task, config, asked)
    assert predicted.pass_peak == pytest.approx(passes, rel=0.02)
    assert predicted.update_peak == pytest.approx(update, rel=0.02)
    assert predicted.evaluation_peak == pytest.approx(evaluation, rel=0.02)
    return passes, evaluation


@pytest.mark.parametrize(
    ("fused", "method"), [(True, Full()), (False, Full()), (True, Lora(LoraMethod(type="lora", rank=8)))]
)
@pytest.mark.parametrize(
    ("task", "config"),  # of one layer: the more there are, the more a step takes
    [
        (Seq2Seq(), SHALLOW), (Seq2Seq(), BART | {"encoder_layers": 1, "decoder_layers": 1}),
        (Causal(), QWEN2 | {"num_hidden_layers": 1}), (CLASSIFIER, ROBERTA | {"num_hidden_layers": 1}),
    ],
)  # fmt: skip
def test_an_evaluation_never_needs_more_than_a_step(
    task: Task, config: dict[str, Any], method: Method, fused: bool
) -> None:
    one = predictor(config, "cuda", fused, task=task, method=method)
    for shape, recompute, padded in itertools.product(
        (SHAPE, MicroBatchShape(1, 16, 16), MicroBatchShape(32, 16, 120)), (0, 1), (True, False)
    ):
        predicted = one.predict(shape, Setting(recompute, "adafactor"), padded=padded)
        assert predicted.evaluation_peak <= predicted.pass_peak, (shape, recompute, padded)


def test_where_an_evaluation_needs_more_than_a_step_it_is_the_peak(
    on_gpu: Predictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = on_gpu.predict(SHAPE, ADAFACTOR)
    real = PairBatch.evaluated

    def wasteful(batch: PairBatch, model: Any) -> Any:
        waste = torch.empty(before.peak, dtype=torch.uint8, device=model.device)
        return real(batch, model), waste

    monkeypatch.setattr(PairBatch, "evaluated", wasteful)
    now = predictor(device="cuda").predict(SHAPE, ADAFACTOR)
    assert now.peak == now.evaluation_peak == sum(now.parts.values()) > before.peak
    assert now.parts["gradients"] == 0 and now.pass_peak == before.pass_peak


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_weights_and_gradients_are_counted_exactly(tied: bool, device: Literal["cpu", "cuda"]) -> None:
    config = SHALLOW | {"tie_word_embeddings": tied}
    one = predictor(config, device)
    parts = one.predict(SHAPE, ADAFACTOR).parts
    assert one.size.trained == layout_of(config).parameters
    assert one.size.parameter_bytes == one.size.trained_bytes == 2 * one.size.trained
    # The GPU's allocator rounds each tensor up to 512 bytes.
    assert parts["weights"] == parts["gradients"]
    assert 0 <= parts["weights"] - one.size.parameter_bytes <= (512 * 200 if device == "cuda" else 0)


def test_states_are_those_of_the_optimizer(on_gpu: Predictor) -> None:
    per_weight = {
        name: on_gpu.predict(SHAPE, Setting(0, name)).parts["optimizer"] / on_gpu.size.trained
        for name in ("adamw", "adamw_8bit", "adafactor")
    }
    assert per_weight["adamw"] == pytest.approx(12, rel=0.05)
    assert per_weight["adamw_8bit"] == pytest.approx(2.03, rel=0.1)
    assert per_weight["adafactor"] < 0.4


def test_a_gpu_keeps_less_than_the_cpu(on_gpu: Predictor) -> None:
    # Dropout masks of a byte instead of numbers, and attention that keeps no scores.
    kept = on_gpu.predict(SHAPE, ADAFACTOR).activations_after_forward
    assert kept < 0.8 * predictor().predict(SHAPE, ADAFACTOR).activations_after_forward


def test_dropout_masks_are_counted(on_gpu: Predictor) -> None:
    without = predictor(device="cuda", dropout=0.0)
    assert without.predict(SHAPE, ADAFACTOR).peak < on_gpu.predict(SHAPE, ADAFACTOR).peak


def test_fused_modules_keep_less(on_gpu: Predictor) -> None:
    stock = predictor(device="cuda", fused=False)
    assert on_gpu.predict(SHAPE, ADAFACTOR).activations_after_forward < 0.8 * (
        stock.predict(SHAPE, ADAFACTOR).activations_after_forward
    )


def test_stock_models_of_all_tasks_run_on_the_kernels_of_a_gpu() -> None:
    configs: list[tuple[Task, dict[str, Any]]] = [
        (Causal(), QWEN2),
        (CLASSIFIER, ROBERTA),
        (Seq2Seq(), BART),
    ]
    for task, config in configs:
        one = predictor(config, "cuda", task=task)
        peaks = {
            (recompute, padded): one.predict(SHAPE, Setting(recompute, "adamw_8bit"), padded=padded).pass_peak
            for recompute in (0, 1)
            for padded in (True, False)
        }
        assert peaks[1, True] < peaks[0, True]
        # Flash attention, without a mask, makes gradients of keys that heads share for every head at first.
        assert peaks[0, False] < 1.01 * peaks[0, True]


def test_recomputing_layers_lowers_activations() -> None:
    deep = predictor(DEEP, device="cuda")
    kept = [deep.predict(SHAPE, Setting(every, "adafactor")).activations_after_forward for every in (0, 3, 2, 1)]
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == 4


def test_more_rows_take_more(on_gpu: Predictor) -> None:
    peaks = [on_gpu.predict(MicroBatchShape(rows, 64, 48), ADAFACTOR).pass_peak for rows in (1, 2, 3, 8, 20)]
    assert peaks == sorted(set(peaks))


@pytest.mark.parametrize(("device", "activation_checkpointing"), [("cuda", 0), ("cuda", 1), ("cpu", 0)])
def test_most_rows_is_what_trying_all_would_find(device: Literal["cpu", "cuda"], activation_checkpointing: int) -> None:
    cap, setting = (20, Setting(activation_checkpointing, "adafactor")) if device == "cuda" else (4, ADAFACTOR)
    one = predictor(SHALLOW, device)
    peaks = [one.predict(MicroBatchShape(rows, 40, 32), setting).peak for rows in range(1, cap + 1)]
    between = [(low + high) // 2 for low, high in itertools.pairwise(peaks)]
    for limit in (peaks[0] - 1, *peaks, *between, peaks[-1] + 1):
        right = sum(peak <= limit for peak in peaks)
        rows, prediction = one.most_rows(40, 32, setting, limit, cap)
        assert rows == right
        assert prediction == one.predict(MicroBatchShape(max(1, rows), 40, 32), setting)


def test_most_rows_needs_few_traces() -> None:
    one = predictor(device="cuda")
    room = one.predict(MicroBatchShape(100, 64, 48), ADAFACTOR).peak
    before = one.traced
    assert one.most_rows(64, 48, ADAFACTOR, room, 10_000)[0] == 100
    assert one.traced - before <= 5
    assert one.most_rows(64, 48, ADAFACTOR, room, 10_000)[0] == 100
    assert one.traced - before <= 5  # nothing is traced twice


def test_nothing_of_the_process_changes() -> None:
    def state() -> tuple[Any, ...]:
        return torch.get_default_dtype(), torch.is_grad_enabled(), torch.compile, torch.Generator, torch.initial_seed()

    devices: tuple[Literal["cpu", "cuda"], ...] = ("cpu", "cuda")
    for device, grad in zip(devices, (False, True), strict=True):
        with torch.set_grad_enabled(grad):
            before, numbers = state(), torch.get_rng_state()
            one = predictor(SHALLOW, device)
            for setting in (Setting(1, "adamw_8bit"), ADAFACTOR, Setting(0, "adamw")):
                one.predict(MicroBatchShape(2, 16, 8), setting)
            assert state() == before
            assert torch.equal(torch.get_rng_state(), numbers)


def test_a_model_of_gibibytes_takes_next_to_no_memory() -> None:
    wide = SHAPES["xl"] | {"num_layers": 2, "num_decoder_layers": 2}
    predictor(device="cuda").predict(SHAPE, ADAFACTOR)  # what is imported and made once
    before = process_bytes("VmRSS")
    one = predictor(wide, "cuda")
    assert one.predict(MicroBatchShape(8, 256, 256), Setting(0, "adamw")).peak > 5 * 2**30
    assert process_bytes("VmRSS") - before < 100 * 2**20


def test_no_clipping_no_dropout_and_odd_widths() -> None:
    one = predictor(device="cuda", dropout=0.0, training=TrainingSpec(max_grad_norm=None, weight_decay=0.1))
    peaks = [
        one.predict(MicroBatchShape(3, 17, 5), Setting(0, name)).peak for name in ("adamw", "adamw_8bit", "adafactor")
    ]
    assert all(math.isfinite(peak) and peak > 0 for peak in peaks)


@pytest.mark.parametrize(
    "config",
    [{}, {"model_type": "no such model"}, T5 | {"d_model": "wide"}, T5 | {"feed_forward_proj": "gated-nothing"}],
)
def test_a_config_that_no_model_can_be_built_of_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(Rejected) as refused:
        predictor(config, "cuda")
    assert refused.value.detail_code == "bad_config"
    assert "config.json" in str(refused.value)
