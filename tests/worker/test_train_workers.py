"""Several GPUs: `python -m worker train` keeps a worker for each. nvidia-smi is a script, the driver says nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from jobs.heartbeat import Worker
from jobs.reasons import Reason
from jobs.redis.connection import Tickets, connect
from jobs.redis.store import Store
from jobs.state import Stage
from tests.e2e.fake_gpu import SAID, machine
from tests.support.processes import alive
from tests.support.samples import H200, heartbeat
from tests.support.stack import ROOT, Stack
from worker.training.machine.host import host_memory

SMI = """#!/bin/sh
if [ "$1" = -L ]; then exit 0; fi
for index in 0 1; do
  size=$((24576 + 8192 * index))
  if [ -e '{folder}/gpu-'$index ]; then echo "$index, GPU-$index, NVIDIA GPU $index, $size, 580.95.05, 12.0"
  else echo "Unable to determine the device handle for GPU$index: GPU is lost.  Reboot the system"; code=15; fi
done
exit ${{code:-0}}
"""


class TwoGpus:
    """A train worker on a machine with two GPUs, each of which is a file. Nothing else runs but Redis."""

    def __init__(self, stack: Stack, folder: Path) -> None:
        environment, _ = machine(folder, stack.environment["PATH"])
        stack.environment |= environment | {"LONGHAUL_TRIALS_AT_ONCE": "1"}
        (folder / "tools/nvidia-smi").write_text(SMI.format(folder=folder))
        self.gpus = [folder / "gpu-0", folder / "gpu-1"]
        for gpu in self.gpus:
            gpu.touch()
        self.stack = stack
        client = connect(stack.redis.url)
        self.store, self.tickets = Store(client), Tickets(client)

    def workers(self) -> list[Worker]:
        return self.store.workers.all()

    def healthy(self, *uuids: str) -> dict[str, int]:
        """PIDs of healthy workers by GPU, once there is one for each of these alone."""

        def found() -> dict[str, int] | None:
            there = {each.gpu.uuid: each.pid or 0 for each in self.workers() if each.healthy and each.gpu is not None}
            return there if there.keys() == set(uuids) and all(map(alive, there.values())) else None

        return self.stack.wait_for(found, f"workers of {', '.join(uuids)}")

    def ours(self) -> set[int | None]:
        """PIDs of the workers of this box."""
        return {each.pid for each in self.workers() if each.box != "gpu2"}

    def says(self, words: str) -> str:
        """Why an unhealthy worker is so, once one says these words."""
        return self.stack.wait_for(
            lambda: next((each.why for each in self.workers() if words in (each.why or "")), None), words
        )

    def health(self) -> tuple[int, str]:
        """Exit code and words of the health check."""
        command = [sys.executable, "-m", "worker", "--healthy", "train"]
        done = subprocess.run(
            command, cwd=ROOT, env=self.stack.environment, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout


def gone(pid: int) -> bool | None:
    """For `wait_for`."""
    return not alive(pid) or None


@pytest.fixture
def two(tmp_path: Path, data: Path) -> Iterator[TwoGpus]:
    with Stack(tmp_path / "home", data=data) as stack:
        (stack.home / "runs").mkdir()
        yield TwoGpus(stack, tmp_path / "machine")


def test_each_gpu_has_a_worker_and_one_that_ends_is_started_again_while_the_other_stays(two: TwoGpus) -> None:
    two.stack.start("train")
    pids = two.healthy("GPU-0", "GPU-1")
    assert two.stack.processes["train"].pid not in pids.values()
    assert {each.gpu.memory_bytes >> 30 for each in two.workers() if each.gpu} == {24, 32}
    assert two.health() == (0, "")
    assert {each.gpu.host_memory_bytes for each in two.workers() if each.gpu} == {host_memory().total}
    for signum, how in ((signal.SIGKILL, "was killed by signal 9"), (signal.SIGTERM, "ended with code 0")):
        os.kill(pids["GPU-0"], signum)
        while (after := two.healthy("GPU-0", "GPU-1"))["GPU-0"] == pids["GPU-0"]:
            two.stack.wait_for(partial(gone, pids["GPU-0"]), "its end")
        assert after["GPU-1"] == pids["GPU-1"]
        assert f"the train worker of GPU GPU-0 {how}; it starts again in" in (two.stack.home / "train.log").read_text()
        pids = after
        assert {each.pid for each in two.workers()} == set(pids.values()), "the one that ended is not listed"
    assert two.stack.stop("train") == 0
    assert not any(map(alive, pids.values())) and all(not each.healthy for each in two.workers()), "signed off"


def test_a_worker_on_another_box_with_the_same_pids_is_somebody_elses(two: TwoGpus) -> None:
    two.stack.start("train")
    ended = two.healthy("GPU-0", "GPU-1")["GPU-0"]
    parent = two.stack.processes["train"].pid
    theirs = heartbeat(f"train-gpu2-{ended}-c0ffee", pid=ended, parent_pid=parent, box="gpu2", gpu=H200)
    two.store.workers.report(theirs)
    os.kill(ended, signal.SIGKILL)
    two.stack.wait_for(partial(gone, ended), "its end")
    # Of one that has ended its parent says why; what it said is forgotten when the next one starts.
    two.stack.wait_for(lambda: ended not in two.ours() or None, "it to be forgotten")
    found = [each for each in two.workers() if each.box == "gpu2"]
    assert [(each.name, each.healthy, each.why) for each in found] == [(theirs.name, True, None)]


def test_a_worker_whose_gpu_is_lost_waits_for_it_and_when_none_is_left_all_end(two: TwoGpus) -> None:
    two.stack.start("train")
    pids = two.healthy("GPU-0", "GPU-1")
    two.gpus[0].unlink()
    while alive(pids["GPU-0"]):  # whoever takes a ticket looks at its GPU
        two.tickets.add(Stage.TRAIN)
        two.stack.wait_for(lambda: two.tickets.count(Stage.TRAIN) == 0 or None, "the ticket to be taken")
    assert SAID in two.says("LONGHAUL_DEVICE=cuda, but")
    assert two.healthy("GPU-1") == {"GPU-1": pids["GPU-1"]}
    known = [each.gpu for each in two.workers() if not each.healthy and each.gpu is not None]
    assert known and {gpu.memory_bytes >> 30 for gpu in known} == {24}, "jobs that need it wait for it"
    code, said = two.health()
    assert code == 1 and SAID in said
    two.gpus[1].unlink()
    two.tickets.add(Stage.TRAIN)
    assert two.stack.processes.pop("train").wait(300) == Reason.GPU_LOST.exit_code
    assert not alive(pids["GPU-1"])


def test_a_list_names_the_gpus_and_one_alone_is_the_process_itself(two: TwoGpus) -> None:
    two.stack.environment["LONGHAUL_GPUS"] = "1"
    two.stack.start("train")
    assert two.healthy("GPU-1") == {"GPU-1": two.stack.processes["train"].pid}


def test_a_gpu_has_a_worker_for_each_slot_and_all_end_when_it_is_lost(two: TwoGpus) -> None:
    two.stack.environment |= {"LONGHAUL_GPUS": "GPU-0", "LONGHAUL_TRIALS_AT_ONCE": "2"}
    two.stack.start("train")

    def slots() -> dict[int, int] | None:
        """PIDs of healthy workers by slot."""
        found = {each.slot: each.pid for each in two.workers() if each.healthy and each.gpu and alive(each.pid or 0)}
        return {slot: pid for slot, pid in found.items() if slot is not None and pid} if len(found) == 2 else None

    before = two.stack.wait_for(slots, "a worker for each slot")
    assert before.keys() == {0, 1}
    os.kill(before[1], signal.SIGKILL)
    two.stack.wait_for(partial(gone, before[1]), "its end")
    after = two.stack.wait_for(slots, "another in its place")
    assert after[0] == before[0] and after[1] != before[1]
    assert "the train worker of GPU GPU-0, slot 1 was killed by signal 9" in (two.stack.home / "train.log").read_text()
    two.gpus[0].unlink()
    two.tickets.add(Stage.TRAIN)  # whoever takes it leaves it to the other
    assert two.stack.processes.pop("train").wait(300) == Reason.GPU_LOST.exit_code
    lost = json.loads((two.stack.runs / ".locks/gpu-GPU-0.lost").read_bytes())
    assert lost["ends"] == 1, "one loss, whoever has seen it"


def test_workers_that_are_asked_to_stop_while_they_look_for_their_gpu_stop(two: TwoGpus) -> None:
    smi = Path(two.stack.environment["PATH"].split(os.pathsep)[0]) / "nvidia-smi"
    marker = two.stack.home / "asked"
    text = smi.read_text().replace("#!/bin/sh\n", f"#!/bin/sh\necho >> '{marker}'\nsleep 2\n")
    smi.write_text(text)
    two.stack.start("train")
    # The parent asks twice; then each child does.
    two.stack.wait_for(lambda: (marker.exists() and marker.read_text().count("\n") >= 4) or None, "all to ask")
    assert two.stack.stop("train") == 0
