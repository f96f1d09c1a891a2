"""Exports: each is opened by its own program, and says of held-out tokens what the trained model says."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from benchmarks.corpus import dataset_of
from jobs.attempt import Finished
from jobs.disk.rundir import RunDir
from jobs.errors import DeviceBusy, Rejected
from jobs.export import GGUF_FAMILIES, REPORT, ExportFormat, ExportReport, FinishedModel
from tests.training.adapters.test_adapter_runs import LORA
from tests.training.attempts import attempt
from tests.training.conftest import MakeRun
from tests.training.forked import stage
from tests.training.tasks.causal.families import config_of, model_of
from tests.training.tasks.seq2seq import families as encoder_decoders
from tests.training.workplace import Workplace
from tests.training.workplace import of_rows as of_rows
from worker.training.export import ctranslate2_folder, export, gguf_file
from worker.training.export.export import export as make
from worker.training.export.formats import EXACT
from worker.training.export.held_out import held_out
from worker.training.journal import Journal
from worker.training.machine.locks import try_lock
from worker.training.tasks.causal import builtin
from worker.training.tasks.registry import task_of
from worker.training.trained import load_trained

SHORT: dict[str, Any] = {"training": {"epochs": 2, "learning_rate": 0.05}, "evaluation": {"samples": 0}}
CT2, GGUF, MERGED, ADAPTER = ExportFormat.CTRANSLATE2, ExportFormat.GGUF, ExportFormat.MERGED, ExportFormat.ADAPTER


def exports_of(run: RunDir) -> list[ExportReport]:
    """What is there, complete."""
    files = sorted((run.path / "exports").glob(f"*/{REPORT}"))
    return [ExportReport.model_validate_json(file.read_bytes()) for file in files]


def exported(run: RunDir, format: ExportFormat, dtype: str | None = None) -> ExportReport:
    """Made and verified; what is said of it is on disk."""
    report = make(run, Journal(run.attempt_file("export")), format, dtype)
    folder = run.path / "exports" / format
    assert report in exports_of(run)
    assert {file.name for file in report.files} | {"export.json"} == {
        str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()
    }
    assert not list((run.path / "exports").glob("tmp-*"))
    assert f"Exported to {format}: " in (folder / "README.md").read_text()
    found = report.verification
    assert found.difference <= found.limit
    print(json.dumps({"format": format, "dtype": report.dtype, **found.model_dump()}))  # shown with `pytest -s`
    return report


def causal_run(workplace: Workplace, family: str, **parts: Any) -> RunDir:
    """A trained model of a family."""
    folder = workplace.data / family
    more = {"sliding_window": None} if family == "mistral" else {}
    model = model_of(family, torch.bfloat16, vocab_size=512, **more)
    for name, tensor in model.named_parameters():  # biases and norms matter, too
        if tensor.ndim == 1:
            torch.nn.init.normal_(tensor, mean=float("norm" in name and "gemma" not in family), std=0.1)
    model.save_pretrained(folder)
    config = config_of(family, vocab_size=512, **more)
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [type(model).__name__]}))
    builtin.learn_tokenizer(["Line of a story, 12 pages long."]).save_pretrained(folder)
    workplace.rows(
        "rows.jsonl", [{"text": f"Line {number} of a story, {number} pages  long.\n"} for number in range(24)]
    )
    settings = {"training": {"epochs": 1, "batch_size": 8, "learning_rate": 1e-2}, "memory": {"micro_batch": 4}}
    run = workplace.job(
        model=f"./{family}", data={"validation": 0.25}, **settings | {"evaluation": {"samples": 0}} | parts
    )
    workplace.prepare(run)
    assert attempt(run) == 0
    return run


@pytest.mark.parametrize("tied", [False, True])
def test_t5_in_ctranslate2_with_the_scale_that_its_head_has(make_run: MakeRun, model_folder: Path, tied: bool) -> None:
    if tied:
        weights = load_file(model_folder / "model.safetensors")
        weights.pop("lm_head.weight")
        save_file(weights, model_folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((model_folder / "config.json").read_text())
        (model_folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    run = make_run(**SHORT)
    assert attempt(run) == 0
    exact = exported(run, CT2)
    assert exact.dtype == "bfloat16" and exact.verification.limit == EXACT and exact.verification.tokens >= 40
    assert exported(run, CT2, "float32").verification.difference < EXACT
    assert exported(run, CT2, "int8").verification.difference > 0.0
    with pytest.raises(Rejected, match="cannot be exported to gguf: it is not a causal model") as caught:
        exported(run, GGUF)
    assert caught.value.detail_code == "export_unsupported"


def test_a_wrong_scale_of_the_logits_is_refused_and_what_was_there_stays(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ctranslate2

    run = make_run(**SHORT)
    assert attempt(run) == 0
    exported(run, CT2)
    source = [["w3", "w4", "w5", "</s>"]]
    folder, wrong = run.path / "exports" / "ctranslate2", run.path.parent / "wrong"
    right = ctranslate2.Translator(str(folder), compute_type="float32").translate_batch(source, beam_size=1)
    monkeypatch.setattr(ctranslate2_folder, "set_scale", lambda config: None)  # as the converter does by itself
    monkeypatch.setattr(export, "refuse_differing", lambda *_: shutil.copytree(
        run.path / "exports" / "tmp-ctranslate2" / "export", wrong))  # fmt: skip
    make(run, Journal(run.attempt_file("export")), CT2, None)
    greedy = ctranslate2.Translator(str(wrong), compute_type="float32").translate_batch(source, beam_size=1)
    assert greedy[0].hypotheses == right[0].hypotheses, "a greedy test sees nothing"
    monkeypatch.undo()
    kept = exported(run, CT2)
    monkeypatch.setattr(ctranslate2_folder, "set_scale", lambda config: None)
    with pytest.raises(Rejected, match="where the trained model gives") as caught:
        make(run, Journal(run.attempt_file("export")), CT2, None)
    assert caught.value.detail_code == "export_differs"
    assert exports_of(run) == [kept]


def test_lora_of_t5_merged_and_apart(make_run: MakeRun) -> None:
    run = make_run(method=LORA, **SHORT)
    assert attempt(run) == 0
    merged = exported(run, MERGED)
    assert merged.dtype == "bfloat16" and merged.verification.limit == EXACT
    assert (merged.verification.rounding or 0.0) > 0.0
    assert exported(run, MERGED, "float32").verification.rounding is None
    apart = exported(run, ADAPTER)
    assert apart.dtype == "as trained" and apart.verification.runtime.startswith("peft ")
    in_ctranslate2 = exported(run, CT2, "float32").verification
    assert in_ctranslate2.log_probability == pytest.approx(merged.verification.log_probability)
    assert [each.format for each in exports_of(run)] == [ADAPTER, CT2, MERGED]


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_causal_models_in_every_format(workplace: Workplace, family: str) -> None:
    run = causal_run(workplace, family)
    exact = exported(run, GGUF, "f32").verification
    assert exact.limit == EXACT and exact.runtime.startswith("llama.cpp") and exact.tokenizer_texts == exact.rows
    assert exported(run, GGUF).dtype == "bf16"
    assert exported(run, GGUF, "q8_0").verification.difference > exact.difference
    assert exported(run, CT2).verification.limit == EXACT
    assert exported(run, CT2, "int8").verification.limit > EXACT
    for format, code in ((MERGED, "nothing_to_merge"), (ADAPTER, "no_adapter")):
        with pytest.raises(Rejected) as caught:
            exported(run, format)
        assert caught.value.detail_code == code


def test_lora_of_llama_reaches_llama_cpp_merged(workplace: Workplace) -> None:
    run = causal_run(workplace, "llama", method={"type": "lora", "rank": 4})
    assert exported(run, GGUF, "f32").verification.difference < EXACT
    rounded = exported(run, GGUF).verification
    assert (rounded.rounding or 0.0) > 0.0
    assert exported(run, CT2).verification.difference < EXACT


@pytest.mark.parametrize("family", ["mistral", "qwen3", "gemma", "phi3"])
def test_other_families_in_gguf(workplace: Workplace, family: str) -> None:
    found = exported(causal_run(workplace, family), GGUF, "f32").verification
    assert found.limit == (gguf_file.GELU_TABLE if family == "gemma" else EXACT)


def test_tokens_that_end_inside_a_character_are_left_out_in_gguf(workplace: Workplace) -> None:
    characters = "設定値補完行末検索置換窓開閉保存終了読込選択範囲貼付削除一覧表示色文字列関数変数引数戻"
    texts = [f"Line {number}: " + characters[number % 40 :] + characters[: number % 7] for number in range(48)]
    workplace.rows("rows.jsonl", [{"text": text} for text in texts])
    folder = workplace.data / "bytes"
    model_of("qwen2", torch.bfloat16, vocab_size=512).save_pretrained(folder)
    config = config_of("qwen2", vocab_size=512)
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen2ForCausalLM"]}))
    builtin.learn_tokenizer(["Line of a story"]).save_pretrained(folder)  # none of these characters has a token
    run = workplace.job(
        model="./bytes", data={"validation": 0.25}, training={"max_steps": 2, "batch_size": 8},
        memory={"micro_batch": 4}, evaluation={"samples": 0},
    )  # fmt: skip
    workplace.prepare(run)
    assert attempt(run) == 0
    rows, compared = held_out("causal", dataset_of(run)), exported(run, GGUF, "f32").verification
    asked = sum(len(row.target) for row in rows)
    assert asked / 3 < compared.tokens < asked and compared.difference < EXACT


def test_a_chat_model_whose_tokenizer_cuts_otherwise_than_its_file_says(workplace: Workplace) -> None:
    def turns(number: int) -> list[dict[str, str]]:
        question = {"role": "user", "content": f"What is {number} and {number}?"}
        return [question, {"role": "assistant", "content": f"It's {2 * number}."}]

    workplace.rows("rows.jsonl", [{"messages": turns(number)} for number in range(48)])
    run = workplace.job(
        model=builtin.NAME, data={"validation": 0.25}, training={"max_steps": 2, "batch_size": 8},
        memory={"micro_batch": 4}, evaluation={"samples": 0},
    )  # fmt: skip
    workplace.prepare(run)
    assert attempt(run) == 0
    found = exported(run, GGUF, "f32").verification
    assert found.limit == EXACT and found.tokenizer_texts == found.rows


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text"])
def test_gguf_of_a_later_gemma_is_refused_with_the_reason(kind: str) -> None:
    model = FinishedModel("job-1", "causal", kind, adapters=False, whole=True)
    refusal = model.refusal(GGUF)
    assert refusal is not None and refusal[0] == "export_unsupported"
    assert re.search(f"Longhaul does not write the attention windows.* of {kind}", refusal[1])
    assert "--to ctranslate2" in model.instead_of(GGUF)


def test_families_of_gguf_are_those_that_are_offered() -> None:
    assert gguf_file.FAMILIES.keys() == {*GGUF_FAMILIES}


@pytest.mark.parametrize("task", ["seq2seq", "causal", "classification"])
@pytest.mark.parametrize("family", ["t5", "qwen2", "gemma2", None])
@pytest.mark.parametrize(("adapters", "whole"), [(False, True), (True, True), (True, False)])
def test_what_a_refusal_names_instead_is_not_refused(
    task: str, family: str | None, adapters: bool, whole: bool
) -> None:
    model = FinishedModel("job-1", task, family, adapters=adapters, whole=whole)
    for format in ExportFormat:
        named = {ExportFormat(each) for each in re.findall(r"--to (\w+)", model.instead_of(format))}
        assert format not in named and all(model.refusal(each) is None for each in named)
        assert "`longhaul download job-1`" in model.instead_of(format)


def test_rope_of_llama_3(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    rope = {
        "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }  # fmt: skip
    from tests.training.tasks.causal import families

    monkeypatch.setitem(families.FAMILIES, "llama", families.FAMILIES["llama"] | {"rope_parameters": rope})
    assert exported(causal_run(workplace, "llama"), GGUF, "f32").verification.limit == EXACT


def test_another_order_of_rows_in_gguf_is_refused(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    run = causal_run(workplace, "llama")
    monkeypatch.setattr(gguf_file, "interleave", lambda values, heads: values)
    with pytest.raises(Rejected, match=r"llama.cpp .* opens the export, but gives a held-out token"):
        make(run, Journal(run.attempt_file("export")), GGUF, "f32")
    monkeypatch.undo()
    monkeypatch.setattr(gguf_file.Runtime, "_tokens", lambda self, text: [1, 2, 3])
    with pytest.raises(Rejected, match="cuts a held-out text into 3 tokens"):
        make(run, Journal(run.attempt_file("export")), GGUF, "f32")


def test_only_finished_jobs_whose_rows_are_there(make_run: MakeRun, dataset_folder: Path, tmp_path: Path) -> None:
    run = make_run(**SHORT)
    with pytest.raises(Rejected, match="has no model"):
        exported(run, CT2)
    assert attempt(run) == 0
    plan = run.plan()
    gone = plan.data.model_copy(update={"prepared": str(tmp_path / "gone")})
    run.write_plan(plan.model_copy(update={"data": gone}))
    with pytest.raises(Rejected, match="without them nothing can be compared") as caught:
        exported(run, CT2)
    assert caught.value.detail_code == "not_prepared" and f"longhaul clone {run.id}" in (caught.value.hint or "")


def test_an_export_is_made_once_at_a_time(make_run: MakeRun) -> None:
    run = make_run(**SHORT)
    assert attempt(run) == 0
    (run.path / "exports").mkdir()
    held = try_lock(run.path / "exports" / ".ctranslate2.lock")
    assert held is not None
    with held, pytest.raises(DeviceBusy, match="is being made already"):
        exported(run, CT2)


def test_a_link_in_place_of_the_folder_is_not_followed(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(**SHORT)
    assert attempt(run) == 0
    (tmp_path / "elsewhere").mkdir()
    (run.path / "exports").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Rejected, match="exports of job job is a link") as caught:
        exported(run, CT2)
    assert caught.value.detail_code == "export_damaged" and not list((tmp_path / "elsewhere").iterdir())


def flip(file: Path) -> None:
    """Change one bit of the last number: the file has its size, its header, and a model that loads."""
    content = bytearray(file.read_bytes())
    content[-2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("method", [None, {**LORA, "merge": True}])
def test_a_model_that_is_not_what_training_delivered_is_neither_exported_nor_tried(
    make_run: MakeRun, method: dict[str, Any] | None
) -> None:
    run = make_run(**SHORT, **({} if method is None else {"method": method}))
    assert attempt(run) == 0
    task = task_of(run.spec(), run.plan().task, run.plan().data)

    def refused(what: str) -> None:
        for use in (lambda: exported(run, CT2), lambda: load_trained(run, task, None, torch.device("cpu"))):
            with pytest.raises(Rejected, match=f"no longer what training delivered: {what}") as caught:
                use()
            assert caught.value.detail_code == "model_damaged" and f"longhaul clone {run.id}" in str(caught.value.hint)
        assert exports_of(run) == []

    weights = run.model / ("model.safetensors" if method is None else "adapter/adapter_model.safetensors")
    flip(weights)
    refused(f"the content of {weights.relative_to(run.model)} has changed")
    flip(weights)
    (run.model / "chat_template.jinja").write_text("{{ messages }}")
    refused("chat_template.jinja has been added")
    (run.model / "chat_template.jinja").unlink()
    (run.model / "tokenizer.json").rename(run.path / "aside")
    refused("tokenizer.json is gone")
    (run.path / "aside").rename(run.model / "tokenizer.json")
    manifest = (run.model / "manifest.json").read_bytes()
    (run.model / "manifest.json").write_text("{")
    refused("manifest.json cannot be read")
    (run.model / "manifest.json").write_bytes(manifest)
    exported(run, CT2)


def test_by_hand_killed_in_the_middle_and_again(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(**SHORT)
    assert attempt(run) == 0
    with monkeypatch.context() as patched:
        patched.setattr(export, "refuse_differing", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        code, _, said = stage("export", run.path, "ctranslate2").wait()
    assert code == -signal.SIGKILL, said
    assert (run.path / "exports" / "tmp-ctranslate2" / "export" / "model.bin").exists()
    assert exports_of(run) == [] and not (run.path / "exports" / "ctranslate2").exists()
    command = [sys.executable, "-m", "worker.training", "export", str(run.path), "ctranslate2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [report] = exports_of(run)
    assert report.format is CT2 and not (run.path / "exports" / "tmp-ctranslate2").exists()
    last = run.attempt_lines("export-ctranslate2")[-1]
    assert isinstance(last, Finished) and last.reason == "done"
    code, _, _ = stage("export", run.path, "adapter").wait()
    last = run.attempt_lines("export-adapter")[-1]
    assert code == 77 and isinstance(last, Finished)
    assert last.error is not None and last.error.code == "no_adapter"


@pytest.mark.parametrize("family", ["mt5", "bart"])
def test_other_encoder_decoders_in_ctranslate2(workplace: Workplace, family: str) -> None:
    folder, end = workplace.data / family, 1 if family == "mt5" else 2
    specials = ["<pad>", "</s>", "<unk>"] if family == "mt5" else ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    words = [f"w{number}" for number in range(encoder_decoders.VOCABULARY - len(specials))]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate([*specials, *words])}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", end)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        bos_token="<s>" if "<s>" in specials else None,
    )
    model = encoder_decoders.model_of(family, torch.bfloat16)
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    config = encoder_decoders.config_of(family) | {"architectures": [type(model).__name__]}
    (folder / "config.json").write_text(json.dumps(config))
    rows = [{"input": f"w{n} w{n + 1} w{n + 2}", "target": f"w{n + 2} w{n}"} for n in range(48)]
    workplace.rows("rows.jsonl", rows)
    run = workplace.job(
        model=f"./{family}", data={"validation": 0.25, "max_input_tokens": 32, "max_target_tokens": 32},
        training={"max_steps": 2, "batch_size": 8},
        memory={"micro_batch": 4}, evaluation={"samples": 0},
    )  # fmt: skip
    workplace.prepare(run)
    assert attempt(run) == 0
    assert exported(run, CT2).verification.limit == EXACT


def test_a_mixture_is_merged_with_its_experts_one_by_one(workplace: Workplace) -> None:
    run = causal_run(workplace, "mixtral", method={"type": "lora", "rank": 4})
    exported(run, MERGED)
    source, made = (
        load_file(folder / "model.safetensors") for folder in (workplace.data / "mixtral", run.path / "exports/merged")
    )
    assert source.keys() == made.keys()
    experts = [name for name in source if ".experts." in name]
    assert experts and all(torch.equal(source[name], made[name]) for name in experts)
    with pytest.raises(Rejected, match="cannot be exported to gguf: mixtral is none of") as caught:
        exported(run, GGUF)
    assert caught.value.detail_code == "export_unsupported"
    with pytest.raises(Rejected, match="cannot be exported to ctranslate2") as caught:
        exported(run, CT2)
    assert caught.value.detail_code == "export_unsupported"
