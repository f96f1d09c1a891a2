"""A model that is not what its config says: the job fails before it takes the GPU, with the tensor, code and hint."""

from __future__ import annotations

import json
import shutil

from safetensors.torch import load_file, save_file

from jobs.events import JobFailed
from tests.support.fakes import FakeDiscord
from tests.support.local import until
from tests.support.shared_stack import data_of, dry_run, restarted
from tests.support.stack import Stack, tiny_job
from worker.training.tasks.seq2seq import builtin

LOST = "decoder.final_layer_norm.weight"


def test_a_missing_tensor_fails_the_job_with_its_name(stack: Stack) -> None:
    folder = data_of(stack) / "mine"
    folder.mkdir()
    builtin.build(folder, ["knead and bake the bread"], seed=0)
    shutil.copytree(folder, data_of(stack) / "whole")
    tensors = load_file(folder / "model.safetensors")
    del tensors[LOST]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with FakeDiscord() as discord, restarted(stack, "publish", DISCORD_WEBHOOK=discord.url):
        run = stack.submit(tiny_job(model="./mine"))
        failed = stack.wait_for_event(run, "job.failed", "job.checked").fact
        assert isinstance(failed, JobFailed)
        shown = stack.shown(run)
        assert (shown["status"], shown["error"]["code"]) == ("failed", "missing_keys")
        assert LOST in shown["error"]["message"]
        assert "config.json do not belong together" in shown["error"]["hint"]
        read = run.sinks / "discord.json"
        until(lambda: read.exists() and json.loads(read.read_text())["closed"] == "job.failed", stack.logs)
        assert discord.messages == [], "whoever submitted it has the answer"

    whole = dry_run(stack, tiny_job(model="./whole"))
    assert stack.wait_for_event(whole, "job.failed", "job.validated").type == "job.validated"
