"""A finished model answers as transformers does, in pieces or whole, and with the job's own template."""

from __future__ import annotations

import os
import posix
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    pipeline,
)

from jobs.attempt import Finished, TrainResult
from jobs.disk.rundir import RunDir
from jobs.generation import GenerateBody, Output, Sampling
from jobs.trainer_facts import EvaluationFinished
from tests.training.attempts import facts
from tests.training.forked import fork
from tests.training.generation.conftest import CHATS, CLASSES, FOXES, SCORES, TrainedJobs
from tests.training.workplace import pairs
from worker.training.generation.serving import Models, answer, learned_new_tokens, yield_to_others

CPU = torch.device("cpu")


class Heard:
    """What would go to the worker."""

    def __init__(self, cancel_after: int | None = None) -> None:
        self.parts: list[tuple[str, dict[str, Any]]] = []
        self._cancel_after = cancel_after

    def send(self, type: str, **data: Any) -> None:
        """Kept."""
        self.parts.append((type, data))

    def fail(self, error: Any) -> None:
        """Kept."""
        self.send("error", code=error.detail_code, message=str(error))

    def cancelled(self) -> bool:
        """After so many pieces of text."""
        return self._cancel_after is not None and len(self.of("text")) >= self._cancel_after

    def of(self, type: str) -> list[dict[str, Any]]:
        """Parts of a type."""
        return [data for each, data in self.parts if each == type]


def ask(run: RunDir, checkpoint: str | None = None, **body: Any) -> Heard:
    heard = Heard()
    answer(Models(run, checkpoint, CPU, heard), GenerateBody.model_validate(body), heard)  # type: ignore[arg-type]
    return heard


def outputs(heard: Heard) -> list[Output]:
    assert heard.parts[-1][0] == "done", heard.parts
    return [Output.model_validate(each) for each in heard.of("output")]


def by_transformers(run: RunDir, text: str, *, causal: bool, adapters: bool = False) -> str:
    """What the README of the model says to do."""
    model: Any
    auto: Any = AutoModelForCausalLM if causal else AutoModelForSeq2SeqLM
    if adapters:
        base = auto.from_pretrained(str(run.plan().model.folder), dtype=torch.bfloat16)
        model = PeftModel.from_pretrained(base, run.model, autocast_adapter_dtype=False).eval()
    else:
        model = auto.from_pretrained(run.model, dtype=torch.bfloat16)
    tokenizer: Any = AutoTokenizer.from_pretrained(run.model)
    inputs = tokenizer(text, return_tensors="pt", add_special_tokens=not causal)
    written = model.generate(**inputs, max_new_tokens=learned_new_tokens(run), do_sample=False)[0]
    begin = inputs["input_ids"].shape[1] if causal else 0
    text = str(tokenizer.decode(written[begin:], skip_special_tokens=True))
    return text.strip() if causal else text


@pytest.mark.parametrize(
    "name", ["seq2seq", "seq2seq lora", "seq2seq adapters", "causal", "causal lora", "causal adapters"]
)
def test_greedy_text_is_that_of_transformers_and_of_the_job_streamed_or_not(trained: TrainedJobs, name: str) -> None:
    run, causal = trained[name], name.startswith("causal")
    end = run.attempt_lines(1)[-1]
    assert isinstance(end, Finished) and isinstance(end.result, TrainResult)
    [samples] = [each.samples for each in facts(run, EvaluationFinished) if each.step == end.result.step]
    rows: list[dict[str, Any]] = CHATS if causal else pairs(48)
    seen = 0
    for row in rows:
        asked: str = row["messages"][0]["content"] if causal else row["input"]
        sample = next((each for each in samples if asked in each.input), None)
        if sample is None:
            continue
        seen += 1
        heard = ask(run, row=row)
        [output] = outputs(heard)
        assert output.text == by_transformers(run, output.input, causal=causal, adapters="adapters" in name)
        assert output.text == sample.generated
        assert "".join(each["text"] for each in heard.of("text")) == output.text
        assert output.tokens > 0 and output.input_tokens > 0 and not output.input_cut
    assert seen == len(samples) == 3


def test_a_character_of_several_tokens_is_streamed_once_it_is_whole(trained: TrainedJobs) -> None:
    heard = ask(trained["causal bytes"], row=FOXES[0])
    [output] = outputs(heard)
    assert output.text == "the fox 🦊" and output.tokens > len("🦊".encode())
    assert "".join(each["text"] for each in heard.of("text")) == output.text


def test_a_row_goes_through_the_template_of_the_job_and_a_text_is_what_it_would_have_made(trained: TrainedJobs) -> None:
    run = trained["seq2seq"]
    [by_row] = outputs(ask(run, row={"input": "question 3 about bread"}))
    [by_text] = outputs(ask(run, input="ask: question 3 about bread"))
    assert by_row.input == "ask: question 3 about bread"
    assert by_row == by_text


