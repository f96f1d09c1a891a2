"""LONGHAUL_DEVICE=cuda on a machine whose GPU cannot be used: the job waits, and says why wherever one looks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import requests

from jobs.process.lifeline import tied_to_parent
from tests.support.fakes import FakeDiscord
from tests.support.shared_stack import restarted, stop, succeeds
from tests.support.stack import Stack, tiny_job

WAITS = "tiny: waits for a GPU"
SAID = "couldn't communicate with the NVIDIA driver"


def test_a_job_without_a_gpu_waits_says_why_and_starts_when_there_is_one(stack: Stack, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "nvidia-smi").write_text(f'#!/bin/sh\necho "NVIDIA-SMI has failed because it {SAID}."\nexit 9\n')
    (tools / "nvidia-smi").chmod(0o755)
    printed = tmp_path / "watch.txt"
    stop(stack, "publish")
    with FakeDiscord() as discord:
        # check and prepare are for the CPU: compiling for a GPU would take them a minute
        with restarted(stack, "train", LONGHAUL_DEVICE="cuda", PATH=f"{tools}:{os.environ['PATH']}"):
            training = {"epochs": 1, "batch_size": 8}
            run = stack.submit(tiny_job(training=training, integrations={"wandb": None}))
            stack.wait_for_event(run, "job.queued")
            workers = f"{stack.url}/workers"

            def complaint() -> str | None:
                found = [each for each in requests.get(workers, timeout=60).json()["data"] if each["stage"] == "train"]
                return str(found[0]["why"]) if len(found) == 1 and found[0]["why"] else None

            why = stack.wait_for(complaint, "the worker's complaint")
            with printed.open("wb") as file:
                command = tied_to_parent(sys.executable, "-m", "longhaul.main", "watch", run.id)
                environment = {**stack.environment, "LONGHAUL_URL": stack.url}
                watch = subprocess.Popen(command, env=environment, stdout=file)
            stack.environment["DISCORD_WEBHOOK"] = discord.url
            stack.start("publish")
            stack.wait_for_event(run, "device.waiting")

            shown = stack.shown(run)
            assert shown["status"] == "queued" and shown["attempt"] == 0
            assert shown["waiting_reason"] == run.record().waiting_reason == why
            assert why.startswith("LONGHAUL_DEVICE=cuda, but there is no usable GPU") and SAID in why
            discord.wait_for(lambda: WAITS in discord.titles, 300)
            assert SAID in next(message.text for message in discord.messages if message.title == WAITS)

        stack.start("train")
        succeeds(stack, run)
        assert [event.type for event in run.events()].count("device.waiting") == 1
        assert run.record().waiting_reason is None
        assert watch.wait(300) == 0
        [line] = [line for line in printed.read_text().splitlines() if "waiting for the GPU" in line]
        assert why in line
        discord.wait_for(lambda: "tiny: done" in discord.titles, 300)
        assert discord.titles.count(WAITS) == 1
        stop(stack, "publish")
