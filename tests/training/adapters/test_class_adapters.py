"""Adapters beside an encoder, with a head of labels that is trained whole: gradients, files and what opens them."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import AutoPeftModelForSequenceClassification, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from jobs.errors import Rejected
from jobs.spec import LoraMethod
from jobs.trainer_facts import ModelLoaded
from tests.training.attempts import attempt, facts, finished, logged, same_tensors
from tests.training.snippets import blocks, run_snippet
from tests.training.tasks.classification import test_exactness, test_stages
from tests.training.tasks.classification.families import FAMILIES, LABELS, config_of, model_of, write_pretrained
from tests.training.tasks.classification.test_exactness import PAD, ROWS, SEVERAL, SINGLE, gradients, plain
from tests.training.tasks.classification.test_stages import NEW, job
from tests.training.workplace import Workplace
from worker.training.adapters.lora import Lora, targets_of
from worker.training.dataset.data import Rows
from worker.training.loop import accumulate
from worker.training.network.model import load
from worker.training.tasks.classification import fused
from worker.training.tasks.classification.batches import ClassLimit
from worker.training.tasks.classification.fused import ClassLoss
from worker.training.tasks.classification.layout import layout_of
from worker.training.tasks.classification.task import Classification

rows, several = test_exactness.rows, test_exactness.several
place, planning = test_stages.place, test_stages.planning
CPU = torch.device("cpu")
LORA: dict[str, Any] = {"type": "lora", "rank": 4, "dropout": 0.1}
LOOKS = 12
"""Until an attempt stops in the middle."""


def lora(**settings: Any) -> Lora:
    return Lora(LoraMethod.model_validate({"type": "lora", "rank": 4} | settings))


@pytest.mark.parametrize("settings", [{}, {"dora": True}])
@pytest.mark.parametrize("loss", [SINGLE, SEVERAL])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_is_that_of_plain_peft_however_it_is_cut(
    family: str, loss: ClassLoss, settings: dict[str, Any], rows: Rows, several: Rows
) -> None:
    data = several if loss.several else rows
    model = model_of(family).train()
    fused.configure(model, fused=True, dropout=0.0)
    head = layout_of(config_of(family)).head_modules
    theirs: Any = get_peft_model(
        copy.deepcopy(model),
        LoraConfig(r=4, lora_alpha=4, target_modules=targets_of(model, lora().settings, head), task_type="SEQ_CLS",
                   modules_to_save=list(head), use_dora=bool(settings)),
    ).double()  # fmt: skip
    lora(**settings).inject(model, 0, head)
    torch.nn.Module.double(model).train()
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    names = {name: their_name(name, head) for name in trained}
    with torch.no_grad():
        for name, parameter in trained.items():
            if "lora_" in name:
                parameter.normal_(0, 0.1)
            theirs.get_parameter(names[name]).copy_(parameter)
    expected, wanted = plain(theirs.train(), data, loss)
    assert wanted.keys() == set(names.values())
    for micro_batch in (1, 3, ROWS):
        model.zero_grad()
        batches = ClassLimit.of(data, micro_batch).with_loss(loss).batches(data, [np.arange(ROWS)], PAD)
        assert float(accumulate(model, batches)) == pytest.approx(expected, rel=1e-12)
        found = gradients(model)
        largest = max(float(gradient.norm()) for gradient in wanted.values())
        for name, gradient in found.items():
            assert float((gradient - wanted[names[name]]).norm()) <= 1e-12 * largest, (name, micro_batch)


def their_name(name: str, head: Any) -> str:
    """Of a parameter in peft's model."""
    for module in head:
        if name.startswith(f"{module}."):
            return f"base_model.model.{module}.modules_to_save.default.{name.removeprefix(f'{module}.')}"
    return f"base_model.model.{name}"


@pytest.mark.parametrize("family", ["bert", "roberta", "deberta-v2", "modernbert"])
def test_its_adapter_opens_with_peft_and_gives_the_same_logits(family: str, place: Workplace) -> None:
    folder = write_pretrained(place.data / "model", family)
    run = job(place, method=LORA, training={"epochs": 2, "batch_size": 8, "learning_rate": 0.02})
    assert set(place.check(run)["plan"]["new_tensors"]) == NEW[family]
    place.prepare_only(run)
    store = Path(str(run.plan().model.folder))
    before = (store / "model.safetensors").read_bytes()
    assert attempt(run) == 0
    assert (store / "model.safetensors").read_bytes() == before
    files = {path.name for path in run.model.iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "config.json", "README.md"} <= files
    assert not files & {"model.safetensors", "generation_config.json"}
    config, saved = (
        json.loads((run.model / "adapter_config.json").read_text()),
        load_file(run.model / "adapter_model.safetensors"),
    )
    head = layout_of(config_of(family)).head_modules
    assert config["task_type"] == "SEQ_CLS" and config["modules_to_save"] == sorted(head)
    of_head = {name for name in saved if "lora_" not in name}
    assert {f"base_model.model.{name}" for name in NEW[family]} <= of_head
    first = load_file(store / "model.safetensors")
    assert all(not torch.equal(saved[name], first[name.removeprefix("base_model.model.")]) for name in of_head)

    text = AutoTokenizer.from_pretrained(run.model)("where is my parcel, number 7", return_tensors="pt").input_ids
    by_path: Any = AutoPeftModelForSequenceClassification.from_pretrained(str(run.model), dtype=torch.bfloat16)
    assert by_path.config.id2label == dict(enumerate(sorted(LABELS)))

    def from_pretrained(**settings: Any) -> Any:
        """The base is the pretrained model, whose head is another one, at random."""
        own = AutoConfig.from_pretrained(run.model)
        base = AutoModelForSequenceClassification.from_pretrained(folder, config=own, dtype=torch.bfloat16)
        return PeftModel.from_pretrained(base, str(run.model), **settings)

    spec, data = run.spec(), run.plan().data
    task, method = Classification.of(spec, data), Lora(LoraMethod.model_validate(LORA))
    ours = load(store, CPU, task=task, dropout=None, fused=True, activation_checkpointing=0, method=method).model
    with torch.no_grad():
        for name, tensor in method.weights(ours).items():
            tensor.copy_(saved[name])
        models = by_path, from_pretrained(), from_pretrained(autocast_adapter_dtype=False), ours
        wide, same, narrow, own = (model.eval()(input_ids=text).logits for model in models)
    assert torch.equal(wide, same) and torch.equal(narrow, own)