@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 0.00099])
def test_a_temperature_too_small_to_divide_by_is_none(trained: TrainedJobs, temperature: float) -> None:
    run = trained["causal"]
    asked = {"input": CHATS[3]["messages"][0]["content"]}
    cold, greedy = ask(run, **asked, temperature=temperature), ask(run, **asked)
    assert outputs(cold) == outputs(greedy)
    assert cold.of("done")[0]["seed"] is None
    [smallest] = outputs(ask(run, **asked, temperature=0.001, seed=1))
    assert smallest.text  # in bf16 two tokens may be equally likely: which is drawn depends on the CPU


def test_messages_go_through_the_chat_template(trained: TrainedJobs) -> None:
    run = trained["causal"]
    messages = CHATS[3]["messages"]
    [by_messages] = outputs(ask(run, messages=messages[:1]))
    [by_row], [by_text] = outputs(ask(run, row=CHATS[3])), outputs(ask(run, input=messages[0]["content"]))
    assert by_messages == by_row == by_text
    tokenizer: Any = AutoTokenizer.from_pretrained(run.model)
    assert by_messages.input == tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)


def test_rows_are_answered_as_each_alone_and_one_that_cannot_be_used_says_why(trained: TrainedJobs) -> None:
    run, rows = trained["seq2seq"], pairs(3)
    heard = ask(run, rows=[rows[0], {"input": ""}, rows[2]])
    first, bad, last = outputs(heard)
    assert (first.index, bad.index, last.index) == (0, 1, 2)
    assert bad.error == "empty input" and bad.text == ""
    for row, output in ((rows[0], first), (rows[2], last)):
        [alone] = outputs(ask(run, row=row))
        assert alone.text == output.text


def test_the_base_model_answers_beside_the_trained_one(trained: TrainedJobs) -> None:
    run = trained["seq2seq lora"]
    heard = ask(run, row=pairs(1)[0], base=True)
    tuned, base = outputs(heard)
    assert (tuned.model, base.model) == ("trained", "base")
    assert tuned.text != base.text, "it learned something"
    assert tuned.input == base.input
    assert [each["model"] for each in heard.of("loading")] == ["trained", "base"]
    done = heard.of("done")[0]
    assert done["device"] == "cpu" and done["tokens_per_s"] > 0 and done["loading_s"] > 0


@pytest.mark.parametrize("name", ["seq2seq", "seq2seq adapters", "causal adapters"])
def test_a_checkpoint_answers_as_the_model_that_was_made_of_it(trained: TrainedJobs, name: str) -> None:
    run = trained[name]
    newest = max(folder.name for folder in run.checkpoints.glob("step-*"))
    row = CHATS[0] if name.startswith("causal") else pairs(1)[0]
    [by_checkpoint], [by_model] = outputs(ask(run, newest, row=row)), outputs(ask(run, row=row))
    assert by_checkpoint == by_model


def test_a_seed_repeats_a_sample_and_beams_differ_from_neither_model_nor_length(trained: TrainedJobs) -> None:
    run = trained["causal"]
    sampled = [ask(run, row=CHATS[1], temperature=1.5, seed=seed, max_new_tokens=12) for seed in (1, 1, 2, 3)]
    texts = [outputs(heard)[0].text for heard in sampled]
    assert texts[0] == texts[1] and len(set(texts)) > 1
    assert sampled[0].of("done")[0]["seed"] == 1
    unseeded = ask(run, row=CHATS[1], temperature=1.5, max_new_tokens=12)
    [again] = outputs(ask(run, row=CHATS[1], temperature=1.5, max_new_tokens=12, seed=unseeded.of("done")[0]["seed"]))
    assert [again] == outputs(unseeded), "the answer names the seed"
    [output] = outputs(ask(run, row=CHATS[1], num_beams=3, max_new_tokens=2))
    assert output.tokens == 2 and output.finish_reason == "length"


@pytest.mark.parametrize("task", ["seq2seq", "causal"])
def test_an_answer_ends_before_a_text_to_stop_at(trained: TrainedJobs, task: str) -> None:
    run, row = trained[task], pairs(1)[0] if task == "seq2seq" else CHATS[1]
    [whole] = outputs(ask(run, row=row, max_new_tokens=24))
    assert len(whole.text) > 8
    for begin, end in ((4, 6), (3, 8), (0, 2), (len(whole.text) - 3, len(whole.text))):
        stop = whole.text[begin:end]
        heard = ask(run, row=row, max_new_tokens=24, stop=["never written", stop])
        [cut] = outputs(heard)
        assert cut.text == whole.text[: whole.text.index(stop)] == "".join(part["text"] for part in heard.of("text"))
        assert cut.finish_reason == "stop" and cut.tokens <= whole.tokens
    assert outputs(ask(run, row=row, max_new_tokens=24, stop="never written")) == [whole]
    [beams] = outputs(ask(run, row=row, max_new_tokens=24, num_beams=2))
    [cut] = outputs(ask(run, row=row, max_new_tokens=24, num_beams=2, stop=beams.text[4:6]))
    assert cut.text == beams.text[: beams.text.index(beams.text[4:6])]


