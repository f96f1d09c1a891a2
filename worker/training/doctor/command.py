"""`python -m worker.training doctor`: each group of checks in a process of its own; the report at the end.

This process imports no torch. It holds the GPU's lock, so that no trainer begins meanwhile, and runs beside none.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from jobs.disk.files import write_atomically
from jobs.disk.measured_file import keep_measured, read_measured
from jobs.disk.rundir import RunDir, list_runs
from jobs.errors import Damaged, NotFound
from jobs.measured import MOST_OF_OTHERS, MeasuredGpu
from jobs.memory_plan import Device
from jobs.process.lifeline import PARENT_PID, Stopped, stopped_once
from jobs.text.units import format_bytes
from worker.training.doctor.finding import GROUPS, NEEDS_WHOLE_GPU, Examination, Finding, failed, judge, run_group, skip
from worker.training.doctor.report import DoctorReport, make_report
from worker.training.machine.locks import gpu_lock, try_lock
from worker.training.settings import TrainerSettings

SECONDS = 600.0
GRACE_S = 20.0
"""What a process may take longer than its time, for the check that it has begun."""
MOST_SECONDS = 86_400
END_THEM = "end them (free_memory names them), and run it again"
REFUSED = 2
Tell = Callable[[Finding], object]


def main(argv: Sequence[str], settings: TrainerSettings, environ: Mapping[str, str]) -> int:
    """Examine, and report. Returns 0, 1 if a check has failed, 2 if the GPU is in use or the folder cannot be used."""
    given = parse(argv)
    uuid = environ.get("CUDA_VISIBLE_DEVICES", "") if settings.device == "cuda" else ""
    examination = Examination(
        device=settings.device, folder=Path(given.folder or given.runs.resolve() / ".doctor"), model=given.model,
        until=time.monotonic() + given.seconds, gpu=settings.gpu, compile_s=given.compile_s,
        gemm_flops=given.gemm_flops,
    )  # fmt: skip
    if given.group:
        run_group(given.group, examination, lambda finding: print(finding.model_dump_json(), flush=True))
        return 0
    if not 0 < given.seconds <= MOST_SECONDS:
        print(f"doctor: --seconds is {given.seconds:g}; give a number above 0, {MOST_SECONDS} at most", file=sys.stderr)
        return REFUSED
    if given.report and (given.report.is_dir() or not os.access(given.report.absolute().parent, os.W_OK)):
        print(f"doctor: {given.report} cannot be written; name a file in a folder that can", file=sys.stderr)
        return REFUSED
    locks = given.runs / ".locks"
    try:
        locks.mkdir(parents=True, exist_ok=True)
        lock = try_lock(gpu_lock(locks, uuid.removeprefix("GPU-")) if uuid else locks / "doctor.lock")
    except OSError as error:
        return refuse(error)
    if lock is None:
        print(f"doctor: {in_use(given.runs, uuid)}", file=sys.stderr)
        return REFUSED
    try:
        with stopped_once(), lock, workplace(examination.folder / (uuid or "cpu")) as folder:
            began = time.monotonic()
            report = examine(
                replace(examination, folder=folder), given.only, given.no_gpu, lambda finding: show(finding, given.json)
            )
    except Stopped as stopped:
        return stopped.code  # `worker/main.py` says so
    except NoWorkplace as error:
        return refuse(error)
    report = report.model_copy(update={"seconds": time.monotonic() - began})
    if uuid and given.driver:
        try:
            keep(given.runs, uuid, report.measured(given.driver, int(time.time())))
        except OSError as error:
            print(f"doctor: what was measured is not kept: {error.strerror}", file=sys.stderr)
    print(report.to_json() if given.json else "\n".join(report.summary), flush=True)
    if given.report:
        write_atomically(given.report, report.page().encode())
    return 1 if report.counts["FAIL"] else 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="doctor", description="Examine this machine and its GPU with the trainer's own code: at most 10 minutes."
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON, and each finding to stderr")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write a page to paste into an issue")
    parser.add_argument("--model", choices=("xl", "large", "base", "tiny"), help="default: the largest that fits")
    parser.add_argument(
        "--only",
        action="append",
        choices=tuple(GROUPS),
        help="one group of checks, with those that it needs; repeat for more",
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"time for all checks (default: {SECONDS:.0f})")
    runs = Path(os.environ.get("LONGHAUL_RUNS") or "runs")
    parser.add_argument(
        "--runs", type=Path, default=runs, metavar="DIR", help="run directories (default: LONGHAUL_RUNS)"
    )
    figures: dict[str, type] = {"compile-s": float, "gemm-flops": float}
    for name in ("group", "folder", "no-gpu", "driver", *figures):
        parser.add_argument(f"--{name}", type=figures.get(name, str), help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def show(finding: Finding, on_stderr: bool) -> None:
    """A line, as soon as a check is done."""
    print(finding.line, file=sys.stderr if on_stderr else sys.stdout, flush=True)


class NoWorkplace(OSError):
    """There is no folder to examine in."""


def refuse(error: OSError) -> int:
    """Say why the runs directory cannot be used; returns the exit code."""
    print(f"doctor: the runs directory cannot be used ({error.strerror}); LONGHAUL_RUNS names it", file=sys.stderr)
    return REFUSED


@contextlib.contextmanager
def workplace(folder: Path) -> Iterator[Path]:
    """An empty folder, gone afterwards; so is what a killed doctor has left there. Raises NoWorkplace."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise NoWorkplace(*error.args) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def trains_on(run: RunDir, uuid: str) -> bool:
    """Whether an attempt is open on this GPU; a directory that is damaged, or gone, says nothing."""
    try:
        record = run.record()
    except (Damaged, NotFound):
        return False
    return record.attempt_open and record.gpu == uuid


