"""The sentence of an event, where it depends on what the event knows."""

from __future__ import annotations

from typing import Any

from jobs.dataset_report import ClassSummary
from jobs.events import AnyFact, AttemptEnded, Event, JobSucceeded, TaskStarted, TaskSubmitted, TaskWaiting
from jobs.reasons import Reason
from jobs.trainer_facts import EvaluationFinished, Fault, MemoryPlanned, OomRecovered
from jobs.verdict import ConfidenceInterval, Verdict
from service.answers.conversion import sentence
from tests.support.samples import prepared

BARE = OomRecovered(step=1234, micro_batch_before=8, micro_batch_after=4, message="no", milliseconds_lost=812.5)


def worded(fact: AnyFact) -> str:
    return sentence(Event(number=9, job="j", at=1.0, attempt=1, fact=fact))


def test_memory_that_ran_out_is_told_with_cause_bucket_and_figures() -> None:
    assert worded(BARE) == (
        "step 1,234: memory ran out; the step was redone with micro-batches of 4 instead of 8, at a cost of 0.8 s"
    )
    known = {"cause": "other_processes", "bucket": "input ≤ 256, target ≤ 512", "requested_bytes": 2 * 2**30}
    known |= {"allocated_bytes": 27 * 2**30, "other_processes_bytes": 6 * 2**30, "micro_batch_after": 8}
    assert worded(BARE.model_copy(update=known)) == (
        "step 1,234: memory ran out: other processes hold memory of the GPU (2.0 GiB requested, 27.0 GiB allocated, "
        "6.0 GiB held by other processes); the step was redone with the same micro-batches of 8 "
        "(input ≤ 256, target ≤ 512), at a cost of 0.8 s"
    )
    assert BARE.level == "warn"


def test_how_an_attempt_ended_is_said_once() -> None:
    crashed = AttemptEnded(reason=Reason.CRASH, step=9)
    assert worded(crashed) == "attempt 1 ended at step 9: the trainer crashed"
    known = crashed.model_copy(update={"error": Fault.of(Reason.CRASH, " (signal SIGKILL)")})
    assert worded(known) == "attempt 1 ended at step 9: the trainer crashed (signal SIGKILL)"
    lost = crashed.model_copy(update={"step": 570, "checkpoint_step": 500})
    since = "(the newest checkpoint is that of step 500: 70 steps are lost)"
    assert worded(lost) == f"attempt 1 ended at step 570 {since}: the trainer crashed"
    other = crashed.model_copy(update={"error": Fault(code="crash", message="Segmentation fault")})
    assert worded(other) == "attempt 1 ended at step 9: the trainer crashed: Segmentation fault"


def test_each_metric_is_said_with_the_rows_that_it_is_over() -> None:
    metrics = {"perplexity": 7.389, "chrf": 41.23, "bleu": 9.0}
    seen = EvaluationFinished(step=5, loss=2.0, rows=2000, text_rows=64, seconds=1.0, best=True, metrics=metrics)
    assert worded(seen) == (
        "step 5: validation loss 2.0000, perplexity 7.389 over 2,000 rows, "
        "chrF 41.2, BLEU 9.0 over 64 generated texts, the best so far"
    )
    japanese = seen.model_copy(update={"bleu_of_characters": True})
    assert "chrF 41.2, BLEU of characters 9.0 over 64" in worded(japanese)
    earlier = seen.model_copy(update={"text_rows": None, "best": False})
    assert worded(earlier).endswith("over 2,000 rows, chrF 41.2, BLEU 9.0 over generated texts")
    classes = seen.model_copy(update={"text_rows": 0, "best": False, "metrics": {"accuracy": 0.5}})
    assert worded(classes) == "step 5: validation loss 2.0000, accuracy 0.5000 over 2,000 rows"


def test_the_way_of_a_task_on_an_engine_is_told() -> None:
    assert worded(TaskSubmitted(engine="cluster", task="7")) == (
        "handed over to the engine cluster: its task 7 waits for its turn there"
    )
    assert worded(TaskWaiting(task="7", message="PENDING (Priority)")) == "waiting on the engine: PENDING (Priority)"
    assert worded(TaskStarted(task="7", node="node-1")) == "task 7 of the engine runs on node-1"


def test_an_evaluation_is_told_without_steps_optimizer_and_training() -> None:
    planned = MemoryPlanned(
        micro_batch=8, activation_checkpointing=0, optimizer="adafactor", peak_bytes=2**30, budget_bytes=2**31,
        evaluation=True,
    )  # fmt: skip
    assert worded(planned) == "peak memory 1.0 GiB; budget 2.0 GiB; evaluation, micro-batch 8"
    assert worded(prepared(0, train_rows=40)) == "prepared: 40 rows, the model is to be evaluated"
    seen = EvaluationFinished(step=0, loss=2.0, rows=40, seconds=1.0, best=False)
    assert worded(seen) == "evaluated: validation loss 2.0000 over 40 rows"
    assert worded(seen.model_copy(update={"best": True})).startswith("step 0: validation loss")
    assert worded(AttemptEnded(reason=Reason.DONE, step=0)) == "attempt 1 ended: the trainer has finished"


def test_texts_that_the_tokenizer_does_not_know_in_full_are_said_where_they_are_many() -> None:
    data: dict[str, Any] = {"train_rows": 100, "kept": 100, "unknown_inputs": 3}
    rewritten = {"characters rewritten": 7, "list in target joined": 100}
    assert worded(prepared(4, **data, unknown_targets=98, rewritten=rewritten)) == (
        "prepared: 100 training rows, 98 targets have characters that the tokenizer does not know, "
        "7 texts have characters that were rewritten, 4 steps to train"
    )
    few = prepared(4, **data, unknown_targets=3, rewritten={"characters rewritten": 6})
    assert worded(few) == "prepared: 100 training rows, 4 steps to train"
    weighted = few.model_copy(update={"rows_per_epoch": 1250})
    assert worded(weighted) == "prepared: 100 training rows (1,250 an epoch), 4 steps to train"


def test_what_is_odd_about_labels_is_said() -> None:
    labels = ClassSummary(
        classes={"a": 5, "b": 3}, largest_share=0.6, without_label=0, validation_only=["x", "y"],
        labels_alike=(("Refund", "re\u200bfund"),), labels_noticed=("1.0 is read as 1",),
        contradictory_texts=2, contradictory_example=None,
    )  # fmt: skip
    assert worded(prepared(4, train_rows=100, labels=labels)) == (
        "prepared: 100 training rows, labels that only validation rows have: x, y, "
        r"labels that look alike: 'Refund' and 're\u200bfund', 1.0 is read as 1, "
        "2 texts with different labels, 4 steps to train"
    )
    usual = labels.model_copy(
        update={"validation_only": [], "labels_alike": (), "labels_noticed": (), "contradictory_texts": 0}
    )
    assert worded(prepared(4, train_rows=100, labels=usual)) == "prepared: 100 training rows, 4 steps to train"


def test_a_loss_that_judges_the_model_is_said_once() -> None:
    done = JobSucceeded(model="model", step=9, loss=1.5)
    assert worded(done) == "succeeded: the model of step 9 is in model/, validation loss 1.5000"
    for metric, times in ("loss", 1), ("chrf", 2):
        verdict = Verdict.of(metric, 1.5, ConfidenceInterval(low=1.4, high=1.6), {})
        text = worded(done.model_copy(update={"verdict": verdict}))
        assert text.count(" 1.5") == times, text