@pytest.mark.parametrize(("family", "dora"), [("bert", False), ("deberta-v2", False), ("modernbert", True)])
def test_a_merged_classifier_is_verified_and_opens_by_itself(family: str, dora: bool, place: Workplace) -> None:
    write_pretrained(place.data / "model", family)
    run = job(
        place,
        method=LORA | {"merge": True, "dora": dora},
        training={"epochs": 2, "batch_size": 8, "learning_rate": 0.02},
    )
    place.prepare(run)
    assert attempt(run) == 0
    page = (run.model / "README.md").read_text()
    said = r"log-probability of a row changes by (\S+) nats .* and by (\S+) before"
    [(rounded, exact)] = re.findall(said, page)
    assert float(exact) <= 1e-12 and 0 < abs(float(rounded)) < 0.05
    whole, info = AutoModelForSequenceClassification.from_pretrained(run.model, dtype="auto", output_loading_info=True)
    assert not any(info.values()) and whole.dtype == torch.bfloat16
    base = AutoModelForSequenceClassification.from_pretrained(str(run.plan().model.folder), dtype=torch.float32)
    theirs: Any = PeftModel.from_pretrained(base, str(run.model / "adapter"))
    merged = theirs.merge_and_unload().state_dict()
    for name, weight in whole.state_dict().items():
        assert torch.allclose(weight.float(), merged[name], rtol=2**-8, atol=1e-6), name


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(place: Workplace) -> None:
    write_pretrained(place.data / "model", "roberta")
    whole, broken = (job(place, method=LORA, memory={"micro_batch": 4, "optimizer": "adamw"}) for _ in range(2))
    place.prepare(whole)
    broken.write_plan(whole.plan())
    assert attempt(whole) == 0
    assert attempt(broken, 1, stop_at=LOOKS) == 75
    torch.rand(5)
    assert attempt(broken, 2) == 0
    assert facts(broken, ModelLoaded, 2)[0].resumed_step
    assert logged(broken) == logged(whole) and finished(broken, 2).result == finished(whole).result
    assert same_tensors(broken.model / "adapter_model.safetensors", whole.model / "adapter_model.safetensors")


def test_the_snippet_of_its_page_tells_the_label_of_the_job(place: Workplace) -> None:
    write_pretrained(place.data / "model", "bert")
    run = job(place, method=LORA, training={"epochs": 2, "batch_size": 8, "learning_rate": 0.02})
    place.prepare(run)
    assert attempt(run) == 0
    assert run_snippet(run.model) == blocks((run.model / "README.md").read_text(), "text")[0] + "\n"


def test_the_plan_counts_head_and_adapters(planning: Workplace) -> None:
    write_pretrained(planning.data / "model", "roberta")
    plans = {}
    for name, method in (("full", "full"), ("lora", LORA)):
        run = job(planning, method=method, memory={"micro_batch": 4, "optimizer": "adamw"})
        planning.prepare(run)
        plans[name] = run.plan()
    full, adapted = plans["full"], plans["lora"]
    assert full.memory and adapted.memory and full.time and adapted.time and adapted.memory.disk
    head = layout_of(config_of("roberta")).head_parameters
    model = model_of("roberta", torch.bfloat16)
    lora(dropout=0.1).inject(model, 0, layout_of(config_of("roberta")).head_modules)
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    assert adapted.memory.trained_parameters == trained > head
    assert adapted.memory.parts["gradients"] == 2 * trained
    assert adapted.memory.parts["weights"] == full.memory.parts["weights"] + 2 * (trained - head)
    assert adapted.memory.disk.model_bytes == 2 * trained
    assert adapted.time.model_flops < 0.9 * full.time.model_flops


@pytest.mark.parametrize("targets", [["classifier"], ["pooler.dense"], "bert.pooler.*"])
def test_targets_of_the_head_alone_are_refused(targets: Any) -> None:
    with pytest.raises(Rejected, match="the head is trained whole") as caught:
        lora(targets=targets).inject(model_of("bert"), 0, layout_of(config_of("bert")).head_modules)
    assert caught.value.detail_code == "target_is_head"


def test_targets_by_an_ending_leave_the_head_to_be_trained_whole() -> None:
    model = model_of("bert")
    head = layout_of(config_of("bert")).head_modules
    found = targets_of(model, lora(targets=["dense"]).settings, head)
    assert len(found) == 6 and "bert.pooler.dense" not in found


def test_a_head_is_not_trained_in_float16() -> None:
    method = Lora(LoraMethod.model_validate({"type": "lora", "rank": 4}), torch.float16)
    with pytest.raises(Rejected, match="is trained whole, and float16 loses updates") as caught:
        method.inject(model_of("bert", torch.float16), 0, layout_of(config_of("bert")).head_modules)
    assert (caught.value.detail_code, caught.value.param) == ("no_float16", "method.base_dtype")
