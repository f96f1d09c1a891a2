"""A chat model from its rows to a folder that opens, as the stages make it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
from functools import partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from jobs.disk.rundir import RunDir
from jobs.errors import Rejected
from jobs.preview import DataPreview
from jobs.trainer_facts import EvaluationFinished
from tests.training.attempts import attempt, facts, logged, same_tensors, trained
from tests.training.stepping import Noting
from tests.training.tasks.causal.families import FAMILIES, VOCABULARY, config_of, model_of
from tests.training.workplace import EXAMPLES, Workplace, dataset_of, pairs
from tests.training.workplace import of_rows as of_rows
from worker.training.dataset.data import PreparedDataset
from worker.training.generation.serving import learned_new_tokens
from worker.training.models.model_files import readable_config, validate_folder
from worker.training.network.model import load
from worker.training.rows.text import ENDS
from worker.training.tasks.causal import builtin
from worker.training.tasks.causal.layout import CausalFlops, layout_of
from worker.training.tasks.causal.task import Causal

CHATS = EXAMPLES.with_name("chats.jsonl")
SETTINGS: dict[str, Any] = {
    "model": "builtin:qwen-tiny",
    "training": {"epochs": 2, "batch_size": 16, "learning_rate": 3e-3},
    "memory": {"micro_batch": 4},
    "evaluation": {"every_steps": 4, "samples": 2, "sample_tokens": 24},
    "checkpoint": {"every_steps": 4},
    "log": {"every_steps": 2},
}


def rows_of(workplace: Workplace) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in CHATS.read_text().splitlines()[:80]]
    workplace.rows("chats.jsonl", rows)
    return rows


def job(workplace: Workplace, **parts: Any) -> RunDir:
    return workplace.job("chats.jsonl", **SETTINGS | {"data": {"validation": 0.1}} | parts)


def said_by_readme(run: RunDir) -> str:
    """What the snippet of a finished model prints, at the length of the job's samples."""
    [code] = re.findall(r"```python\n(.*?)```", (run.model / "README.md").read_text(), re.S)
    said, before = io.StringIO(), Path.cwd()
    os.chdir(run.model)
    try:
        with contextlib.redirect_stdout(said):
            exec(compile(re.sub(r"max_new_tokens=\d+", "max_new_tokens=24", code), "README", "exec"), {})
    finally:
        os.chdir(before)
    return said.getvalue().strip()


