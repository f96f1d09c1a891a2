"""README.md of a model: its facts are those of the job, and its snippet writes what the job wrote."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer, GenerationConfig

from jobs.disk.rundir import RunDir
from jobs.plan import SourcePlan
from jobs.trainer_facts import EvaluationFinished
from jobs.version import VERSION
from tests.support.samples import dataset_summary
from tests.training.attempts import attempt, facts
from tests.training.conftest import VOCABULARY, MakeRun
from tests.training.snippets import blocks, run_snippet
from worker.training.dataset.data import Writer
from worker.training.readme import _cell, _code, _fenced, evaluations_of, model_card


def trained(make_run: MakeRun, **parts: Any) -> tuple[RunDir, str]:
    """A job that has ended, and its page."""
    run = make_run(**parts)
    assert attempt(run) == 0
    return run, (run.model / "README.md").read_text()


def test_the_snippet_writes_what_the_job_wrote(make_run: MakeRun) -> None:
    run, page = trained(make_run, training={"epochs": 3}, evaluation={"every_steps": 5, "samples": 4})
    [snippet] = blocks(page, "python")
    done = subprocess.run([sys.executable, "-c", snippet], cwd=run.model, capture_output=True, text=True, check=True)
    told = blocks(page, "text")[0]
    assert done.stdout == told + "\n"
    step = int(re.findall(r"after step ([\d,]+)", page)[0].replace(",", ""))
    samples = evaluations_of(run)[step].samples
    assert told in [sample.generated for sample in samples] and json.dumps(samples[0].input) in page
    shown = [text for each in samples[:3] for text in (each.input, each.target, each.generated)]
    assert blocks(page.partition("## Samples")[2], "text") == shown


def test_secrets_in_rows_are_not_in_the_page(make_run: MakeRun, model_folder: Path) -> None:
    file, secret = model_folder / "tokenizer.json", "hf_PlantedPlantedPlanted"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {f"{secret}{n}" if n > 2 else word: n for word, n in vocabulary.items()}
    file.write_text(json.dumps(tokenizer))
    run, page = trained(make_run, training={"epochs": 1}, evaluation={"every_steps": 5, "samples": 4})
    [evaluated, *_] = evaluations_of(run).values()
    assert secret in evaluated.samples[0].input
    assert "Planted" not in page and "hf_***" in page.partition("## Samples")[2]
    [snippet] = blocks(page, "python")
    assert "your input, written as in the table" in snippet and "The job's answer" not in page
    published = model_card(page.replace("hf_***", secret), "mit", None)  # a page of before
    assert "Planted" not in published and "hf_***" in published


def test_every_source_is_told_and_without_held_out_rows_the_snippet_has_a_training_row(
    make_run: MakeRun, tmp_path: Path
) -> None:
    (tmp_path / "prepared").mkdir()
    with Writer(tmp_path / "prepared", VOCABULARY) as writer:
        writer.add([[5, 6, 7, 1], [8, 9, 1]], [[7, 6, 1], [9, 1]])
        writer.finish({"train": np.arange(2), "validation": np.arange(0)}, dataset_summary(), (1, 2))
    train = ["chats.jsonl", "rows.csv"]
    run = make_run(data={"train": train, "validation": 0.0}, training={"epochs": 1, "batch_size": 2})
    sources = (
        SourcePlan(name="chats.jsonl", place="/d/chats.jsonl", input="{a}", target="{b|c}", read_as="OpenAI chat"),
        SourcePlan(name="rows.csv", place="/d/rows.csv", input=None, target="{text}"),
    )
    plan = run.plan()
    change = {"prepared": str(tmp_path / "prepared"), "rows": 2, "validation_rows": 0, "sources": sources}
    run.write_plan(plan.model_copy(update={"data": plan.data.model_copy(update=change), "steps": 1}))
    assert attempt(run) == 0
    page = (run.model / "README.md").read_text()
    assert [line for line in page.splitlines() if line.startswith("| rows of ")] == [
        "| rows of chats.jsonl | `{a}` → `{b\\|c}`, read as OpenAI chat |",
        "| rows of rows.csv | `{text}` |",
    ]
    [text] = re.findall(r"^text = (.*)$", blocks(page, "python")[0], re.MULTILINE)
    tokenizer = AutoTokenizer.from_pretrained(run.model)
    assert tokenizer(json.loads(text))["input_ids"] == [5, 6, 7, 1] and "The job's answer" not in page


def test_its_facts_are_those_of_the_job(make_run: MakeRun) -> None:
    run, page = trained(make_run, evaluation={"every_steps": 2, "samples": 0})
    assert page.startswith("---\nlibrary_name: transformers\n") and "base_model" not in page
    assert f"\n# {run.spec().name}\n" in page and f"Model of job {run.id}" in page and VERSION in page
    evaluated = {each.step: each.loss for each in facts(run, EvaluationFinished)}
    curve = re.findall(r"^\| ([\d,]+) \| [\d.–]+ \| ([\d.]+) \|$", page, re.MULTILINE)
    assert 2 <= len(curve) <= 12
    assert {int(step): float(loss) for step, loss in curve}.items() <= {
        step: float(f"{loss:.4f}") for step, loss in evaluated.items()
    }.items()
    assert int(curve[0][0]) == 0 and int(curve[-1][0]) == max(evaluated)
    assert f"{min(evaluated.values()):.4f}" in page
    assert len(blocks(page, "text")) == 0 and "your input, written as in the table" in page


def test_a_bare_generate_has_room_for_the_targets(make_run: MakeRun, model_folder: Path) -> None:
    base = json.loads((model_folder / "generation_config.json").read_text())
    (model_folder / "generation_config.json").write_text(json.dumps(base | {"max_length": 20}))
    run, page = trained(make_run)
    written = GenerationConfig.from_pretrained(run.model)
    report = json.loads((Path(run.plan().data.prepared or "") / "manifest.json").read_text())["report"]
    longest = report["lengths"]["target"]["after"]["p99"]
    assert written.max_new_tokens == longest
    assert f"sets `max_new_tokens` to {longest}, which 99 % of the targets do not exceed" in page
    assert json.loads((run.model / "generation_config.json").read_text()).keys() == {*base, "max_new_tokens"}


@pytest.mark.parametrize(
    "search",
    [
        {"num_beams": 4, "num_return_sequences": 3, "num_beam_groups": 2, "diversity_penalty": 0.5,
         "return_dict_in_generate": True, "output_scores": True},
        {"do_sample": True, "temperature": 0.7, "top_k": 5, "repetition_penalty": 1.5, "penalty_alpha": 0.6,
         "prompt_lookup_num_tokens": 3},
    ],
)  # fmt: skip
def test_how_the_base_model_samples_or_searches_is_left_out(
    make_run: MakeRun, model_folder: Path, search: dict[str, Any]
) -> None:
    file = model_folder / "generation_config.json"
    base = json.loads(file.read_text()) | {"min_length": 2}
    file.write_text(json.dumps(base | search))
    # So many that it is sure of its words: those of which it is not depend on how a CPU rounds bf16.
    run, page = trained(make_run, training={"epochs": 8}, evaluation={"every_steps": 5, "generate_rows": 4})
    assert json.loads((run.model / "generation_config.json").read_text()).keys() == {*base, "max_new_tokens"}
    assert run_snippet(run.model) == blocks(page, "text")[0] + "\n"


@pytest.mark.parametrize("content", [None, b"{", b"\xff"])
def test_a_model_without_a_generation_config_gets_one_that_generates(
    make_run: MakeRun, model_folder: Path, content: bytes | None
) -> None:
    file = model_folder / "generation_config.json"
    file.unlink() if content is None else file.write_bytes(content)
    run, _ = trained(make_run)
    written = GenerationConfig.from_pretrained(run.model)
    assert (written.decoder_start_token_id, written.eos_token_id, written.pad_token_id) == (0, 1, 0)
    assert (written.max_new_tokens or 0) > 0


def test_a_fence_is_longer_than_those_in_the_text() -> None:
    assert _fenced("a ```` b") == ["`````text", "a ```` b", "`````"]


def test_names_and_templates_are_text_in_a_table() -> None:
    assert _cell("x<img src=x onerror=alert(1)>|y`.jsonl\n") == "x&lt;img src=x onerror=alert(1)>\\|y\\`.jsonl"
    assert _code("{b|c} <b>") == "`{b\\|c} <b>`"
    assert _code("a `` <b>") == "``` a `` <b> ```"
