"""Predicted peaks of a training step against real allocations on the CPU, and FLAN-T5-XL's on GPUs of three sizes.

    python -m benchmarks.memory_prediction [--only NAME] [--threads 2]

A configuration is a model with random weights that takes two micro-batches and an update, then one more micro-batch and
the update of a step in the middle of a run under torch's profiler, which tells every allocation, and then evaluates
that micro-batch. The peak is what was live before (weights, gradients, states) and the highest sum of allocations
since. `configurations` holds predicted and real peaks of the passes, of the update and of the evaluation, `max_error`
is the largest relative error of the highest of them, `max_update_error` and `max_evaluation_error` those of two.
`evaluations_above_a_step`: how many evaluations take more than the passes do.

`xl_seconds` and `xl_rss_bytes` are those of a fresh process, imports included, that predicts one step of XL
(`xl_cpu_seconds`: what it took of the processors); `xl_peak_gib` is that step on a GPU: micro-batch 8, 256/256 tokens,
adamw_8bit, nothing recomputed, context included. `xl_table` holds, for GPUs of 24, 32 and 48 GB, two shapes, three
ways to recompute and the optimizers, the largest micro-batch (0: not even one row fits) and its peak. With
`--only` all of these are null.

JSON on the last line. Exit code 1 when a limit is broken: `max_error` and `max_evaluation_error` 0.02,
`evaluations_above_a_step` 0, `xl_seconds` 10, `xl_rss_bytes` 2e9, `xl_peak_gib` 28.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import resource
import subprocess
import sys
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import PreTrainedModel

from benchmarks.command_line import parse
from jobs.evaluation_metrics import LabelPlan
from jobs.memory_plan import OptimizerName
from jobs.spec import LoraMethod, TrainingSpec
from jobs.text.units import GIB, format_bytes, format_duration
from worker.training.adapters.lora import Lora
from worker.training.adapters.method import Full, Method
from worker.training.doctor.random_t5 import SHAPES
from worker.training.journal import Journal
from worker.training.machine.usage import process_bytes
from worker.training.optimizers.optimizer import Optimizer, make_optimizer
from worker.training.planning.kernels import bare_model, give_device
from worker.training.planning.ladder import Setting
from worker.training.planning.predictor import Predictor
from worker.training.steps.shape import MicroBatchShape
from worker.training.tasks.causal.fused import learned_loss_sum
from worker.training.tasks.causal.task import Causal
from worker.training.tasks.classification.batches import ClassBatch
from worker.training.tasks.classification.fused import HeadLoss
from worker.training.tasks.classification.regression import Regression
from worker.training.tasks.classification.task import Classification
from worker.training.tasks.seq2seq.loss import token_loss_sum
from worker.training.tasks.seq2seq.task import Seq2Seq
from worker.training.tasks.task import Task

KEYS = (
    "configurations", "max_error", "max_update_error", "max_evaluation_error", "evaluations_above_a_step",
    "xl_seconds", "xl_cpu_seconds", "xl_peak_gib", "xl_parts_gib", "xl_rss_bytes", "xl_table",
)  # fmt: skip
ERROR_LIMIT, SECONDS_LIMIT, RSS_LIMIT, PEAK_LIMIT = 0.02, 10.0, 2e9, 28.0
CONTEXT = int(0.8 * GIB)
GPUS = {"24 GB": 23.5, "32 GB": 31.4, "48 GB": 47.4}
"""GiB that a GPU of a nominal size reports."""
MOST_ROWS = 512
OPTIMIZERS: tuple[OptimizerName, ...] = ("adamw", "adamw_offload", "adamw_8bit", "adafactor")

_T5 = SHAPES["xl"]
_QWEN2: dict[str, Any] = {
    "model_type": "qwen2", "vocab_size": 32000, "hidden_size": 512, "intermediate_size": 1536,
    "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
LABELS = 77
CLASSIFIER = Classification(labels=tuple(LabelPlan(name=f"label {n}", rows=1) for n in range(LABELS)))
REGRESSION = Regression()
_ENCODER: dict[str, Any] = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "num_labels": LABELS, "id2label": {str(n): f"label {n}" for n in range(LABELS)},
}  # fmt: skip
MODELS: dict[str, tuple[Task, dict[str, Any]]] = {
    "t5-small": (Seq2Seq(), _T5 | {
        "d_model": 512, "d_ff": 1024, "num_heads": 6, "num_layers": 8, "num_decoder_layers": 8,
    }),
    "t5-small-tied": (Seq2Seq(), _T5 | {
        "d_model": 512, "d_ff": 2048, "num_heads": 8, "num_layers": 6, "num_decoder_layers": 6,
        "tie_word_embeddings": True, "feed_forward_proj": "relu",
    }),
    "t5-smallest": (Seq2Seq(), _T5 | {
        "d_model": 64, "d_ff": 128, "num_heads": 1, "num_layers": 1, "num_decoder_layers": 1, "vocab_size": 512,
    }),
    "t5-base": (Seq2Seq(), _T5 | {
        "d_model": 768, "d_ff": 2048, "num_heads": 12, "num_layers": 12, "num_decoder_layers": 12,
    }),
    "qwen2": (Causal(), _QWEN2),
    "qwen2-152k": (Causal(), _QWEN2 | {"vocab_size": 151936, "hidden_size": 256, "num_hidden_layers": 4}),
    "qwen3": (Causal(), _QWEN2 | {"model_type": "qwen3", "head_dim": 128, "tie_word_embeddings": False}),
    "gemma-256k": (Causal(), _QWEN2 | {
        "model_type": "gemma", "vocab_size": 256000, "hidden_size": 256, "head_dim": 64,
    }),
    "llama": (Causal(), _QWEN2 | {"model_type": "llama", "tie_word_embeddings": False}),
    "roberta-base": (CLASSIFIER, _ENCODER | {
        "model_type": "roberta", "architectures": ["RobertaForSequenceClassification"], "vocab_size": 50265,
        "max_position_embeddings": 514, "type_vocab_size": 1, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
    }),
    "deberta-v3-base": (CLASSIFIER, _ENCODER | {
        "model_type": "deberta-v2", "architectures": ["DebertaV2ForSequenceClassification"], "vocab_size": 128100,
        "max_position_embeddings": 512, "type_vocab_size": 0, "pad_token_id": 0, "relative_attention": True,
        "position_buckets": 256, "max_relative_positions": -1, "share_att_key": True, "pos_att_type": "p2c|c2p",
        "position_biased_input": False, "norm_rel_ebd": "layer_norm", "layer_norm_eps": 1e-7,
        "pooler_hidden_size": 768, "pooler_hidden_act": "gelu", "pooler_dropout": 0,
    }),
    "modernbert-base": (CLASSIFIER, _ENCODER | {
        "model_type": "modernbert", "architectures": ["ModernBertForSequenceClassification"], "vocab_size": 50368,
        "intermediate_size": 1152, "num_hidden_layers": 22, "max_position_embeddings": 8192, "pad_token_id": 50283,
        "cls_token_id": 50281, "sep_token_id": 50282, "local_attention": 128, "global_attn_every_n_layers": 3,
        "classifier_pooling": "mean",
    }),
}  # fmt: skip


@dataclass(frozen=True)
class Configuration:
    """What is predicted and measured."""

    name: str
    model: str
    optimizer: OptimizerName
    rows: int
    inputs: int
    targets: int
    activation_checkpointing: int = 0
    dtype: torch.dtype = torch.bfloat16
    fused: bool = True
    padded: bool = True
    method: LoraMethod | None = None
    """None: every weight is trained."""


FP32 = torch.float32
RANK_8 = LoraMethod(type="lora", rank=8)
RANK_128 = LoraMethod(type="lora", rank=128, dropout=0.05)
DORA = LoraMethod(type="lora", rank=8, dora=True)
FP32_ADAPTERS = LoraMethod(type="lora", rank=8, adapter_dtype="float32")
CONFIGURATIONS = (
    Configuration("small, long/long", "t5-small", "adamw_8bit", 8, 256, 256),
    Configuration("small, long/short, not padded", "t5-small", "adamw_8bit", 8, 384, 64, padded=False),
    Configuration("small, short/long", "t5-small", "adafactor", 8, 64, 256),
    Configuration("small, recompute 1", "t5-small", "adafactor", 16, 256, 256, activation_checkpointing=1),
    Configuration("small, recompute 2", "t5-small", "adamw", 16, 256, 256, activation_checkpointing=2),
    Configuration("small, fp32", "t5-small", "adamw", 8, 256, 128, dtype=FP32),
    Configuration(
        "small, fp32, recompute 1", "t5-small", "adamw_8bit", 8, 128, 256, dtype=FP32, activation_checkpointing=1
    ),
    Configuration("small, stock", "t5-small", "adafactor", 4, 256, 256, fused=False),
    Configuration("small, stock, not padded", "t5-small", "adamw_8bit", 8, 128, 128, fused=False, padded=False),
    Configuration("small, stock, fp32, recompute 2", "t5-small", "adafactor", 4, 256, 128, 2, FP32, fused=False),
    Configuration("small tied, ReLU", "t5-small-tied", "adafactor", 8, 256, 64),
    Configuration("base, adamw", "t5-base", "adamw", 4, 256, 128),
    Configuration("base, 8-bit", "t5-base", "adamw_8bit", 8, 128, 128),
    Configuration("base, adafactor, recompute 2", "t5-base", "adafactor", 16, 128, 128, activation_checkpointing=2),
    Configuration(
        "base, fp32, recompute 1", "t5-base", "adafactor", 4, 64, 128, dtype=FP32, activation_checkpointing=1
    ),
    Configuration("base, stock", "t5-base", "adafactor", 4, 256, 64, fused=False),
    Configuration("Qwen2", "qwen2", "adafactor", 8, 256, 256),
    Configuration("Qwen2, short replies", "qwen2", "adamw_8bit", 8, 512, 64),
    Configuration("Qwen2, stock", "qwen2", "adafactor", 8, 256, 128, fused=False),
    Configuration("Qwen2, recompute 2", "qwen2", "adamw", 8, 512, 256, 2),
    Configuration("Qwen2, fp32, recompute 1", "qwen2", "adamw", 8, 128, 128, 1, FP32),
    Configuration("Qwen2, 152k tokens", "qwen2-152k", "adamw_8bit", 8, 256, 128),
    Configuration("Qwen2, 152k tokens, no logits", "qwen2-152k", "adafactor", 8, 256, 256),
    Configuration("Qwen3", "qwen3", "adamw_8bit", 8, 256, 128),
    Configuration("Llama, recompute 1", "llama", "adafactor", 16, 256, 256, 1),
    Configuration("Gemma, 256k tokens", "gemma-256k", "adafactor", 4, 256, 200),
    Configuration("base, LoRA 8", "t5-base", "adamw", 4, 256, 128, method=RANK_8),
    Configuration("base, LoRA 8, recompute 1", "t5-base", "adamw_8bit", 8, 256, 256, 1, method=RANK_8),
    Configuration("base, LoRA 128", "t5-base", "adamw", 4, 256, 128, method=RANK_128),
    Configuration("base, LoRA 128, recompute 2", "t5-base", "adafactor", 8, 128, 256, 2, method=RANK_128),
    Configuration("small, stock, LoRA 8", "t5-small", "adamw", 4, 256, 256, fused=False, method=RANK_8),
    Configuration("small, LoRA 8, fp32 adapters", "t5-small", "adamw", 8, 256, 128, method=FP32_ADAPTERS),
    Configuration("small, DoRA 8", "t5-small", "adamw", 8, 256, 128, method=DORA),
    Configuration("Qwen2, LoRA 8", "qwen2", "adamw", 4, 256, 128, method=RANK_8),
    Configuration("Qwen2, LoRA 128, recompute 1", "qwen2", "adamw_8bit", 8, 256, 128, 1, method=RANK_128),
    Configuration("RoBERTa-base", "roberta-base", "adamw_8bit", 16, 256, 1),
    Configuration("RoBERTa-base, fp32, not padded", "roberta-base", "adafactor", 16, 128, 1, dtype=FP32, padded=False),
    Configuration("RoBERTa-base, LoRA 8", "roberta-base", "adamw", 16, 128, 1, method=RANK_8),
    Configuration("DeBERTa-v3-base", "deberta-v3-base", "adamw", 8, 128, 1),
    Configuration("DeBERTa-v3-base, LoRA 8, recompute 1", "deberta-v3-base", "adamw", 8, 128, 1, 1, method=RANK_8),
    Configuration("ModernBERT-base", "modernbert-base", "adamw_8bit", 8, 256, 1),
    Configuration("ModernBERT-base, LoRA 128", "modernbert-base", "adamw", 8, 128, 1, method=RANK_128),
)
SMALLEST = Configuration("smallest", "t5-smallest", "adafactor", 2, 32, 32)


def main(argv: list[str]) -> int:
    """Measure, predict, print."""
    arguments = parsed(argv)
    if arguments.xl:
        print(json.dumps(predict_xl()))
        return 0
    torch.set_num_threads(arguments.threads)
    on_gpus = xl() if arguments.only is None else {key: None for key in KEYS if key.startswith("xl_")}
    figures = []
    for configuration in (SMALLEST,) if arguments.smoke else CONFIGURATIONS:
        if arguments.only is None or arguments.only in configuration.name:
            figures.append(compared(configuration))
            print(describe(figures[-1]), flush=True)
    result: dict[str, Any] = {
        "configurations": figures,
        "max_error": max(abs(one["error"]) for one in figures),
        "max_update_error": max(abs(one["update_error"]) for one in figures),
        "max_evaluation_error": max(abs(one["evaluation_error"]) for one in figures),
        "evaluations_above_a_step": sum(one["real_evaluation_peak"] > one["real_pass_peak"] for one in figures),
        **on_gpus,
    }
    good = max(result["max_error"], result["max_evaluation_error"]) <= ERROR_LIMIT
    good &= not result["evaluations_above_a_step"]
    if arguments.only is None:
        good &= result["xl_seconds"] <= SECONDS_LIMIT and result["xl_rss_bytes"] <= RSS_LIMIT
        good &= result["xl_peak_gib"] <= PEAK_LIMIT
    print(json.dumps(result))
    return 0 if good or arguments.smoke else 1


def parsed(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory_prediction", description="Predicted peaks.")
    parser.add_argument("--only", help="configurations with this in their name, and no XL")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--xl", action="store_true", help="one prediction for XL; what the fresh process does")
    return parse(parser, argv, only=SMALLEST.name, threads=1)


# -- predicted against real ----------------------------------------------------------------------------------


def compared(configuration: Configuration) -> dict[str, Any]:
    """One configuration, predicted and measured."""
    task, config = MODELS[configuration.model]
    begun = time.perf_counter()
    predictor = Predictor(
        config, task=task, dtype=configuration.dtype, device="cpu", fused=configuration.fused, dropout=None,
        training=TrainingSpec(), method=method_in(configuration),
    )  # fmt: skip
    predicted = predictor.predict(
        MicroBatchShape(configuration.rows, configuration.inputs, configuration.targets),
        Setting(configuration.activation_checkpointing, configuration.optimizer),
        padded=configuration.padded,
    )
    seconds = time.perf_counter() - begun
    pass_peak, update_peak, evaluation_peak = measured(task, config, configuration)
    real = max(pass_peak, update_peak, evaluation_peak)
    return {
        **dataclasses.asdict(configuration),
        "dtype": str(configuration.dtype).removeprefix("torch."),
        "method": "full" if configuration.method is None else configuration.method.model_dump(),
        "predicted_peak": predicted.peak,
        "real_peak": real,
        "error": predicted.peak / real - 1,
        "predicted_pass_peak": predicted.pass_peak,
        "real_pass_peak": pass_peak,
        "pass_error": predicted.pass_peak / pass_peak - 1,
        "predicted_update_peak": predicted.update_peak,
        "real_update_peak": update_peak,
        "update_error": predicted.update_peak / update_peak - 1,
        "predicted_evaluation_peak": predicted.evaluation_peak,
        "real_evaluation_peak": evaluation_peak,
        "evaluation_error": predicted.evaluation_peak / evaluation_peak - 1,
        "parts": predicted.parts,
        "seconds": seconds,
    }


def describe(figures: dict[str, Any]) -> str:
    """For people."""
    return (
        f"{figures['name']:38} {figures['optimizer']:10} passes {format_bytes(figures['real_pass_peak']):>8} "
        f"{figures['pass_error']:+7.2%}, update {format_bytes(figures['real_update_peak']):>8} "
        f"{figures['update_error']:+7.2%}, evaluation {format_bytes(figures['real_evaluation_peak']):>8} "
        f"{figures['evaluation_error']:+7.2%}, all {figures['error']:+7.2%}  ({format_duration(figures['seconds'])})"
    )


def method_in(configuration: Configuration) -> Method:
    """As the trainer asks it."""
    return Full() if configuration.method is None else Lora(configuration.method)


def measured(task: Task, config: dict[str, Any], configuration: Configuration) -> tuple[int, int, int]:
    """Real peaks of the passes, of the update and of an evaluation, bytes."""
    torch.manual_seed(0)
    model = bare_model(
        config, task, configuration.dtype, fused=configuration.fused, dropout=None, method=method_in(configuration)
    )
    give_device(model, torch.device("cpu"))
    fill(model)
    if configuration.activation_checkpointing:
        model.activation_checkpointing_enable(
            {"use_reentrant": False}, every_n_layers=configuration.activation_checkpointing
        )
    optimizer = make_optimizer(configuration.optimizer, model.named_parameters(), TrainingSpec(), fused=True)
    with tempfile.TemporaryDirectory() as folder:
        optimizer.compile(Journal(Path(folder) / "journal.jsonl"))
    runs = {"seq2seq": seq2seq, "causal": causal, "classification": classification, "regression": regression}
    run = runs[task.name]
    vocabulary = int(config["vocab_size"])
    # Whatever is made once (caches of kernels, code compiled at the first update), and the gradients to be added to.
    short = dataclasses.replace(configuration, rows=2, inputs=16, targets=16)
    loss = micro_batch(lambda: run(model, short, vocabulary))
    optimizer.step(1, 1e-5, loss)
    model.zero_grad(set_to_none=True)
    micro_batch(lambda: run(model, short, vocabulary))
    before = live_bytes(model, optimizer)
    return watched(model, optimizer, lambda: run(model, configuration, vocabulary), before)


def micro_batch(run: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Forward and backward; the loss, without its graph."""
    loss = run()
    loss.backward()
    return loss.detach()  # as the loop does