def in_use(runs: Path, uuid: str) -> str:
    """Who holds the lock, as far as can be seen."""
    job = next((run.id for run in list_runs(runs) if run.held() and trains_on(run, uuid)), None) if uuid else None
    if job is None:
        return "another doctor is at work; wait for its end"
    return f"job {job} trains on this GPU; wait for its end, or `longhaul pause {job}` and resume it afterwards"


def examine(examination: Examination, only: Sequence[str] | None, no_gpu: str | None, tell: Tell) -> DoctorReport:
    """All groups, or `only` some, one after the other; each finding is told at once. `no_gpu`: why there is none."""
    findings: list[Finding] = []

    def found(finding: Finding) -> None:
        findings.append(finding)
        tell(finding)

    if no_gpu is not None:
        found(Finding(check="driver", status="FAIL", figure=no_gpu, limit="a usable GPU", hint="see docs/docker.md"))
        examination = replace(examination, device="cpu", gpu=None)
    for group in chosen(only, examination.device):
        with contextlib.closing(run_child(group, examination)) as told:  # its process ends with what it has to say
            for finding in told:
                if no_gpu is None or finding.check != "driver":
                    found(finding)
        examination = informed(examination, findings)
    return make_report(findings, examination.gpu, 0.0)


def chosen(only: Sequence[str] | None, device: Device) -> list[str]:
    """All groups, or these and what they need, in order.

    `warm` compares with what `training` has compiled; `memory` tells whether others hold the GPU.
    """
    wanted = set(only or GROUPS)
    if "warm" in wanted:
        wanted.add("training")
    if device == "cuda" and wanted & set(NEEDS_WHOLE_GPU):
        wanted.add("memory")
    return [group for group in GROUPS if group in wanted]