SAMPLING: dict[str, Any] = {"temperature": 1.5, "top_p": 0.7, "top_k": 9, "seed": 4}


def test_every_field_of_sampling_arrives(trained: TrainedJobs, monkeypatch: pytest.MonkeyPatch) -> None:
    assert SAMPLING.keys() == Sampling.model_fields.keys()
    given: dict[str, Any] = {}
    models = Models(trained["causal"], None, CPU, Heard())  # type: ignore[arg-type]
    generate = models.get("trained").loaded.model.generate
    monkeypatch.setattr(
        models.get("trained").loaded.model,
        "generate",
        lambda **options: given.update(options, seed=torch.initial_seed()) or generate(**options),  # type: ignore[operator]
    )
    body = GenerateBody.model_validate({"row": CHATS[1], "max_new_tokens": 4} | SAMPLING)
    answer(models, body, Heard())  # type: ignore[arg-type]
    assert given.items() >= (SAMPLING | {"do_sample": True}).items()


def test_a_classifier_draws_nothing_and_names_no_seed(trained: TrainedJobs) -> None:
    heard = ask(trained["classification"], row=CLASSES[0], temperature=1, seed=3)
    assert outputs(heard) == outputs(ask(trained["classification"], row=CLASSES[0]))
    assert heard.of("done")[0]["seed"] is None


def test_a_classifier_gives_every_label_with_its_probability(trained: TrainedJobs) -> None:
    run = trained["classification"]
    [output] = outputs(ask(run, row=CLASSES[0]))
    assert output.labels is not None
    assert [each.probability for each in output.labels] == sorted((e.probability for e in output.labels), reverse=True)
    assert sum(each.probability for each in output.labels) == pytest.approx(1, abs=1e-5)
    model: Any = AutoModelForSequenceClassification.from_pretrained(run.model, dtype=torch.bfloat16)
    tokenizer: Any = AutoTokenizer.from_pretrained(run.model)
    with torch.no_grad():
        logits = model(**tokenizer(output.input, return_tensors="pt")).logits[0].float()
    assert output.text == output.labels[0].label == model.config.id2label[int(logits.argmax())]
    assert output.labels[0].probability == pytest.approx(float(logits.softmax(-1).max()), abs=1e-6)


def test_a_regression_gives_the_score_that_transformers_gives(trained: TrainedJobs) -> None:
    run = trained["regression"]
    heard = ask(run, rows=SCORES[:3], base=True)
    found = [each for each in outputs(heard) if each.model == "trained"]
    model: Any = AutoModelForSequenceClassification.from_pretrained(run.model, dtype=torch.bfloat16)
    assert model.config.problem_type == "regression" and model.num_labels == 1
    tokenizer: Any = AutoTokenizer.from_pretrained(run.model)
    opened = pipeline("text-classification", model=model, tokenizer=tokenizer, function_to_apply="none")
    with torch.no_grad():
        scores = [model(**tokenizer(each.input, return_tensors="pt")).logits.item() for each in found]
    assert [each.score for each in found] == scores == [opened(each.input)[0]["score"] for each in found]
    assert [each.text for each in found] == [f"{score:.6g}" for score in scores]
    assert all(each.labels is None and each.tokens == 0 for each in found)
    assert [part["text"] for part in heard.of("text") if part["model"] == "trained"] == [each.text for each in found]


def test_what_cannot_be_answered_is_refused_with_what_to_do(trained: TrainedJobs) -> None:
    run = trained["seq2seq"]
    for checkpoint, body, code in (
        ("step-00000999", {"input": "x"}, "no_checkpoint"),
        (None, {"row": {"other": "x"}}, "bad_input"),
        (None, {"input": "\x07"}, "bad_input"),
    ):
        heard = ask(run, checkpoint, **body)
        assert heard.parts[-1][0] == "error" and heard.parts[-1][1]["code"] == code
    untrained = trained.place.job("pairs.jsonl")
    trained.place.prepare(untrained)
    assert ask(untrained, input="x").parts[-1][1]["code"] == "no_model"
    causal = trained["causal"]
    assert ask(causal, input="1 2 " * 45_000).parts[-1][1]["code"] == "input_too_long"


def test_a_cancelled_answer_ends_between_two_tokens(trained: TrainedJobs) -> None:
    heard = Heard(cancel_after=1)
    body = GenerateBody.model_validate({"row": pairs(1)[0], "max_new_tokens": 4000, "temperature": 2.0, "seed": 0})
    answer(Models(trained["seq2seq"], None, CPU, heard), body, heard)  # type: ignore[arg-type]
    assert heard.parts[-1][0] == "cancelled" and len(heard.of("text")) == 1


def test_it_takes_the_time_of_the_cpu_that_nobody_else_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nice", "sched_setscheduler"):  # tests/support/never_idle has put others in their place
        monkeypatch.setattr(os, name, getattr(posix, name))

    def priority() -> int:
        yield_to_others(1)
        found = (os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0))
        return 0 if found == (os.SCHED_IDLE, 19) else 1

    assert fork(priority).wait() == (0, "", "")
