"""A service with jobs as a team has them, for pictures and measurements: figures are examples, the rest is real."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from typing import Any

from jobs.disk.rundir import RunDir
from jobs.errors import Damaged
from jobs.events import AttemptEnded, AttemptStarted, JobFailed, JobPaused, JobQueued, JobSucceeded, JobValidated
from jobs.heartbeat import WorkerHeartbeat
from jobs.memory_plan import MemoryPlan
from jobs.metrics import MetricRow
from jobs.plan import DataPlan, ModelPlan, make_plan, make_time_plan
from jobs.preview import DataPreview, RowPreview, SourcePreview, SpanPreview, TextPreview
from jobs.sweeps.directory import find
from jobs.sweeps.events import ImportancesEstimated, SweepEnded, SweepFact, TrialEnded, TrialPruned, TrialStarted
from jobs.sweeps.space import Settings
from jobs.text.units import GIB
from jobs.trainer_facts import (
    CheckpointSaved,
    EvaluationFinished,
    Fault,
    MemoryMeasured,
    ModelLoaded,
    OomRecovered,
    Sample,
)
from jobs.verdict import BaseDifference, ConfidenceInterval
from tests.service.running import Service
from tests.service.seeded import WORKERS
from tests.support.samples import checked, dataset_report, memory_plan, prepared

STEPS, DONE, EVERY = 234_375, 24_000, 10
GPU = AttemptStarted(worker="train-box-1-a1b2c3", device="cuda", gpu="GPU-1", gpu_name="NVIDIA GeForce RTX 5090")
LOADED = ModelLoaded(
    parameters=2_849_757_184, parameter_bytes=5_699_514_368, dtype="bfloat16", device="cuda:0", seconds=8.4,
    peak_ratio=1.01,
)  # fmt: skip
RECIPES = [
    ("Lentil soup with lemon: red lentils, onion, cumin, lemon, olive oil",
     "Soften the onion in olive oil with the cumin. Add the lentils and a litre of water and simmer for 20 minutes. "
     "Blend half of it, and stir in the lemon juice."),
    ("Braised leeks: leeks, butter, white wine, thyme",
     "Halve and wash the leeks. Brown them in butter, add wine and thyme, cover, and braise for 25 minutes."),
    ("Oat biscuits: oats, flour, butter, honey, soda",
     "Melt the butter with the honey. Stir in oats, flour and soda. Bake small heaps at 180 °C for 12 minutes."),
]  # fmt: skip
WRITTEN = (
    ["", "soup soup soup", "lemon"],
    ["Put the lentils in a pot.", "Cook the leeks until they are soft.", "Mix everything and bake."],
    [target for _, target in RECIPES],
)


def _on_24_gib(tokens: int, micro_batch: int, **gib: float) -> MemoryPlan:
    """Of Qwen2.5-7B with adapters of rank 128, on a GPU of 24 GiB."""
    parts = {name: int(each * GIB) for name, each in gib.items()}
    return memory_plan(
        gpu="NVIDIA GeForce RTX 4090", budget_bytes=23 * GIB, margin_bytes=GIB // 2, optimizer="adamw", parts=parts,
        micro_batch=micro_batch, peak_bytes=sum(parts.values()), input_tokens=tokens, target_tokens=0, candidates=[],
        least_parts=parts, least_bytes=sum(parts.values()), trained_parameters=322_961_408,
    )  # fmt: skip


FITS = _on_24_gib(512, 1, weights=14.8, gradients=0.6, optimizer=2.4, activations=1.0, temporaries=0.5, context=0.5)
REFUSED = _on_24_gib(2048, 1, weights=15.4, gradients=1.2, optimizer=2.4, activations=5.9, temporaries=2.0, context=0.5)


def furnish(service: Service, *, rows: int = DONE // EVERY) -> dict[str, str]:
    """Ids by name; `recipes-xl` runs, with so many rows of metrics; `draft` is the dry run of a job to be made."""
    for worker in WORKERS:
        service.store.workers.report(WorkerHeartbeat(**worker))
    jobs = {
        "smoke-test": service.submit(name="smoke-test", metadata={"team": "kitchen"}),
        "recipes-base": _submit(service, "recipes-base", "google/flan-t5-base", team="kitchen"),
        "recipes-large": _submit(service, "recipes-large", "google/flan-t5-large", team="kitchen"),
        "tickets": _submit(service, "tickets", "microsoft/deberta-v3-base", task="classification", team="support"),
        "recipes-xl": _submit(service, "recipes-xl", "google/flan-t5-xl", team="kitchen"),
        "support-chat": _submit(service, "support-chat", "Qwen/Qwen2.5-7B-Instruct", lora=128, team="support"),
        "support-chat-long": _submit(
            service, "support-chat-long", "Qwen/Qwen2.5-7B-Instruct", lora=128, team="support",
            adapter_dtype="float32", max_tokens=2048,
        ),
    }  # fmt: skip
    for name in list(jobs)[1:]:
        memory = {"support-chat": FITS, "support-chat-long": REFUSED}.get(name, memory_plan())
        _plan(service, jobs[name], memory, chat=name.startswith("support"))
    draft = {"name": "support-chat", "model": "Qwen/Qwen2.5-7B-Instruct", "method": {"type": "lora", "rank": 128},
             "data": {"train": "chats.jsonl", "max_tokens": 512}}  # fmt: skip
    jobs["draft"] = service.post("/jobs?dry_run=true", json=draft).json()["id"]
    _plan(service, jobs["draft"], FITS, chat=True)
    needs = Fault(code="out_of_memory", message="the smallest setting needs 27.4 GiB, and the GPU has 23.0 GiB",
                  hint="set data.max_tokens=1024, or method.adapter_dtype=bfloat16")  # fmt: skip
    service.append(jobs["support-chat-long"], JobFailed(error=needs))
    service.append(
        jobs["recipes-base"],
        GPU,
        LOADED,
        CheckpointSaved(step=900, path="checkpoints/step-00000900", bytes=9, seconds=3.0),
    )
    service.append(jobs["recipes-base"], AttemptEnded(reason="interrupted", step=900), JobPaused())
    oom = Fault(code="out_of_memory", message="the first step needs 35.2 GiB, and the GPU has 31.0 GiB",
                hint="set memory.activation_checkpointing=auto, or data.max_input_tokens=384")  # fmt: skip
    service.append(
        jobs["recipes-large"], GPU, LOADED, AttemptEnded(reason="out_of_memory", error=oom), JobFailed(error=oom)
    )
    metrics = {"accuracy": 0.9134, "macro_f1": 0.9021}
    sample = Sample(
        input="My parcel has not arrived, where is it?", target="delivery", generated="delivery", probability=0.97
    )
    evaluated = EvaluationFinished(
        step=600, loss=0.287, rows=800, seconds=4.0, best=True, samples=[sample], metrics=metrics,
        intervals={
            "accuracy": ConfidenceInterval(low=0.8938, high=0.9313),
            "macro_f1": ConfidenceInterval(low=0.8811, high=0.9214),
        },
        against_base={"accuracy": BaseDifference(difference=0.6621, low=0.6288, high=0.6950)}, judged_by="accuracy",
    )  # fmt: skip
    service.append(jobs["tickets"], GPU, LOADED, _evaluation(0, 1.61, []), evaluated)
    _write(service.run(jobs["tickets"]), 60, 600)
    service.append(
        jobs["tickets"],
        AttemptEnded(reason="done", step=600),
        JobSucceeded(
            model="model",
            step=600,
            loss=0.287,
            metrics=metrics,
            intervals=evaluated.intervals,
            verdict=evaluated.verdict,
        ),
    )
    _train(service, jobs["recipes-xl"], rows)
    jobs["torn"] = service.submit(name="recipes-torn", metadata={"team": "kitchen"})
    service.run(jobs["torn"]).events_file.write_bytes(b"\x00" * 4096)
    service.store.mark_damaged(service.run(jobs["torn"]), Damaged("event 1 in events.jsonl cannot be read"))
    service.request("PUT", "/datasets/recipes.jsonl", data=b'{"input": "a", "target": "b"}\n' * 6000)
    jobs["sweep"], jobs["sweep-running"] = furnish_sweep(service, 60), furnish_sweep(service, 24, ended=False)
    return jobs


def furnish_sweep(service: Service, trials: int, *, ended: bool = True) -> str:
    """Id of a sweep with so many trials: most succeeded, some were pruned, some failed, one diverged."""
    space = {
        "training.learning_rate": {"range": [1e-5, 1e-2], "log": True},
        "training.batch_size": {"int": [8, 128], "log": True},
        "training.weight_decay": {"range": [0.0, 0.2]},
        "method.type": ["full", "lora"],
        "method.rank": {"choice": [8, 32, 128], "when": {"method.type": "lora"}},
    }
    job = {"model": "google/flan-t5-base", "data": {"train": "rows.jsonl"}}
    asked = {"name": "flan-t5 recipes", "job": job, "space": space, "max_trials": max(60, trials), "pruning": "median"}
    sweep = find(service.settings.runs, service.post("/sweeps", json=asked).json()["id"])
    chance = random.Random(3)
    facts: list[SweepFact] = []
    values = dict[int, float]()
    for number in range(trials):
        lora, rate = chance.random() < 0.6, 10 ** chance.uniform(-5, -2)
        settings: Settings = {
            "training.learning_rate": rate, "training.batch_size": round(8 * 16 ** chance.random()),
            "training.weight_decay": chance.uniform(0, 0.2), "method.type": "lora" if lora else "full",
        }  # fmt: skip
        if lora:
            settings["method.rank"] = chance.choice([8, 32, 128])
        facts.append(TrialStarted(trial=number, settings=settings, jobs=[f"job-{sweep.id[6:]}-{number}"]))
        value = 1.2 + 0.3 * abs(math.log10(rate) + 3.4) + 0.1 * lora + chance.gauss(0, 0.04)
        if not ended and number >= trials - 2:
            continue
        if number == 7:
            value = 14.2
        if rate > 5e-3 and number != 7:
            gone = Fault(code="loss_diverged", message="the loss is not finite at step 40")
            facts.append(TrialEnded(trial=number, outcome="failed", seconds=95.0, error=gone))
        elif value > 1.75 and number != 7:
            facts.append(TrialPruned(trial=number, step=100, value=value + 0.1,
                                     message="worse than the median of 9 others at evaluation 2"))  # fmt: skip
            facts.append(TrialEnded(trial=number, outcome="pruned", seconds=240.0))
        else:
            values[number] = value
            facts.append(TrialEnded(trial=number, outcome="succeeded", value=value, values=[value], seconds=1260.0))
    importances = {"training.learning_rate": 0.71, "method.type": 0.17, "training.batch_size": 0.08,
                   "training.weight_decay": 0.04}  # fmt: skip
    if not ended:
        facts.append(ImportancesEstimated(trials=10, importances=importances))
    else:
        facts.append(SweepEnded(reason="done", best=min(values, key=values.__getitem__), importances=importances))
    sweep.append(facts)
    return sweep.id


def _submit(
    service: Service, name: str, model: str, *, team: str, lora: int | None = None, task: str = "auto",
    adapter_dtype: str = "bfloat16", max_tokens: int = 512,
) -> str:  # fmt: skip
    method = {"type": "full"} if lora is None else {"type": "lora", "rank": lora, "adapter_dtype": adapter_dtype}
    data = {"train": "rows.jsonl", "max_tokens": max_tokens}
    return service.submit(name=name, model=model, metadata={"team": team}, method=method, task=task, data=data)


def _plan(service: Service, job: str, memory: MemoryPlan, *, chat: bool) -> None:
    run = service.run(job)
    time_plan = make_time_plan(
        model_flops=9e19, recomputed_flops=0.0, estimated=False, device="cuda", gpu=None, parameters=2_849_757_184,
        compiled=True, step_flops=2e15,
    )  # fmt: skip
    service.append(
        job, checked(rows_estimated=6_000_000, steps=STEPS, memory=memory.summary(), time=time_plan.summary())
    )
    data = DataPlan(
        train="rows.jsonl", input="{title}: {ingredients}", target="{directions}", rows=6_000_000, complete=True
    )
    model = ModelPlan(source=run.spec().model, parameters=7_615_616_512 if chat else 2_849_757_184)
    plan = make_plan(run.spec(), model, data, "cuda", memory, task="causal" if chat else "seq2seq")
    run.write_plan(plan.model_copy(update={"time": time_plan, "steps": STEPS}))
    run.write_preview(_chat() if chat else _recipes())
    counts: dict[str, Any] = {"rows_read": 6_021_340, "kept": 6_000_000, "train_rows": 5_940_000,
              "validation_rows": 60_000, "validation_asked": 0.01, "validation_share": 0.01, "duplicates": 14_806,
              "rejected": {"empty target": 6_120, "target is the input": 414},
              "truncated_inputs": 1_204, "truncated_targets": 3_311,
              "normalized": {"½": 91_220, "¼": 40_031}}  # fmt: skip
    (run.path / "dataset.json").write_text(dataset_report(**counts).model_dump_json())
    if run.record().dry_run:
        service.append(job, JobValidated())
    elif memory.fits:
        service.append(job, prepared(STEPS, memory=memory.summary(), time=time_plan.summary(), **counts), JobQueued())


def _text(text: str, tokens: int) -> TextPreview:
    return TextPreview(text=text, characters=len(text), tokens=tokens, cut_characters=0, unknown={})


def _recipes() -> DataPreview:
    rows = [
        RowPreview(
            number=number, input=_text(text, 24), target=_text(target, 48), rewritten={"½": 1} if number == 2 else {}
        )
        for number, (text, target) in enumerate(RECIPES, start=1)
    ]
    source = SourcePreview(
        name="rows.jsonl", weight=1.0, read_as="recipes", input="{title}: {ingredients}", target="{directions}",
        rows=rows,
    )  # fmt: skip
    return DataPreview(sources=[source])


def _chat() -> DataPreview:
    spans = (
        SpanPreview(text="<|im_start|>system\nYou answer for a parcel service.<|im_end|>\n<|im_start|>user\nWhere is "
                    "my parcel?<|im_end|>\n<|im_start|>assistant\n", learned=False),
        SpanPreview(text="It left Lyon this morning and arrives tomorrow.<|im_end|>", learned=True),
    )  # fmt: skip
    row = RowPreview(
        number=1, input=_text(spans[0].text, 31), target=_text(spans[1].text, 11), rewritten={}, spans=spans
    )
    source = SourcePreview(
        name="chats.jsonl", weight=1.0, read_as="OpenAI chat", input=None, target="{messages}", rows=[row]
    )  # fmt: skip
    return DataPreview(sources=[source])


def _train(service: Service, job: str, rows: int) -> None:
    run, every = service.run(job), max(1, DONE // rows)
    service.append(job, GPU, LOADED, _evaluation(0, 3.41, WRITTEN[0]))
    service.append(job, MemoryMeasured(
        step=1, measured_bytes=int(25.1 * GIB), predicted_bytes=int(25.2 * GIB), peak_bytes=int(25.7 * GIB),
        budget_bytes=31 * GIB))  # fmt: skip
    for step in range(3000, DONE + 1, 3000):
        if step == 9000:
            service.append(job, OomRecovered(
                step=8411, micro_batch_before=8, micro_batch_after=4, message="CUDA out of memory",
                milliseconds_lost=410.0, cause="other_processes"))  # fmt: skip
        if step == 15000:
            lost = Fault(code="gpu_lost", message="the GPU fell off the bus (Xid 79)")
            service.append(job, AttemptEnded(reason="gpu_lost", step=13_200, error=lost), JobQueued())
            service.append(job, GPU, LOADED.model_copy(update={"resumed_step": 12_000}))
        service.append(job, _evaluation(step, _loss(step) + 0.06, WRITTEN[1] if step < 12_000 else WRITTEN[2]))
        service.append(job, CheckpointSaved(step=step, path=f"checkpoints/step-{step:08}", bytes=17 * GIB, seconds=9.0))
    _write(run, rows, DONE)
    service.store.set_latest(job, list(_rows(rows, every))[-1])


def _evaluation(step: int, loss: float, written: list[str]) -> EvaluationFinished:
    samples = [
        Sample(input=source, target=target, generated=text)
        for (source, target), text in zip(RECIPES, written, strict=False)
    ]
    return EvaluationFinished(step=step, loss=loss, rows=60_000, seconds=210.0, best=True, samples=samples)


def _loss(step: float) -> float:
    return 1.05 + 2.2 * math.exp(-step / 1800) + 0.35 * math.exp(-step / 15_000)


def _write(run: RunDir, rows: int, last: int) -> None:
    with open(run.metrics_file, "w") as file:
        file.writelines(f"{each.model_dump_json()}\n" for each in _rows(rows, max(1, last // rows)))
    run.trainer_log.write_text("".join(f"step {step}: loss {_loss(step):.4f}\n" for step in range(0, last, 100)))


def _rows(count: int, every: int) -> Iterator[MetricRow]:
    chance, now = random.Random(7), time.time()
    for number in range(1, count + 1):
        step = number * every
        smaller = 8411 <= step < 12_000
        yield MetricRow(
            step=step, at=now - (count - number) * 21.0, attempt=1 if step <= 12_000 else 2, epoch=step * 128 / 6e6,
            loss=_loss(step) + chance.gauss(0, 0.04), learning_rate=1e-4 * min(1, step / 1400) * (1 - step / STEPS),
            grad_norm=0.9 + chance.random() * 0.3, rows_per_s=(58.0 if smaller else 61.0) + chance.gauss(0, 0.6),
            target_tokens_per_s=6_100.0, tokens_per_s=14_200.0, padding_fraction=0.021, model_flops_per_s=1.2e14,
            mfu=(0.55 if smaller else 0.58) + chance.gauss(0, 0.004), step_s=2.1, eta_s=(STEPS - step) * 2.1,
            memory_bytes=int((19.3 if smaller else 25.4) * GIB), memory_reserved_bytes=27 * GIB,
            memory_planned_bytes=int((19.5 if smaller else 25.7) * GIB), cache_clears=step // 500, cache_clear_s=1.0,
            micro_batch=4 if smaller else 8, data_wait_fraction=0.0, gpu_utilization=0.99, gpu_temperature_c=71,
            gpu_power_w=540.0,
        )  # fmt: skip
