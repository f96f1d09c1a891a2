"""sbatch, squeue, sacct and scancel, and the node that runs a script: `python -m tests.fake_slurm.programs PROGRAM …`.

A cluster is a folder (FAKE_SLURM). What tests tell it are files in it: `down`, `refuse` (with the words to say), `hold`
`hang` (until that is over), `no-accounts` and `<id>.do` with `preempt`, `timeout`, `oom` or `node_fail`. What it says
are files, too: `<id>.json` is a job, `log` has a line for each call of a program, and for each start and end of a
script.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from jobs.disk.files import write_atomically

GRACE_S = 300.0
"""Between SIGTERM and SIGKILL, as PreemptionParameters and KillWait say: longer than a trainer of the tests needs."""
TICK_S = 0.05
ENDED_BY = {
    "preempt": "PREEMPTED", "timeout": "TIMEOUT", "cancel": "CANCELLED", "node_fail": "NODE_FAIL",
    "oom": "OUT_OF_MEMORY",
}  # fmt: skip
OPTIONS = (
    "job-name", "output", "open-mode", "chdir", "export", "nodes", "ntasks", "signal", "partition", "account", "qos",
    "time", "cpus-per-task", "mem", "gpus-per-node", "constraint",
)  # fmt: skip


class Cluster:
    """The folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def told(self, what: str) -> bool:
        return (self.folder / what).exists()

    def job(self, number: str) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = json.loads((self.folder / f"{number}.json").read_text())
        except FileNotFoundError:
            return None
        return found

    def save(self, job: dict[str, Any]) -> None:
        write_atomically(self.folder / f"{job['id']}.json", json.dumps(job).encode())

    def jobs(self) -> list[dict[str, Any]]:
        numbers = sorted(int(file.stem) for file in self.folder.glob("*.json") if file.stem.isdecimal())
        return [job for number in numbers if (job := self.job(str(number))) is not None]

    def log(self, line: str) -> None:
        with open(self.folder / "log", "a") as file:
            file.write(f"{line}\n")


def leave(message: str) -> NoReturn:
    print(message, file=sys.stderr)
    raise SystemExit(1)


def sbatch(cluster: Cluster, argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="sbatch")
    parser.add_argument("--parsable", action="store_true", required=True)
    parser.parse_args(argv)
    script = sys.stdin.read()
    if cluster.told("refuse"):
        leave(f"sbatch: error: {(cluster.folder / 'refuse').read_text()}")
    if not script.startswith("#!"):
        leave("sbatch: error: This does not look like a batch script.")
    options = argparse.ArgumentParser(prog="sbatch", allow_abbrev=False)
    for name in OPTIONS:
        options.add_argument(f"--{name}")
    options.add_argument("--no-requeue", action="store_true", required=True)
    lines = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]
    given = options.parse_args(lines)
    number = str(len(list(cluster.folder.glob("*.sh"))) + 1)
    (cluster.folder / f"{number}.sh").write_text(script)
    job = {"id": number, "name": given.job_name, "state": "PENDING", "reason": "Resources", "code": "0:0"}
    cluster.save(job)
    where = [number, given.chdir, given.gpus_per_node or "0"]
    with open(given.output.replace("%%", "%"), "ab") as output:
        subprocess.Popen(
            [sys.executable, "-m", "tests.fake_slurm.programs", "node", *where],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    print(number)


def node(cluster: Cluster, argv: list[str]) -> None:
    """Wait for a turn, run the script, and end it as the cluster is told."""
    number, folder, gpus = argv
    job = cluster.job(number)
    assert job is not None
    while cluster.told("hold") or cluster.told("over"):
        if cluster.told(f"{number}.do") or cluster.told("over"):
            cluster.save(job | {"state": "CANCELLED", "reason": "None"})
            return
        time.sleep(TICK_S)
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH", "FAKE_SLURM") if name in os.environ}
    devices = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(int(gpus))))} if gpus != "0" else {}
    script = subprocess.Popen(
        ["bash", str(cluster.folder / f"{number}.sh")], cwd=folder, env=kept | devices | {"SLURM_JOB_ID": number},
        start_new_session=True,
    )  # fmt: skip
    job |= {"state": "RUNNING", "reason": "None"}
    cluster.save(job)
    cluster.log(f"start {number} {job['name']}")
    order, kill_at = None, 0.0
    while script.poll() is None:
        if order is None and cluster.told(f"{number}.do"):
            order = (cluster.folder / f"{number}.do").read_text()
            kill_at = 0.0 if order in ("node_fail", "oom") else time.monotonic() + GRACE_S
            if kill_at:
                script.send_signal(signal.SIGTERM)
        if cluster.told("over"):
            order = order or "node_fail"
        if order is not None and time.monotonic() >= kill_at:
            script.kill()
        time.sleep(TICK_S)
    cluster.log(f"end {number} {job['name']}")
    code = script.returncode
    ended = ENDED_BY[order] if order else "COMPLETED" if code == 0 else "FAILED"
    cluster.save(job | {"state": ended, "code": f"{max(code, 0)}:{max(-code, 0)}"})


def squeue(cluster: Cluster, argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="squeue", allow_abbrev=False)
    for switch in ("noheader", "me"):
        parser.add_argument(f"--{switch}", action="store_true")
    for name in ("jobs", "name", "states", "format"):
        parser.add_argument(f"--{name}")
    given = parser.parse_args(argv)
    if given.jobs is not None and cluster.job(given.jobs) is None:
        leave("slurm_load_jobs error: Invalid job id specified")
    for job in cluster.jobs():
        open_ = job["state"] in ("PENDING", "RUNNING")
        if given.jobs in (None, job["id"]) and given.name in (None, job["name"]) and (open_ or given.states == "all"):
            print(given.format.replace("%i", job["id"]).replace("%T", job["state"]).replace("%r", job["reason"]))


def sacct(cluster: Cluster, argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="sacct", allow_abbrev=False)
    for switch in ("noheader", "parsable2", "allocations"):
        parser.add_argument(f"--{switch}", action="store_true", required=True)
    parser.add_argument("--jobs", required=True)
    parser.add_argument("--format", required=True, choices=["State,ExitCode"])
    given = parser.parse_args(argv)
    if cluster.told("no-accounts"):
        leave("Slurm accounting storage is disabled")
    file = cluster.folder / "accounts" / f"{given.jobs}.json"
    if file.exists():
        job = json.loads(file.read_text())
        print(f"{job['state']}{' by 1000' if job['state'] == 'CANCELLED' else ''}|{job['code']}")


def scancel(cluster: Cluster, argv: list[str]) -> None:
    [number] = argv
    job = cluster.job(number)
    if job is None:
        leave(f"scancel: error: Kill job error on job id {number}: Invalid job id specified")
    if job["state"] in ("PENDING", "RUNNING") and not cluster.told(f"{number}.do"):
        write_atomically(cluster.folder / f"{number}.do", b"cancel")


def main(program: str, argv: list[str]) -> None:
    cluster = Cluster(Path(os.environ["FAKE_SLURM"]))
    if program != "node":
        cluster.log(f"{program} {' '.join(argv)}")
        while cluster.told("hang") and not cluster.told("over"):
            time.sleep(TICK_S)
        if cluster.told("down"):
            leave(f"{program}: error: Unable to contact slurm controller (connect failure)")
    {"sbatch": sbatch, "node": node, "squeue": squeue, "sacct": sacct, "scancel": scancel}[program](cluster, argv)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
