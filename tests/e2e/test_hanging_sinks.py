"""Discord and W&B take every call and answer none: the job does not notice, and later everything is there."""

from __future__ import annotations

from tests.sinks.driving import closed
from tests.sinks.wandb_runs import history, offline_files
from tests.support.fakes import WANDB_KEY, FakeDiscord, FakeWandb
from tests.support.shared_stack import restarted, succeeds
from tests.support.stack import Stack, tiny_job


def test_a_job_succeeds_while_discord_and_wandb_hang_and_both_hear_of_it_later(stack: Stack) -> None:
    with FakeDiscord() as discord, FakeWandb() as wandb:
        discord.hang()
        wandb.hang()
        told = {"DISCORD_WEBHOOK": discord.url, "WANDB_API_KEY": WANDB_KEY, "WANDB_BASE_URL": wandb.url}
        with restarted(stack, "publish", **told):
            run = stack.submit(tiny_job())
            succeeds(stack, run)
            assert discord.requests, "it was asked while the job ran"
            assert not discord.messages
            assert not wandb.runs

            discord.release()
            discord.wait_for(lambda: "tiny: done" in discord.titles, timeout_s=300)
            *in_flight, ended, done = discord.titles
            assert (ended, done) == ("tiny: attempt 1 ended", "tiny: done")
            assert in_flight in ([], ["tiny: planned"]), "which a quick job ends before its request is given up"
            assert all("attempt 1" in message.footer for message in discord.messages[-2:])
            stack.wait_for(lambda: closed(run, "wandb") or None, "the W&B run, offline by now, to end")
    (file,) = offline_files(run)
    assert history(file, "train/loss") == [(row.step, row.loss) for row in run.metrics()]
    assert [step for step, _ in history(file, "eval/loss")] == [0, 8, 16]
    assert [step for step, _ in history(file, "eval/samples.path")] == [0, 8, 16]
