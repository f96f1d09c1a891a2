"""One job, end to end: what it leaves on disk, in Discord and in W&B."""

from __future__ import annotations

import json

import requests
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from jobs.events import AttemptStarted, JobSucceeded
from jobs.redis.connection import connect
from jobs.redis.store import Store
from jobs.state import Status
from jobs.trainer_facts import EvaluationFinished, ModelLoaded
from jobs.version import VERSION, library_versions
from tests.support.fakes import FakeDiscord, FakeWandb
from tests.support.samples import facts_of
from tests.support.shared_stack import restarted, succeeds
from tests.support.stack import Stack, tiny_job

WANDB_KEY = "f4ke" + "0123456789abcdef" * 2 + "beef"
LIFE = [
    "job.submitted", "job.checked", "job.prepared", "job.queued", "attempt.started", "memory.planned",
    "model.loaded", "evaluation.finished", "evaluation.finished", "checkpoint.saved", "evaluation.finished",
    "checkpoint.saved", "attempt.ended", "job.succeeded",
]  # fmt: skip


def test_one_job_end_to_end(stack: Stack) -> None:
    with FakeDiscord() as discord, FakeWandb() as wandb:
        told = {"DISCORD_WEBHOOK": discord.url, "WANDB_API_KEY": WANDB_KEY, "WANDB_BASE_URL": wandb.url}
        with restarted(stack, "publish", **told):
            run = stack.submit(tiny_job())
            succeeds(stack, run)

            events = run.events()
            assert [event.type for event in events] == LIFE
            assert [event.number for event in events] == list(range(1, len(LIFE) + 1))
            store = Store(connect(stack.redis.url))
            stack.wait_for(lambda: store.number(run.id) == len(LIFE) or None, "the projection, made after the append")
            assert store.events(run.id) == events
            listed = requests.get(f"{stack.url}/jobs/{run.id}/events", timeout=60).json()["data"]
            assert [event["type"] for event in listed] == LIFE

            (started,) = facts_of(run, AttemptStarted)
            assert started.versions == {"longhaul": VERSION, **library_versions("torch", "transformers")}
            (loaded,) = facts_of(run, ModelLoaded)
            assert (loaded.dtype, loaded.device, loaded.resumed_step) == ("bfloat16", "cpu", None)
            losses = [evaluation.loss for evaluation in facts_of(run, EvaluationFinished)]
            assert losses[-1] < losses[0]
            done = events[-1].fact
            assert isinstance(done, JobSucceeded) and (done.loss, done.first_loss) == (min(losses), losses[0])

            shown = stack.shown(run)
            assert (shown["status"], shown["progress"]["step"]) == ("succeeded", 16)
            assert shown["result_files"] == ["model", "metrics.jsonl"]

            rows = run.metrics()
            assert [row.step for row in rows] == list(range(2, 17, 2))
            assert rows[-1].cache_clears == 3 and rows[-1].cache_clear_s > 0
            assert rows[-1].eta_s > 0, "the last evaluation and checkpoint are still to come"

            # Discord: progress in one message, edited in place; then completion with the loss curve; all within limits
            discord.wait_for(lambda: "tiny: done" in discord.titles, 300)
            assert len(discord.messages) == 2 and discord.problems == []
            progress, completion = discord.messages
            assert len(progress.versions) > 1
            assert [name for name, content in completion.attachments.items() if content.startswith(b"\x89PNG")]
            assert (run.path / "loss.png").read_bytes().startswith(b"\x89PNG")

            # W&B: the history, row by row
            told_rows = wandb.wait_for(
                lambda: (
                    run.id in wandb.runs
                    and len(wandb.runs[run.id].rows("train/step", "train/loss")) >= len(rows)
                    and wandb.runs[run.id].rows("train/step", "train/loss")
                )
            )
            assert [tuple(row) for row in told_rows] == [(row.step, row.loss) for row in rows]

        text = "".join(file.read_text(errors="replace") for file in run.path.rglob("*.json*"))
        assert discord.token not in text and WANDB_KEY not in text

    assert run.record().status is Status.SUCCEEDED
    model, info = AutoModelForSeq2SeqLM.from_pretrained(
        run.model, dtype=torch.bfloat16, output_loading_info=True, local_files_only=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert json.loads((run.model / "config.json").read_text())["tie_word_embeddings"] is False
    tokenizer = AutoTokenizer.from_pretrained(run.model)
    asked = tokenizer("Write the directions. Toast: bread, butter", return_tensors="pt")
    written = model.generate(**asked, max_new_tokens=12)
    assert tokenizer.decode(written[0], skip_special_tokens=True)