def watched(
    model: PreTrainedModel,
    optimizer: Optimizer,
    run: Callable[[], torch.Tensor],
    before: int,
) -> tuple[int, int, int]:
    """Peaks of one more micro-batch, the update, and an evaluation of the same rows, on top of `before` bytes."""
    gradients = sum(each.grad.nbytes for each in model.parameters() if each.grad is not None)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        loss = micro_batch(run)
        with record_function("update"):
            optimizer.step(2, 1e-5, loss)
        model.zero_grad(set_to_none=True)
        model.eval()
        with record_function("evaluation"), torch.no_grad():
            run()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = profiler.profiler.kineto_results.events()
    begins = [next(event.start_ns() for event in events if event.name() == part) for part in ("update", "evaluation")]
    sizes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    total, peaks = 0, [0, -before, -before]
    for when, size in sizes:
        total += size
        part = bisect_right(begins, when)
        peaks[part] = max(peaks[part], total)
    passes, update, evaluation = (before + peak for peak in peaks)
    return passes, update, evaluation - gradients  # made before the profile began, which so does not tell their end


def live_bytes(model: PreTrainedModel, optimizer: Optimizer) -> int:
    """Weights, buffers, gradients and states; what is shared, once."""
    tensors = [
        *model.parameters(),
        *model.buffers(),
        *optimizer.state_dict().values(),
        *getattr(optimizer, "buffers", []),
    ]
    tensors += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


