"""LONGHAUL_DEVICE=cuda on a machine whose GPU cannot be used: the job waits, and says why wherever one looks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import requests

from jobs.process.lifeline import tied_to_parent
from jobs.state import Status
from tests.fakes import FakeDiscord
from tests.stack import Stack, tiny_job

WAITS = "tiny: waits for a GPU"
SAID = "couldn't communicate with the NVIDIA driver"


def test_a_job_without_a_gpu_waits_says_why_and_starts_when_there_is_one(tmp_path: Path, data: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "nvidia-smi").write_text(f'#!/bin/sh\necho "NVIDIA-SMI has failed because it {SAID}."\nexit 9\n')
    (tools / "nvidia-smi").chmod(0o755)
    with (
        FakeDiscord() as discord,
        Stack(tmp_path / "home", data=data, environment={"DISCORD_WEBHOOK": discord.url}) as stack,
    ):
        stack.start("service", "check", "prepare")  # for the CPU: compiling for a GPU would take it a minute
        stack.environment |= {"LONGHAUL_DEVICE": "cuda", "PATH": f"{tools}:{os.environ['PATH']}"}
        stack.start("train")
        run = stack.submit(tiny_job(training={"epochs": 1, "batch_size": 8}))
        stack.wait_for_event(run, "job.queued")
        stack.wait_for(lambda: (SAID in (stack.home / "train.log").read_text()) or None, "the worker's complaint")
        printed = tmp_path / "watch.txt"
        with printed.open("wb") as file:
            command = tied_to_parent(sys.executable, "-m", "longhaul.main", "watch", run.id)
            environment = {**stack.environment, "LONGHAUL_URL": stack.url}
            stack.processes["watch"] = subprocess.Popen(command, env=environment, stdout=file)
        stack.start("publish")
        stack.wait_for_event(run, "device.waiting")

        shown = stack.shown(run)
        assert shown["status"] == "queued" and shown["attempt"] == 0
        (worker,) = [w for w in requests.get(f"{stack.url}/workers", timeout=5).json()["data"] if w["stage"] == "train"]
        assert shown["waiting_reason"] == run.record().waiting_reason == worker["why"]
        assert worker["why"].startswith("LONGHAUL_DEVICE=cuda, but there is no usable GPU") and SAID in worker["why"]
        discord.wait_for(lambda: WAITS in discord.titles)
        assert SAID in next(message.text for message in discord.messages if message.title == WAITS)

        stack.stop("train")
        stack.environment["LONGHAUL_DEVICE"] = "cpu"
        stack.start("train")
        assert stack.wait_for_event(run, "job.succeeded", "job.failed").type == "job.succeeded"
        assert [event.type for event in run.events()].count("device.waiting") == 1
        assert run.record().status is Status.SUCCEEDED and run.record().waiting_reason is None
        stack.processes.pop("watch").wait(30)
        [line] = [line for line in printed.read_text().splitlines() if "waiting for the GPU" in line]
        assert worker["why"] in line
        discord.wait_for(lambda: "tiny: done" in discord.titles)
        assert discord.titles.count(WAITS) == 1
