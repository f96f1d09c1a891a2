"""Pairs of texts: tokens and token types of transformers, its loss and gradients, and its answers from the result."""

from __future__ import annotations

import json
import random
from functools import partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    pipeline,
)

from jobs.disk.rundir import RunDir
from jobs.errors import BadData, Rejected
from jobs.evaluation_metrics import LabelPlan
from tests.support.samples import dataset_summary
from tests.training.attempts import attempt, same_tensors
from tests.training.generation.test_generation import ask, outputs
from tests.training.snippets import blocks, run_snippet
from tests.training.tasks.classification.families import LABELS, config_of, model_of
from tests.training.workplace import Workplace, dataset_of
from worker.training.dataset.data import PreparedDataset, Rows, Writer
from worker.training.loop import accumulate
from worker.training.rows.text import Texts
from worker.training.tasks.classification import builtin, fused, layout
from worker.training.tasks.classification.batches import ClassBatch
from worker.training.tasks.classification.labels import ClassTokenizer
from worker.training.tasks.classification.pairs import longest_first, token_types
from worker.training.tasks.classification.task import Classification
from worker.training.tasks.registry import task_of

SENTENCE = "a man plays the guitar on old stage while two dogs sleep and nobody listens to him"
WORDS = SENTENCE.split(" ")
SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]
LIMIT = 24
SHORT: dict[str, Any] = {
    "training": {"epochs": 2, "batch_size": 8, "learning_rate": 1e-3},
    "evaluation": {"every_steps": 3, "samples": 2},
    "checkpoint": {"every_minutes": None, "every_steps": 3},
}


def text(draw: random.Random, most: int = 20) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(1, most)))