@torch.no_grad()
def fill(model: PreTrainedModel) -> None:
    """Random weights, and buffers that the models can do with."""
    for parameter in model.parameters():
        parameter.normal_(0, 0.02)
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            buffer.uniform_(0.01, 1.0)
        elif name.endswith("position_ids"):
            buffer.copy_(torch.arange(buffer.shape[-1]).expand(buffer.shape))
        else:
            buffer.zero_()


def tokens(rows: int, width: int, vocabulary: int) -> torch.Tensor:
    return torch.randint(3, vocabulary, (rows, width))


def mask_of(configuration: Configuration) -> torch.Tensor:
    mask = torch.ones(configuration.rows, configuration.inputs, dtype=torch.int64)
    if configuration.padded:
        mask[:, -configuration.inputs // 4 :] = 0
    return mask


def seq2seq(model: PreTrainedModel, configuration: Configuration, vocabulary: int) -> torch.Tensor:
    ids = tokens(configuration.rows, configuration.inputs, vocabulary)
    labels = tokens(configuration.rows, configuration.targets, vocabulary)
    mask = mask_of(configuration) if configuration.padded else None
    return token_loss_sum(model, ids, mask, labels) / labels.numel()


def causal(model: PreTrainedModel, configuration: Configuration, vocabulary: int) -> torch.Tensor:
    ids = tokens(configuration.rows, configuration.inputs, vocabulary)
    ends = torch.arange(1, configuration.rows + 1)[:, None] * configuration.inputs
    places = (ends - 1 - torch.arange(configuration.targets)).flatten()
    return learned_loss_sum(model, ids, places, tokens(1, len(places), vocabulary)[0]) / len(places)


def classification(model: PreTrainedModel, configuration: Configuration, vocabulary: int) -> torch.Tensor:
    return of_labels(model, configuration, vocabulary, torch.randint(0, LABELS, (configuration.rows,)), CLASSIFIER.loss)


def regression(model: PreTrainedModel, configuration: Configuration, vocabulary: int) -> torch.Tensor:
    labels = torch.rand(configuration.rows, dtype=torch.float64)
    return of_labels(model, configuration, vocabulary, labels, REGRESSION.loss)


def of_labels(
    model: PreTrainedModel, configuration: Configuration, vocabulary: int, labels: torch.Tensor, loss: HeadLoss
) -> torch.Tensor:
    ids = tokens(configuration.rows, configuration.inputs, vocabulary)
    mask = None
    if configuration.padded:
        # On a CPU packed encoders leave out what is padded: the plan is for the most that a padded micro-batch takes.
        mask = torch.ones_like(ids)
        mask[-1, -1] = 0
    lengths = (torch.ones_like(ids) if mask is None else mask).sum(dim=1).numpy()
    types = torch.zeros_like(ids) if getattr(model.config, "type_vocab_size", 0) > 1 else None  # of pairs
    batch = ClassBatch(ids, mask, labels, np.arange(configuration.rows), lengths, loss, types)
    return batch.loss_sum(model) / batch.target_tokens


# -- FLAN-T5-XL on GPUs -------------------------------------------------------------------------------------


def predictor_xl() -> Predictor:
    return Predictor(SHAPES["xl"], task=Seq2Seq(), device="cuda", fused=True, dropout=None, training=TrainingSpec())


def predict_xl() -> dict[str, Any]:
    """What the fresh process does; the caller times it."""
    predicted = predictor_xl().predict(MicroBatchShape(8, 256, 256), Setting(0, "adamw_8bit"))
    return {
        "xl_peak_gib": (predicted.peak + CONTEXT) / GIB,
        "xl_parts_gib": {name: size / GIB for name, size in predicted.parts.items()},
        # Not ru_maxrss, which begins with that of the process that started this one.
        "xl_rss_bytes": process_bytes("VmHWM"),
    }


def xl() -> dict[str, Any]:
    """Time, memory and figures of XL."""
    begun = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.memory_prediction", "--xl"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)  # no other process was waited for
    result: dict[str, Any] = {
        "xl_seconds": time.perf_counter() - begun,
        "xl_cpu_seconds": used.ru_utime + used.ru_stime,
        **json.loads(done.stdout.splitlines()[-1]),
    }
    print(json.dumps(result, indent=1), flush=True)
    predictor, table = predictor_xl(), []
    for width, every, name in itertools.product((256, 512), (0, 2, 1), OPTIMIZERS):
        for gpu, gib in GPUS.items():
            limit = int(gib * GIB) - CONTEXT
            rows, predicted = predictor.most_rows(width, width, Setting(every, name), limit, MOST_ROWS)
            table.append({
                "gpu": gpu, "tokens": f"{width}/{width}", "activation_checkpointing": every, "optimizer": name,
                "micro_batch": rows, "peak_gib": round((predicted.peak + CONTEXT) / GIB, 2),
            })  # fmt: skip
            print(" ".join(f"{value!s:>10}" for value in table[-1].values()), flush=True)
    return result | {"xl_table": table}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
