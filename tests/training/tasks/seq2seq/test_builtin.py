"""The built-in model."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, T5Tokenizer

from jobs.trainer_facts import EvaluationFinished
from tests.training.attempts import attempt, facts
from tests.training.workplace import EXAMPLES, Workplace
from tests.training.workplace import of_rows as of_rows
from worker.training.rows.characters import Rewriter
from worker.training.rows.text import RowReader, template
from worker.training.tasks.columns import RECIPE_INPUT, RECIPE_TARGET
from worker.training.tasks.seq2seq import builtin


@pytest.fixture(scope="module")
def texts() -> list[str]:
    rows = RowReader(template(RECIPE_INPUT, "data.input"), template(RECIPE_TARGET, "data.target"), Rewriter())
    recipes = map(json.loads, EXAMPLES.read_text().splitlines()[:150])
    return [text for row in map(rows.read, recipes) for text in (row.input, row.target)]


@pytest.fixture(scope="module")
def folder(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("t5-tiny")
    builtin.build(path, texts, seed=42)
    return path


def test_the_same_data_and_seed_make_the_same_bytes(texts: list[str], folder: Path, tmp_path: Path) -> None:
    again, other = tmp_path / "again", tmp_path / "other"
    before = torch.get_rng_state()
    for path, seed in ((again, 42), (other, 43)):
        path.mkdir()
        builtin.build(path, texts, seed)
    assert torch.equal(torch.get_rng_state(), before)
    for file in folder.iterdir():
        assert (again / file.name).read_bytes() == file.read_bytes(), file.name
    assert (other / "model.safetensors").read_bytes() != (folder / "model.safetensors").read_bytes()


def test_the_tokenizer_opens_and_gives_texts_back(texts: list[str], folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    assert tokenizer.is_fast
    assert 500 < len(tokenizer) <= builtin.VOCABULARY
    for text in texts[:20]:
        ids = tokenizer(text).input_ids
        assert ids[-1] == 1
        assert 2 not in ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == " ".join(text.split())


def test_a_model_learns_line_breaks_and_is_delivered_with_a_token_for_them(workplace: Workplace) -> None:
    folder, said = workplace.data / "t5", "knead it\nbake it"
    folder.mkdir()
    builtin.build(folder, ["knead it, bake it", "bread"], seed=0)
    vocabulary = json.loads((folder / "tokenizer.json").read_bytes())["model"]["vocab"]
    T5Tokenizer(vocab=list(map(tuple, vocabulary)), extra_ids=0).save_pretrained(folder)  # as that of FLAN-T5
    workplace.rows("rows.jsonl", [{"input": f"{number} bread", "target": said} for number in range(40)])
    run = workplace.job(
        model="./t5",
        data={"validation": 0.2, "keep_line_breaks": True},
        training={"epochs": 6, "batch_size": 8, "learning_rate": 0.01, "dropout": 0.0},
        evaluation={"every_steps": 100},
    )
    workplace.prepare(run)
    assert attempt(run) == 0
    last = facts(run, EvaluationFinished)[-1]
    assert (last.samples[0].target, last.samples[0].generated, last.metrics["exact_match"]) == (said, said, 1.0)
    tokenizer, model = AutoTokenizer.from_pretrained(run.model), AutoModelForSeq2SeqLM.from_pretrained(run.model)
    assert tokenizer.decode(tokenizer(f"{said}\n").input_ids, skip_special_tokens=True) == f"{said}\n"
    written = model.generate(**tokenizer("1 bread", return_tensors="pt"))[0]
    assert tokenizer.decode(written, skip_special_tokens=True) == said


def test_a_tokenizer_is_learnt_from_very_little_text() -> None:
    tokenizer = builtin.learn_tokenizer(["ab"])
    assert tokenizer("ab b").input_ids[-1] == 1
    assert len(tokenizer) < 10


def test_the_model_opens_whole_with_a_head_of_its_own(texts: list[str], folder: Path) -> None:
    model, info = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.bfloat16, output_loading_info=True)
    assert not any(info.values())
    assert model.lm_head.weight is not model.shared.weight
    assert not model.config.scale_decoder_outputs
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False
    assert model.config.decoder_start_token_id == 0
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_the_first_loss_is_that_of_guessing(texts: list[str], folder: Path) -> None:
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(texts[0:16:2], return_tensors="pt", padding=True)
    labels = tokenizer(texts[1:16:2], return_tensors="pt", padding=True)
    ids = labels.input_ids.masked_fill(labels.attention_mask == 0, -100)
    with torch.no_grad():
        loss = float(model(**inputs, labels=ids).loss)
    assert loss == pytest.approx(math.log(builtin.VOCABULARY), abs=0.2)