def informed(examination: Examination, findings: Sequence[Finding]) -> Examination:
    """With what later groups need of earlier ones."""
    of = {finding.check: finding for finding in findings}
    gemm, load, memory = of.get("gemm"), of.get("load"), of.get("free_memory")
    cold = of.get("compile_cold" if examination.device == "cuda" else "compiled_gradients")
    return replace(
        examination,
        gemm_flops=gemm.values.get("flops") if gemm and gemm.status != "FAIL" else None,
        compile_s=cold.values.get("seconds") if cold else None,
        model=load.model if load and load.model else examination.model,
        other_bytes=memory.values.get("other_bytes", 0.0) if memory else 0.0,
    )


def keep(runs: Path, uuid: str, found: MeasuredGpu) -> None:
    """Keep what was measured now; of the rest, what was measured before with the same driver."""
    new = found.model_dump(exclude_none=True, exclude_defaults=True)
    if new.keys() - {"driver", "examined_at", "model"}:
        before = read_measured(runs, uuid, found.driver) or found
        new.pop("training", None)
        if new.keys().isdisjoint(("update_s", "rows_per_s")):
            new.pop("model", None)
        elif new["model"] != before.model:  # what was measured of another model
            before = before.model_copy(update={"update_s": None, "rows_per_s": {}})
        kept = before.model_copy(update=new)
        for rate in found.training:
            kept = kept.with_training(rate)
        keep_measured(runs, uuid, kept)


def run_child(group: str, examination: Examination) -> Generator[Finding]:
    """The findings of one group: each check's own, or why there is none."""
    missing = list(GROUPS[group])
    if examination.other_bytes > MOST_OF_OTHERS and group in NEEDS_WHOLE_GPU:
        held = format_bytes(examination.other_bytes)
        yield from (skip(check, f"other processes hold {held} of the GPU: {END_THEM}") for check in missing)
        return
    if examination.left_s <= 0:
        yield from (skip(check, "no time was left") for check in missing)
        return
    folder = examination.folder / group
    folder.mkdir()
    log = examination.folder / f"{group}.log"
    with open(log, "wb") as errors:
        child = subprocess.Popen(
            [sys.executable, "-m", "worker.training", "doctor", *arguments(group, folder, examination)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, env=environment(examination),
        )  # fmt: skip
    timer = threading.Timer(examination.left_s + GRACE_S, child.kill)
    timer.start()
    try:
        for line in child.stdout or ():
            with contextlib.suppress(ValidationError):  # what a library prints
                finding = Finding.model_validate_json(line)
                missing.remove(finding.check)
                yield finding
        code = child.wait()
    finally:
        timer.cancel()
        child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()
    if missing and code == -signal.SIGKILL and examination.left_s <= 0:
        first, *others = missing  # it had begun, and hangs or is slow
        hint = "run it again with --seconds 1200; if it hangs again, look at the kernel's log (dmesg)"
        yield judge(first, "did not end in the time that was left", fail=True, hint=hint)
        yield from (skip(check, "no time was left") for check in others)
    elif missing:
        first, *others = missing
        said = log.read_text(errors="replace").strip().splitlines()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        yield failed(first, RuntimeError(f"its process ended with {how}: {said[-1][:300] if said else 'no output'}"))
        yield from (skip(check, f"the process ended in {first}") for check in others)
    shutil.rmtree(folder, ignore_errors=True)


def arguments(group: str, folder: Path, examination: Examination) -> list[str]:
    """The command line of a group's process."""
    figures = {"compile-s": examination.compile_s, "gemm-flops": examination.gemm_flops, "model": examination.model}
    known = [word for name, value in figures.items() if value is not None for word in (f"--{name}", str(value))]
    return ["--group", group, "--folder", os.fspath(folder), "--seconds", str(examination.left_s), *known]


def environment(examination: Examination) -> dict[str, str]:
    """Of a group's process: nothing is downloaded, and nothing was compiled before this examination."""
    caches = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
    places = {name: os.fspath(examination.folder / folder) for name, folder in caches.items()}
    own = {"LONGHAUL_DEVICE": examination.device, PARENT_PID: str(os.getpid()), "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **places, **own}