def bert_tokenizer() -> PreTrainedTokenizerFast:
    """Words, between `[CLS]` and `[SEP]`, with token types."""
    known = {word: number for number, word in enumerate([*SPECIAL, *dict.fromkeys(WORDS)])}
    made = Tokenizer(models.WordLevel(known, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", unk_token="[UNK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )  # fmt: skip


def roberta_tokenizer() -> PreTrainedTokenizerFast:
    return builtin.learn_tokenizer([" ".join(WORDS)] * 4)


TOKENIZERS = {"bert": bert_tokenizer, "roberta": roberta_tokenizer}


def small_model(family: str, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A BERT with two token types; or the built-in RoBERTa."""
    if family == "bert":
        return model_of("bert", vocab_size=len(tokenizer), pad_token_id=0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return layout.build(layout.adapted(builtin.CONFIG, LABELS, "single_label_classification"), torch.float64)


def gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def write_bert(path: Path) -> None:
    """As pretraining leaves one, with its tokenizer."""
    tokenizer = bert_tokenizer()
    tokenizer.save_pretrained(path)
    options: dict[str, Any] = {"vocab_size": len(tokenizer), "pad_token_id": 0}
    (path / "config.json").write_text(json.dumps(config_of("bert", None, **options)))
    body = model_of("bert", torch.float32, **options).base_model.state_dict()
    tensors = {f"bert.{name}": each.clone() for name, each in body.items() if not name.startswith("pooler")}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(params=TOKENIZERS)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(family: str, tmp_path: Path) -> Path:
    TOKENIZERS[family]().save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def encoded(folder: Path, pairs: list[tuple[str, str]], limit: int) -> tuple[ClassTokenizer, Any]:
    """What rows of these pairs become, side `input`."""
    task = Classification(pairs=True)
    limits = {"input": limit, "target": 1}
    rows = [Texts(first, "x", second=second) for first, second in pairs]
    state = task.tried(task.tokenizer(folder), rows, limits)
    return state, task.encoder(state, limits)().encode_read([row.read for row in rows])


def test_tokens_are_those_of_transformers_at_every_limit(family: str, folder: Path) -> None:
    draw = random.Random(7)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    pairs = [(text(draw, 40), text(draw, draw.choice([2, 40]))) for _ in range(120)]
    for limit in (8, 9, 13, 24, 41, 512):
        state, found = encoded(folder, pairs, limit)
        wanted = tokenizer(*map(list, zip(*pairs, strict=True)), truncation="longest_first", max_length=limit)
        rows = np.split(found.tokens, np.cumsum(found.lengths)[:-1])
        assert [row.tolist() for row in rows] == wanted["input_ids"]
        assert found.full_lengths.tolist() == [len(tokenizer(*pair)["input_ids"]) for pair in pairs]
        if family == "bert":
            assert state.types_begin == tokenizer.sep_token_id
            types = [token_types(row, tokenizer.sep_token_id).tolist() for row in rows]
            assert types == wanted["token_type_ids"]
        else:
            assert state.types_begin is None and "token_type_ids" not in wanted


def test_both_texts_are_cut_as_the_tokenizers_of_hugging_face_cut_them() -> None:
    """Every pair of lengths and every limit, by the library itself."""
    made = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    for room in range(2, 12):
        made.enable_truncation(room, strategy="longest_first")
        full = np.array([(one, other) for one in range(1, 15) for other in range(1, 15)])
        for lengths, kept in zip(full.tolist(), longest_first(full, room).tolist(), strict=True):
            pair = made.encode(*("a " * length for length in lengths))
            assert kept == [pair.sequence_ids.count(number) for number in (0, 1)], (lengths, room)


def prepared(path: Path, folder: Path, pairs: list[tuple[str, str]]) -> Rows:
    path.mkdir()
    state, found = encoded(folder, pairs, LIMIT)
    with Writer(path, state.size) as writer:
        writer.add(np.split(found.tokens, np.cumsum(found.lengths)[:-1]), [[n % 3] for n in range(len(pairs))])
        writer.finish({"train": np.arange(len(pairs)), "validation": np.arange(0)}, dataset_summary())
    return PreparedDataset.open(path).train


def test_loss_and_gradients_are_those_of_transformers_however_a_step_is_cut(
    family: str, folder: Path, tmp_path: Path
) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    draw = random.Random(3)
    pairs = [(text(draw), text(draw)) for _ in range(9)]
    rows = prepared(tmp_path / "rows", folder, pairs)
    model = small_model(family, tokenizer).train()
    fused.configure(model, fused=False, dropout=0.0)
    model.train()
    given = tokenizer(
        *map(list, zip(*pairs, strict=True)), truncation=True, max_length=LIMIT, padding=True, return_tensors="pt"
    )
    wanted = model(**given, labels=torch.arange(9) % 3).loss
    wanted.backward()
    expected = gradients(model)
    fused.configure(model, fused=True, dropout=0.0)
    model.train()
    labels = tuple(LabelPlan(name=label, rows=3) for label in LABELS)
    task = Classification(labels=labels).of_pairs(Classification().tokenizer(folder), model.config.to_dict())
    assert task.separator == (tokenizer.sep_token_id if family == "bert" else None)
    for micro_batch in (1, 4, 9):
        model.zero_grad()
        batches = task.limit(rows, micro_batch).batches(rows, [np.arange(9)], tokenizer.pad_token_id)
        loss = accumulate(model, batches)
        assert float(loss) == pytest.approx(float(wanted.detach()), rel=1e-12)
        largest = max(float(each.norm()) for each in expected.values())
        found = gradients(model)
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            assert float((found[name] - gradient).norm()) <= 1e-12 * largest, (name, micro_batch)
    if family == "bert":
        assert float(expected["bert.embeddings.token_type_embeddings.weight"][1].norm()) > 1e-3 * largest


# -- jobs --------------------------------------------------------------------------------------------------------------


def rows(count: int = 40) -> list[dict[str, Any]]:
    draw = random.Random(5)
    return [
        {"premise": text(draw), "hypothesis": text(draw), "label": LABELS[number % 3], "number": number}
        for number in range(count)
    ]


@pytest.fixture
def place(tmp_path: Path) -> Workplace:
    found = Workplace(tmp_path, planned=False)
    found.rows("rows.jsonl", rows())
    write_bert(found.data / "bert")
    return found


def job(place: Workplace, model: str, **data: Any) -> RunDir:
    limits = {"max_input_tokens": LIMIT, "validation": 0.25} | data
    return place.job(model=model, task="classification", data=limits, **SHORT)


@pytest.mark.parametrize("model", ["./bert", "builtin:roberta-tiny"])
def test_the_result_answers_pairs_as_the_job_does(model: str, place: Workplace) -> None:
    whole, broken = job(place, model), job(place, model)
    place.prepare(whole)
    data = whole.plan().data
    assert (data.input, data.separator) == ("{premise} {} {hypothesis}", 2 if model == "./bert" else None)
    tokenizer: Any = AutoTokenizer.from_pretrained(whole.plan().model.folder)
    train, kept = dataset_of(whole).train, {}
    for row in rows():
        ids = tokenizer(row["premise"], row["hypothesis"], truncation=True, max_length=LIMIT)["input_ids"]
        kept[tuple(ids)] = row
    assert all(tuple(train.input(number).tolist()) in kept for number in range(len(train)))

    [shown, *_] = whole.preview().sources[0].rows
    assert shown.second is not None and (shown.input.text, shown.second.text) == (
        rows()[0]["premise"], rows()[0]["hypothesis"],
    )  # fmt: skip
    assert (shown.input.tokens or 0) + (shown.second.tokens or 0) == len(next(iter(kept)))

    broken.write_plan(whole.plan())
    assert attempt(whole) == 0
    assert attempt(broken, stop_at=6) == 75
    place.prepare_only(broken)
    assert attempt(broken, 2) == 0
    assert same_tensors(whole.model / "model.safetensors", broken.model / "model.safetensors")

    classify = pipeline("text-classification", str(whole.model), top_k=None, truncation=True, max_length=LIMIT)
    asked = [{name: row[name] for name in ("premise", "hypothesis")} for row in rows(6)]
    answers = outputs(ask(whole, rows=asked))
    for row, answer in zip(asked, answers, strict=True):
        found = classify({"text": row["premise"], "text_pair": row["hypothesis"]})
        assert answer.labels is not None
        assert {each.label: each.probability for each in answer.labels} == pytest.approx(
            {each["label"]: each["score"] for each in found}, abs=1e-6
        )
    turns = [{"role": "user", "content": asked[0][name]} for name in ("premise", "hypothesis")]
    assert outputs(ask(whole, messages=turns))[0].labels == answers[0].labels
    replied = [{"role": "system", "content": "s"}, turns[0], turns[1] | {"role": "assistant"}]
    assert outputs(ask(whole, messages=replied))[0].labels == answers[0].labels
    for one in ({"input": "a man"}, {"messages": turns[:1]}):
        assert "one text, and the model reads a pair" in ask(whole, **one).parts[-1][1]["message"]
    page = (whole.model / "README.md").read_text()
    assert run_snippet(whole.model) == blocks(page, "text")[0] + "\n"


@pytest.mark.parametrize("model", ["./bert", "builtin:roberta-tiny"])
def test_pairs_have_scores_too(model: str, place: Workplace) -> None:
    scored = [{key: value for key, value in row.items() if key != "label"} for row in rows()]
    place.rows("scored.jsonl", [row | {"score": number / 8} for number, row in enumerate(scored)])
    data = {"max_input_tokens": LIMIT, "validation": 0.25}
    run = place.job("scored.jsonl", model=model, task="regression", data=data, **SHORT)
    place.prepare(run)
    plan = run.plan().data
    assert (plan.input, plan.separator) == ("{premise} {} {hypothesis}", 2 if model == "./bert" else None)
    assert attempt(run) == 0
    score = pipeline("text-classification", str(run.model), function_to_apply="none", truncation=True, max_length=LIMIT)
    asked = [{name: row[name] for name in ("premise", "hypothesis")} for row in scored[:6]]
    for row, answer in zip(asked, outputs(ask(run, rows=asked)), strict=True):
        [found] = score([{"text": row["premise"], "text_pair": row["hypothesis"]}])
        assert answer.score == pytest.approx(found["score"], abs=1e-6)
    page = (run.model / "README.md").read_text()
    assert run_snippet(run.model) == blocks(page, "text")[0] + "\n"


def test_padding_has_the_token_type_that_transformers_gives_it(place: Workplace) -> None:
    run = job(place, "./bert")
    place.prepare(run)
    train = dataset_of(run).train
    task = task_of(run.spec(), run.plan().task, run.plan().data)
    [batch] = task.limit(train, 30).batches(train, [np.arange(4)], 0)
    assert isinstance(batch, ClassBatch) and batch.token_types is not None and batch.attention_mask is not None
    assert bool((batch.token_types.sum(1) > 1).all())
    assert not (batch.token_types * (1 - batch.attention_mask)).any()


@pytest.mark.parametrize(
    ("first", "second", "label"),
    [
        ("premise", "hypothesis", "label"),
        ("Sentence1", "Sentence2", "labels"),
        ("question1", "question2", "label"),
        ("query", "passage", "label"),
        ("text", "text_pair", "label"),
    ],
)
def test_pairs_are_recognized_by_their_columns(first: str, second: str, label: str, place: Workplace) -> None:
    place.rows(
        "rows.jsonl", [{first: each["premise"], second: each["hypothesis"], label: each["label"]} for each in rows(9)]
    )
    run = job(place, "builtin:roberta-tiny")
    found = place.check(run)["plan"]
    assert found["input"] == f"{{{first}}} {{}} {{{second}}}"
    assert found["read_as"] == f"{first.lower()}, {second.lower()} and {label}"


def test_two_columns_are_a_pair_and_a_template_is_one_text(place: Workplace) -> None:
    for input, read in (
        (["hypothesis", "about: {premise}"], "{hypothesis} {} about: {premise}"),
        ("{hypothesis} {} about: {premise}", "{hypothesis} {} about: {premise}"),
        ("{premise} or {hypothesis}", "{premise} or {hypothesis}"),
        ("{premise} {{}} {hypothesis}", "{premise} {{}} {hypothesis}"),
    ):
        run = job(place, "./bert", input=input, target="label")
        place.check(run)
        [row, *_] = run.preview().sources[0].rows
        is_pair = "about" in read
        assert run.plan().data.input == read and (row.second is not None) == is_pair
        assert (run.plan().data.separator is not None) == is_pair
    with pytest.raises(BadData, match="has a column 'hypotheses'"):
        place.check(job(place, "./bert", input=["premise", "hypotheses"], target="label"))
    other = place.job(model="builtin:t5-tiny", data={"input": ["premise", "hypothesis"], "target": "label"})
    with pytest.raises(Rejected, match="only classifiers and regressions read pairs") as caught:
        place.check(other)
    assert '"{premise} {hypothesis}"' in str(caught.value.hint)


def test_pairs_beside_single_texts(place: Workplace) -> None:
    """Sources of both kinds, and validation rows of their own."""
    place.rows("single.jsonl", [{"text": each["premise"], "label": each["label"]} for each in rows(12)])
    place.rows("held_out.jsonl", [each | {"premise": f"{each['premise']} dogs"} for each in rows(9)])
    run = place.job(
        ["single.jsonl", "rows.jsonl"], model="./bert", task="classification",
        data={"max_input_tokens": LIMIT, "validation": "held_out.jsonl"}, **SHORT,
    )  # fmt: skip
    place.prepare(run)
    train = dataset_of(run).train
    separators = [(train.input(number) == 2).sum() for number in range(len(train))]
    assert separators == [1] * 12 + [2] * 40
    assert attempt(run) == 0
    [alone, pair] = outputs(ask(run, rows=[{"text": "a man"}, {"premise": "a man", "hypothesis": "a dog"}]))
    assert (alone.input, pair.input) == ("a man", "a man\na dog")


def test_a_row_without_its_second_text_is_rejected_and_equal_pairs_are_found(place: Workplace) -> None:
    one, other, *_ = rows()
    swapped = {"premise": one["hypothesis"], "hypothesis": one["premise"]}
    place.rows("rows.jsonl", [*rows(), one, one | swapped, one | {"hypothesis": " "}, other | {"label": LABELS[0]}])
    run = job(place, "./bert", max_invalid_fraction=0.1)
    found = place.prepare(run)["data"]
    assert (found["kept"], found["duplicates"], found["rejected"]) == (42, 1, {"empty hypothesis": 1})
    assert found["labels"]["contradictory_texts"] == 1
    tokenizer: Any = AutoTokenizer.from_pretrained(run.plan().model.folder)
    full = [
        len(tokenizer(each["premise"], each["hypothesis"])["input_ids"]) for each in [*rows(), one | swapped, other]
    ]
    assert found["lengths"]["input"]["before"]["max"] == max(full) > found["lengths"]["input"]["after"]["max"] == LIMIT
    assert found["truncated_inputs"] == sum(each > LIMIT for each in full)
    assert found["input_tokens"] == sum(min(each, LIMIT) for each in full)


def test_jobs_of_an_earlier_version_keep_one_text_with_words_in_front(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, now = job(place, "./bert"), job(place, "./bert")
    with monkeypatch.context() as earlier:  # what it knew, and wrote into its plan
        earlier.setattr(Classification, "joined", True)
        earlier.setattr(Classification, "__init__", partialmethod(Classification.__init__, joined=True))
        place.check(before)
    place.prepare_only(before)
    plan = before.plan()
    assert (plan.data.pairs_read, plan.data.input) == (False, "premise: {premise} hypothesis: {hypothesis}")
    assert attempt(before, stop_at=6) == 75
    place.prepare_only(before)
    assert before.plan() == plan, "the same rows by the same name"
    assert attempt(before, 2) == 0
    place.prepare(now)
    assert now.plan().data.pairs_read and now.plan().data.prepared != plan.data.prepared
    after = place.job(
        model="./bert", task="classification", data={"max_input_tokens": LIMIT, "validation": 0.25},
        **SHORT | {"training": SHORT["training"] | {"epochs": 3}}, resume_from=before.id,
    )  # fmt: skip
    place.prepare(after)
    data = after.plan().data
    assert (data.pairs_read, data.input, data.prepared) == (False, plan.data.input, plan.data.prepared)
    assert attempt(after) == 0


def test_token_types_that_do_not_begin_behind_a_separator_are_refused(place: Workplace) -> None:
    tokenizer = bert_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS]:1 $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer.save_pretrained(place.data / "bert")
    with pytest.raises(Rejected, match="token types that do not change") as caught:
        place.check(job(place, "./bert"))
    assert caught.value.detail_code == "tokenizer_unusable"