def test_a_stopped_run_goes_on_bit_for_bit_and_its_model_writes_what_the_job_wrote(workplace: Workplace) -> None:
    rows = rows_of(workplace)
    whole, stopped = job(workplace), job(workplace)
    checked = workplace.check(whole)["plan"]
    assert (checked["task"], checked["read_as"], checked["input"], checked["target"]) == (
        "causal", "OpenAI chat", None, "{messages}",
    )  # fmt: skip
    prepared = workplace.prepare_only(whole)["data"]
    replies = sum(turn["role"] == "assistant" for row in rows for turn in row["messages"])
    tokenizer = AutoTokenizer.from_pretrained(whole.plan().model.folder)
    assert prepared["kept"] == 80
    texts = [turn["content"] for row in rows for turn in row["messages"] if turn["role"] == "assistant"]
    assert prepared["target_tokens"] == replies + sum(len(tokenizer(text)["input_ids"]) for text in texts)
    workplace.prepare(stopped)
    assert attempt(whole) == 0
    assert attempt(stopped, stop_at=6) == 75 and attempt(stopped, 2) == 0
    assert logged(whole) == logged(stopped)
    assert same_tensors(whole.model / "model.safetensors", stopped.model / "model.safetensors")
    last = facts(whole, EvaluationFinished)[-1]
    assert trained(whole).step == whole.plan().steps
    assert said_by_readme(whole) == last.samples[0].generated
    generation = json.loads((whole.model / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [tokenizer.convert_tokens_to_ids(builtin.END), tokenizer.pad_token_id]
    assert not {"max_new_tokens", "max_length"} & generation.keys(), "a ceiling in servers that read it"
    longest = prepared["lengths"]["target"]["after"]["p99"]
    page = (whole.model / "README.md").read_text()
    assert f"model.generate(**inputs, max_new_tokens={longest}, " in page and learned_new_tokens(whole) == longest
    assert (
        "has no settings of sampling, like that of the base model, and sets no limit of tokens: 99 % of the targets"
        in page
    )
    opened = AutoModelForCausalLM.from_pretrained(whole.model)
    assert opened.get_output_embeddings().weight is opened.get_input_embeddings().weight


def test_rows_of_an_earlier_version_stay_without_the_white_space_at_their_ends(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    workplace.rows("rows.jsonl", [{"text": f"    return {n}\n"} for n in range(20)])
    asked: dict[str, Any] = {"model": "builtin:qwen-tiny", "data": {"validation": 0.0}}
    before, now = (workplace.job(**asked) for _ in range(2))
    with monkeypatch.context() as earlier:
        earlier.setattr(Causal, "__init__", partialmethod(Causal.__init__, keeps_ends=False))
        workplace.check(before)
    workplace.check(now)
    assert (before.plan().data.ends_kept, now.plan().data.ends_kept) == (False, True)
    rewritten = [workplace.prepare_only(run)["data"]["rewritten"] for run in (before, now)]
    assert rewritten == [{ENDS: 20}, {}]
    first = [
        AutoTokenizer.from_pretrained(run.plan().model.folder).decode(dataset_of(run).train.input(0).tolist()[:-1])
        for run in (before, now)
    ]
    assert first == ["return 0", "    return 0\n"]
    shutil.rmtree(workplace.settings.prepared)
    monkeypatch.setattr(RunDir, "plan_is_final", lambda run: True)  # an attempt has trained with it
    plan = before.plan()
    workplace.prepare_only(before)
    assert before.plan() == plan, "the same rows by the same name"


def test_each_token_is_counted_once(workplace: Workplace) -> None:
    workplace.rows("rows.jsonl", [{"text": f"Line {number} of {number * 'long '}story."} for number in range(40)])
    workplace.rows("held_out.jsonl", [{"text": "Another story."}])
    settings = SETTINGS | {"log": {"every_steps": 1}, "training": {"epochs": 1, "batch_size": 4}}
    run = workplace.job(**settings, data={"validation": "held_out.jsonl"})
    workplace.prepare(run)
    assert attempt(run) == 0
    rows, logged_rows = PreparedDataset.open(Path(str(run.plan().data.prepared))).train, run.metrics()
    assert len(rows) == 4 * len(logged_rows)
    tokens = sum(4 * (row.tokens_per_s or 0.0) / row.rows_per_s for row in logged_rows)
    learned = sum(4 * row.target_tokens_per_s / row.rows_per_s for row in logged_rows)
    assert tokens == pytest.approx(rows.input_lengths.sum()) and learned == pytest.approx(rows.target_lengths.sum())
    assert all(0 <= (row.padding_fraction or 0.0) < 1 for row in logged_rows)


def test_the_validation_loss_is_that_of_transformers(workplace: Workplace) -> None:
    rows_of(workplace)
    run = job(workplace, training=SETTINGS["training"] | {"epochs": 1})
    workplace.prepare(run)
    assert attempt(run) == 0
    model = AutoModelForCausalLM.from_pretrained(run.model, dtype=torch.float32).eval()
    rows = PreparedDataset.open(Path(str(run.plan().data.prepared))).validation
    total, count = 0.0, 0
    for row in range(len(rows)):
        ids = torch.from_numpy(rows.input(row).astype(np.int64))[None]
        labels = torch.full_like(ids, -100)
        learned = torch.from_numpy(rows.target(row).astype(np.int64))
        labels[0, learned] = ids[0, learned]
        with torch.no_grad():
            total += float(model(input_ids=ids, labels=labels).loss) * len(learned)
        count += len(learned)
    loss = trained(run).loss
    assert loss is not None and loss == pytest.approx(total / count, rel=0.01)


def test_prepare_gives_the_preview_the_tokens_of_a_builtin_model(workplace: Workplace) -> None:
    chats = rows_of(workplace)
    run = job(workplace, data={"validation": 0.1, "max_tokens": 64})
    workplace.check(run)
    [checked] = run.preview().sources
    assert [row.input.tokens for row in checked.rows] == [None] * 3
    said = [turn["content"] for turn in chats[0]["messages"] if turn["role"] == "assistant"]
    shown = [span.text.removesuffix("<|im_end|>") for span in checked.rows[0].spans if span.learned]
    assert shown == said, "every reply, as far as anybody knows"
    workplace.prepare_only(run)
    [prepared] = run.preview().sources
    assert prepared.model_copy(update={"rows": checked.rows}) == checked
    assert [row.number for row in prepared.rows] == [row.number for row in checked.rows]
    tokenizer = AutoTokenizer.from_pretrained(run.plan().model.folder)
    first = prepared.rows[0]
    learned = [span.text for span in first.spans if span.learned]
    assert learned and all(text.removesuffix("<|im_end|>") in reply for text, reply in zip(learned, said, strict=False))
    whole = len(tokenizer.apply_chat_template(chats[0]["messages"], tokenize=True, return_dict=False))
    assert first.input.tokens == min(whole, 64)
    assert any(row.input.cut_characters or row.target.cut_characters for row in prepared.rows)


def test_a_row_that_the_chat_template_cannot_write_is_not_previewed(workplace: Workplace) -> None:
    rows = rows_of(workplace)
    strange = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b<|im_end|>c"}]}
    workplace.rows("chats.jsonl", [strange, *rows])
    run = job(workplace, data={"validation": 0.1, "max_invalid_fraction": 0.1})
    report = workplace.prepare(run)["data"]
    numbers = [row.number for row in run.preview().sources[0].rows]
    assert report["rejected"] and 1 not in numbers and 2 in numbers


def test_pairs_and_plain_text_are_learned_as_well(workplace: Workplace) -> None:
    workplace.rows("rows.jsonl", [{"text": f"Line {number} of a long story."} for number in range(40)])
    run = workplace.job(**SETTINGS)
    workplace.prepare(run)
    assert run.plan().data.input is None and run.plan().data.target == "{text}"
    assert attempt(run) == 0
    sample = facts(run, EvaluationFinished)[-1].samples[0]
    assert sample.input.startswith("Line") and sample.target.endswith("story.")
    workplace.rows("pairs.jsonl", pairs(30))
    both = workplace.job("pairs.jsonl", **SETTINGS)
    workplace.prepare(both)
    [shown] = DataPreview.model_validate_json((both.path / "preview.json").read_bytes()).sources
    assert (shown.read_as, shown.input, shown.target) == ("input and target", "{input}", "{target}")


def test_the_task_is_the_models_and_another_is_refused(workplace: Workplace) -> None:
    rows_of(workplace)
    for task, model, param in (("seq2seq", "builtin:qwen-tiny", "task"), ("causal", "builtin:t5-tiny", "task")):
        with pytest.raises(Rejected) as caught:
            workplace.check(job(workplace, model=model, task=task))
        assert (caught.value.detail_code, caught.value.param) == ("model_not_supported", param)
        assert caught.value.hint is not None and "leave it out" in caught.value.hint
    workplace.check(job(workplace, task="causal"))
    workplace.rows("text.jsonl", [{"text": f"line {number}"} for number in range(30)])
    with pytest.raises(Rejected) as caught:
        workplace.check(workplace.job("text.jsonl", data={"target": "text"}))
    assert (caught.value.detail_code, caught.value.param) == ("no_input", "data.input")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_of_every_family_is_loaded_once_with_its_guards(family: str, tmp_path: Path, noting: Noting) -> None:
    model = model_of(family, torch.bfloat16)
    builtin.learn_tokenizer(["some text"]).save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    task = Causal()
    config = json.loads((tmp_path / "config.json").read_text())
    assert task.takes(config)
    tensors = validate_folder(tmp_path, "x", task)
    layout = layout_of(config)
    assert {name: stored.shape for name, stored in tensors.items()} == layout.shapes
    assert layout.parameters == sum(each.numel() for each in model.parameters())
    loaded = load(tmp_path, torch.device("cpu"), task=task, dropout=None, fused=True, activation_checkpointing=0)
    assert loaded.parameters == layout.parameters
    assert (layout.tied, layout.head) == (config["tie_word_embeddings"], "lm_head.weight")


def test_pythia_has_its_head_under_the_name_of_the_hub(workplace: Workplace) -> None:
    folder = workplace.data / "pythia"
    model_of("gpt_neox", torch.bfloat16, vocab_size=512).save_pretrained(folder)
    builtin.learn_tokenizer(["question 1, answer 1"]).save_pretrained(folder)
    assert "embed_out.weight" in load_file(folder / "model.safetensors")
    workplace.rows("rows.jsonl", [{"prompt": f"question {n}", "completion": f"answer {n}"} for n in range(40)])
    run = workplace.job(**SETTINGS | {"model": "./pythia"}, data={"validation": 0.1, "max_tokens": 128})
    workplace.prepare(run)
    assert attempt(run) == 0
    assert (trained(run).loss or 9.0) < (trained(run).first_loss or 0.0)
    opened = AutoModelForCausalLM.from_pretrained(run.model, dtype=torch.bfloat16)
    assert torch.equal(opened.lm_head.weight, load_file(run.model / "model.safetensors")["lm_head.weight"])


def test_infinities_of_a_config_are_numbers_however_they_are_written(tmp_path: Path) -> None:
    for written in ({"__float__": "Infinity"}, float("inf")):
        small = {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "vocab_size": 96,
            "num_heads": 8,
            "head_dim": 8,
            "n_groups": 2,
        }
        config = {"model_type": "mamba2", **small, "time_step_limit": [0.0, written]}
        config |= {"nested": {"low": {"__float__": "-Infinity"}}}
        (tmp_path / "config.json").write_text(json.dumps(config))
        found = readable_config(tmp_path, "x")
        assert (found["time_step_limit"], found["nested"]) == ([0.0, float("inf")], {"low": float("-inf")})
        assert layout_of(found).parameters > 0


def test_codegen_whose_config_names_no_padding_is_trained_within_its_places(workplace: Workplace) -> None:
    folder = workplace.data / "model"
    model_of("codegen", torch.bfloat16, vocab_size=512).save_pretrained(folder)
    builtin.learn_tokenizer(["question 1, answer 1"]).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    del config["pad_token_id"]  # CodeGenConfig has no such attribute of its own
    (folder / "config.json").write_text(json.dumps(config))
    workplace.rows("rows.jsonl", [{"prompt": f"question {n}", "completion": f"answer {n}"} for n in range(40)])
    asked = SETTINGS | {"model": "./model"}
    with pytest.raises(Rejected, match="the model knows 128 positions"):  # of a table that is in no file
        workplace.check(workplace.job(**asked))
    run = workplace.job(**asked, data={"validation": 0.1, "max_tokens": 128})
    workplace.prepare(run)
    assert attempt(run) == 0
    assert all(each.samples[0].generated for each in facts(run, EvaluationFinished))


def test_gpt2_is_trained_from_the_files_of_the_hub_within_its_places(workplace: Workplace) -> None:
    folder = workplace.data / "gpt2"
    model = model_of("gpt2", torch.bfloat16, vocab_size=512)
    model.save_pretrained(folder)
    builtin.learn_tokenizer(["Line of a long, long story."]).save_pretrained(folder)
    sampling = {"do_sample": True, "temperature": 20.0, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.5}
    said = sampling | {"eos_token_id": 2, "max_length": 50, "num_beams": 3}
    (folder / "generation_config.json").write_text(json.dumps(said))
    weights = load_file(folder / "model.safetensors")
    as_there = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 128, 128, dtype=torch.bfloat16) for layer in range(2)}
    save_file(as_there | masks, folder / "model.safetensors", metadata={"format": "pt"})
    workplace.rows("rows.jsonl", [{"text": f"Line {number} of a {200 * 'long '}story."} for number in range(40)])
    with pytest.raises(Rejected, match="the model knows 128 positions") as caught:
        workplace.check(workplace.job(**SETTINGS | {"model": "./gpt2"}))
    assert (caught.value.detail_code, caught.value.param) == ("limit_too_large", "data.max_tokens")
    run = workplace.job(**SETTINGS | {"model": "./gpt2"}, data={"max_tokens": 128, "validation": 0.1})
    workplace.prepare(run)
    assert attempt(run) == 0
    assert (trained(run).loss or 9.0) < (trained(run).first_loss or 0.0)
    written = {each.step: each.samples[0].generated for each in facts(run, EvaluationFinished)}
    assert said_by_readme(run) == written[trained(run).step], "greedily, though a bare `generate` draws"
    delivered = json.loads((run.model / "generation_config.json").read_text())
    assert {key: value for key, value in delivered.items() if not key.endswith("_token_id")} == sampling
    page = (run.model / "README.md").read_text()
    assert (
        "(`do_sample` true, `temperature` 20.0, `top_k` 20, `top_p` 0.8, `repetition_penalty` 1.5), and sets no limit"
        in page
    )


@pytest.mark.parametrize("family", ["qwen2", "llama", "gemma", "phi3", "gpt2", "mixtral", "qwen3_moe"])
def test_flops_are_those_that_torch_counts(family: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model, config = model_of(family, torch.float32), config_of(family)
    ids = torch.arange(3, 3 + 24)[None] % VOCABULARY
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False)
    flops = CausalFlops.of_config(config)
    ours = flops.forward(np.array([24]), np.array([24]))
    masked = flops.input_pairs * 24**2  # eager attention computes what the causal mask hides as well
    assert ours + masked == pytest.approx(counter.get_total_flops(), rel=0.02)
    assert CausalFlops.recomputed(config, 0).forward(np.array([24]), np.array([24])) == 0
    every = CausalFlops.recomputed(config, 1)
    assert every.per_input == flops.per_input and every.per_target == 0.0


def test_the_built_in_model_is_the_same_every_time(tmp_path: Path) -> None:
    texts = [turn["content"] for line in CHATS.read_text().splitlines()[:50] for turn in json.loads(line)["messages"]]
    for name, seed in (("one", 1), ("again", 1), ("other", 2)):
        (tmp_path / name).mkdir()
        builtin.build(tmp_path / name, texts, seed)
    for file in (tmp_path / "one").iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes(), file.name
    assert not same_tensors(tmp_path / "one" / "model.safetensors", tmp_path / "other" / "model.safetensors")
