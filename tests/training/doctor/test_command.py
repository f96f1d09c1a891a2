"""The doctor's own process: groups in processes, who may run, what it prints and leaves."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from unittest.mock import patch

import pytest

from jobs.disk.measured_file import keep_measured, read_measured
from jobs.disk.rundir import create
from jobs.events import AttemptStarted, JobQueued, JobSubmitted
from jobs.gpus import GpuFacts
from jobs.measured import TrainingRate
from jobs.text.units import GIB
from tests.support.local import ROOT
from tests.support.samples import checked, prepared
from tests.training.conftest import tiny_spec
from worker.training.__main__ import main as trainer
from worker.training.doctor import command, machine
from worker.training.doctor.finding import GROUPS, Check, Examination, Finding, judge, run_group, skip
from worker.training.doctor.report import make_report
from worker.training.machine.locks import gpu_lock, try_lock
from worker.training.settings import from_environment

GPU = "GPU-51a00000-0000-4000-8000-000000000001"


def examination(folder: Path, seconds: float = 600.0) -> Examination:
    return Examination("cpu", folder, None, time.monotonic() + seconds)


def doctor(runs: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, as `python -m worker` starts it."""
    variables = os.environ | {"LONGHAUL_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": ""} | environment
    return subprocess.run(
        [sys.executable, "-m", "worker.training", "doctor", "--runs", str(runs), *words],
        cwd=ROOT, env=variables, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip


def test_findings_are_printed_and_reported_and_nothing_is_left(tmp_path: Path) -> None:
    done = doctor(tmp_path / "runs", "--only", "speed", "--json", "--report", str(tmp_path / "page.md"))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert {each["check"]: each["status"] for each in report["findings"]} == dict.fromkeys(GROUPS["speed"], "SKIP")
    assert report["counts"] == {"SKIP": len(GROUPS["speed"])} and report["gpu"] is None
    assert "SKIP  gemm: no GPU" in done.stderr.splitlines()
    page = (tmp_path / "page.md").read_text()
    assert "| SKIP | gemm | no GPU |" in page and str(tmp_path) not in page and os.uname().nodename not in page
    assert list((tmp_path / "runs" / ".doctor").iterdir()) == []


def in_process(words: list[str], **environment: str) -> int:
    """The same here: what has processes of its own for what it measures, or refuses."""
    with patch.dict(os.environ, {"LONGHAUL_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": ""} | environment):
        return trainer(["doctor", *words])


def test_it_never_runs_beside_a_job_and_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = tiny_spec()
    run, _ = create(tmp_path, "job-1", spec, JobSubmitted(name="a", model="x", spec_sha256=spec.sha256()))
    run.append([checked(), prepared(9), JobQueued(), AttemptStarted(worker="w", device="cuda", gpu=GPU)])
    other, _ = create(tmp_path, "job-0", spec, JobSubmitted(name="b", model="x", spec_sha256=spec.sha256()))
    other.append([checked(), prepared(9), JobQueued(), AttemptStarted(worker="x", device="cuda", gpu="GPU-other")])
    (tmp_path / ".locks").mkdir()
    locks = (
        try_lock(run.lock_file),
        try_lock(other.lock_file),
        try_lock(gpu_lock(tmp_path / ".locks", GPU.removeprefix("GPU-"))),
    )
    assert all(locks)
    try:
        code = in_process(["--runs", str(tmp_path)], LONGHAUL_DEVICE="cuda", CUDA_VISIBLE_DEVICES=GPU)
    finally:
        for lock in locks:
            lock.close()  # type: ignore[union-attr]  # seen above
    said = capsys.readouterr()
    assert code == command.REFUSED and said.out == ""
    assert "job job-1 trains on this GPU; wait for its end, or `longhaul pause job-1`" in said.err


def test_without_the_gpu_that_was_asked_for_the_rest_is_examined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def here(group: str, examination: Examination) -> Generator[Finding]:
        found: list[Finding] = []
        run_group(group, examination, found.append)
        yield from found

    monkeypatch.setattr(command, "run_child", here)
    words = ["--runs", str(tmp_path), "--only", "speed", "--no-gpu", "the driver is gone", "--json"]
    assert in_process(words) == 1
    first, *others = json.loads(capsys.readouterr().out.splitlines()[-1])["findings"]
    assert (first["check"], first["status"], first["figure"]) == ("driver", "FAIL", "the driver is gone")
    assert [each["status"] for each in others] == ["SKIP"] * len(GROUPS["speed"])


@pytest.mark.parametrize("seconds", ["nan", "inf", "0", "-1"])
def test_a_time_that_is_none_is_refused_in_a_sentence(
    tmp_path: Path, seconds: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = from_environment({"LONGHAUL_DEVICE": "cpu"})
    assert command.main(["--runs", str(tmp_path), f"--seconds={seconds}"], settings, {}) == command.REFUSED
    assert capsys.readouterr().err == f"doctor: --seconds is {seconds}; give a number above 0, 86400 at most\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["", ".locks", ".doctor", ".doctor/cpu"])
def test_a_file_in_the_place_of_its_folder_is_refused_in_a_sentence(
    tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs" / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "runs" / place).touch()
    assert in_process(["--runs", str(tmp_path / "runs")]) == command.REFUSED
    said = capsys.readouterr().err
    assert re.fullmatch(r"doctor: the runs directory cannot be used \(.+\); LONGHAUL_RUNS names it\n", said)


def test_a_reader_that_leaves_ends_it_without_a_traceback_and_nothing_is_left(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "worker.training", "doctor", "--runs", str(tmp_path), "--only", "machine"]
    variables = os.environ | {"LONGHAUL_DEVICE": "cpu"}
    with subprocess.Popen(words, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == (b"", 128 + signal.SIGPIPE)
    assert list((tmp_path / ".doctor").iterdir()) == []


def test_a_process_that_dies_fails_its_check_and_no_other_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = (
        "import os, sys\n"
        "from worker.training.doctor.finding import judge\n"
        "print(judge('driver', 'fine').model_dump_json(), flush=True)\n"
        "print('a library speaks')\n"
        "print('the GPU is on fire', file=sys.stderr, flush=True)\n"
        "os.kill(os.getpid(), 11)\n"
    )
    real = subprocess.Popen

    def start(words: list[str], **more: object) -> subprocess.Popen[bytes]:
        return real([words[0], "-c", script], cwd=ROOT, **more)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(subprocess, "Popen", start)
    found = list(command.run_child("machine", examination(tmp_path)))
    assert [finding.check for finding in found] == list(GROUPS["machine"])
    assert (found[0].status, found[1].status) == ("PASS", "FAIL")
    assert found[1].figure == "RuntimeError: its process ended with signal 11: the GPU is on fire"
    assert {finding.status for finding in found[2:]} == {"SKIP"}


@pytest.mark.parametrize(
    ("words", "signum", "code"),
    [
        ((sys.executable, "-m", "worker", "doctor"), signal.SIGINT, 130),
        ((str(Path(sys.executable).with_name("longhaul")), "doctor"), signal.SIGTERM, 143),
    ],
)
def test_when_it_is_stopped_nothing_is_left(
    tmp_path: Path, signum: signal.Signals, code: int, words: tuple[str, ...]
) -> None:
    command = [*words, "--only", "machine"]
    variables = os.environ | {"LONGHAUL_DEVICE": "cpu", "LONGHAUL_RUNS": str(tmp_path)}
    with subprocess.Popen(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().startswith(b"SKIP  driver")
        assert list((tmp_path / ".doctor").iterdir())
        process.send_signal(signum)
        assert process.stderr.read() == b"doctor: stopped; nothing is kept\n"
        assert process.wait() == code
    assert list((tmp_path / ".doctor").iterdir()) == []


def test_a_device_that_there_is_not_is_refused_in_a_sentence(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "worker", "doctor", "--runs", str(tmp_path)],
        cwd=ROOT, env=os.environ | {"LONGHAUL_DEVICE": "gpu"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (2, "doctor: LONGHAUL_DEVICE is 'gpu'; set it to cpu or cuda\n")


def test_a_signal_before_the_trainers_process_is_ready_leaves_no_traceback() -> None:
    program = (
        "import os, signal, worker.main\n"
        "worker.main.run_child = lambda *_: os.kill(os.getpid(), signal.SIGINT)\n"
        "raise SystemExit(worker.main.examine([], {'LONGHAUL_DEVICE': 'cpu'}))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "doctor: stopped; nothing is kept\n")


def test_ctrl_c_while_modules_are_imported_leaves_no_traceback() -> None:
    program = (
        "import runpy, sys\n"
        "class CtrlC:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'jobs.heartbeat':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, CtrlC())\n"
        "sys.argv[1:] = ['doctor']\n"
        "runpy.run_module('worker', run_name='__main__', alter_sys=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_wrong_setting_is_refused_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert in_process(["--runs", str(tmp_path)], LONGHAUL_PREPARE_MEMORY_GB="much") == 2
    assert capsys.readouterr().err == (
        "doctor: a setting is wrong: LONGHAUL_PREPARE_MEMORY_GB is 'much'; it is a number of gigabytes, 1 or more\n"
    )


def test_what_others_would_slow_down_is_not_measured(tmp_path: Path) -> None:
    memory = judge("free_memory", "others hold 5.0 GiB", warn=True, other_bytes=5 * GIB)
    beside = command.informed(examination(tmp_path), [memory])
    for group in ("speed", "training", "warm"):
        found = list(command.run_child(group, beside))
        assert [finding.check for finding in found] == list(GROUPS[group])
        assert {(finding.status, finding.figure) for finding in found} == {
            ("SKIP", f"other processes hold 5.0 GiB of the GPU: {command.END_THEM}")
        }


def test_warm_comes_with_what_it_compares_with() -> None:
    assert command.chosen(["warm"], "cpu") == ["training", "warm"]
    assert command.chosen(["speed", "machine"], "cpu") == ["machine", "speed"]
    assert command.chosen(None, "cpu") == list(GROUPS)


def test_no_speed_is_measured_before_it_is_known_who_else_holds_the_gpu() -> None:
    assert command.chosen(["speed"], "cuda") == ["memory", "speed"]
    assert command.chosen(["warm"], "cuda") == ["memory", "training", "warm"]
    assert command.chosen(["machine", "exactness", "resume"], "cuda") == ["machine", "exactness", "resume"]


@pytest.mark.parametrize("file", ["CHANGELOG.md", "Makefile", "docs/docker.md", "longhaul/commands/machine.py"])
def test_each_command_for_the_container_builds_its_image(file: str) -> None:
    assert "run --rm --build worker doctor" in (ROOT / file).read_text()


def test_when_time_is_up_the_rest_is_skipped(tmp_path: Path) -> None:
    found = list(command.run_child("machine", examination(tmp_path, seconds=0)))
    assert {(finding.status, finding.figure) for finding in found} == {("SKIP", "no time was left")}


def test_a_check_that_raises_fails_and_the_others_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def checks(_: Examination) -> Mapping[str, Check]:
        made: dict[str, Check] = {name: lambda name=name: judge(name, "fine") for name in GROUPS["machine"]}  # type: ignore[misc]
        return made | {"disk": broken}

    def broken() -> Finding:
        raise ZeroDivisionError("there is no disk")

    monkeypatch.setattr(machine, "checks", checks)
    found: list[Finding] = []
    run_group("machine", examination(tmp_path), found.append)
    status = {finding.check: finding.status for finding in found}
    assert status["disk"] == "FAIL" and status["clock"] == "PASS" and status["driver"] == "SKIP"
    [disk] = [finding for finding in found if finding.check == "disk"]
    assert disk.line.startswith("FAIL  disk: ZeroDivisionError: there is no disk")


def test_what_was_measured_is_kept_for_this_gpu_and_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    findings = [
        judge("gemm", "fast", flops=2e14),
        judge("update", "fast", seconds=0.2),
        judge("load", "fine", parameters=8, activation_checkpointing=0, compiled=1).model_copy(update={"model": "xl"}),
        judge("mfu", "fine", flops=9e13, step_flops=4e14),
        judge("throughput", "fast").model_copy(update={"values": {"128/256": 30.0, "256/256": 24.0}}),
    ]
    gpu = GpuFacts("NVIDIA GeForce RTX 5090", 2**35)
    monkeypatch.setattr(command, "examine", lambda *_: make_report(findings, gpu, 0.0))
    settings = from_environment({"LONGHAUL_DEVICE": "cuda"})
    words = ["--runs", str(tmp_path), "--driver", "580.95"]
    assert command.main(words, settings, {"CUDA_VISIBLE_DEVICES": GPU}) == 0
    measured = read_measured(tmp_path, GPU, "580.95")
    rate = TrainingRate(parameters=8, compiled=True, step_flops=4e14, flops_per_s=9e13)
    assert measured is not None and (measured.gemm_flops, measured.update_s, measured.model) == (2e14, 0.2, "xl")
    assert measured.rows_per_s == {"128/256": 30.0, "256/256": 24.0} and measured.training == [rate]
    of_a_job = rate.model_copy(update={"parameters": 9})
    keep_measured(tmp_path, GPU, measured.with_training(of_a_job))

    findings[3] = judge("mfu", "slow", fail=True, mfu=0.2, flops=4e13, step_flops=4e14)
    assert command.main(words, settings, {"CUDA_VISIBLE_DEVICES": GPU}) == 1
    slow = read_measured(tmp_path, GPU, "580.95")
    assert slow is not None and [each.flops_per_s for each in slow.training] == [9e13, 4e13], "it is as slow as it is"
    rate = slow.training[1]

    findings[3] = judge("mfu", "impossible", fail=True, mfu=4.5, flops=9e14, step_flops=4e14)
    findings[0] = judge("gemm", "impossible", fail=True, flops=2e15)
    assert command.main(words, settings, {"CUDA_VISIBLE_DEVICES": GPU}) == 1
    doubted = read_measured(tmp_path, GPU, "580.95")
    assert doubted is not None and doubted.gemm_flops == 2e14, "what was measured before stays"
    assert doubted.training == [of_a_job, rate], "so does what a job has measured"
    findings[2] = findings[2].model_copy(update={"model": "base"})
    assert command.main(words, settings, {"CUDA_VISIBLE_DEVICES": GPU}) == 1
    other = read_measured(tmp_path, GPU, "580.95")
    assert other is not None and (other.model, other.rows_per_s, other.update_s) == ("base", {}, 0.2)
    findings[:2] = [judge("gemm", "fast", flops=1.9e14)]
    findings[1] = findings[1].model_copy(update={"model": "large"})
    assert command.main(words, settings, {"CUDA_VISIBLE_DEVICES": GPU}) == 1
    doubted = read_measured(tmp_path, GPU, "580.95")
    assert doubted is not None and (doubted.gemm_flops, doubted.model) == (1.9e14, "base"), "large made no steps"

    (tmp_path / ".gpus").rename(tmp_path / "kept")
    (tmp_path / ".gpus").write_text("no folder")
    assert command.main(words, settings, {"CUDA_VISIBLE_DEVICES": GPU}) == 1
    assert capsys.readouterr().err.endswith("doctor: what was measured is not kept: File exists\n")
    (tmp_path / ".gpus").unlink()
    (tmp_path / "kept").rename(tmp_path / ".gpus")
    findings[:] = [skip("gemm", "no time was left")]
    assert command.main(words, settings, {"CUDA_VISIBLE_DEVICES": GPU}) == 0
    assert read_measured(tmp_path, GPU, "580.95") == doubted


def test_a_page_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = from_environment({"LONGHAUL_DEVICE": "cpu"})
    for report in (tmp_path / "missing" / "page.md", tmp_path):
        assert command.main(["--runs", str(tmp_path), "--report", str(report)], settings, {}) == 2
        assert "cannot be written" in capsys.readouterr().err


def test_a_check_that_hangs_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = subprocess.Popen
    monkeypatch.setattr(command, "GRACE_S", 0.0)
    monkeypatch.setattr(
        subprocess, "Popen", lambda words, **more: real([words[0], "-c", "import time; time.sleep(600)"], **more)
    )
    first, *others = command.run_child("machine", examination(tmp_path, seconds=1))
    assert first.status == "FAIL" and "did not end" in first.figure and "--seconds 1200" in (first.hint or "")
    assert {finding.status for finding in others} == {"SKIP"}


def test_every_hint_that_names_a_check_names_it_as_it_is_printed() -> None:
    checks = {check for group in GROUPS.values() for check in group}
    source = "".join(file.read_text() for file in (ROOT / "worker/training/doctor").glob("*.py"))
    named = [name for hint in re.findall(r"\bsee ([\w ,]+)", source) for name in re.split(r", | and ", hint)]
    assert len(named) >= 8 and set(named) - {"docs"} <= checks
    assert judge("memory_bandwidth", "slow").line == "PASS  memory_bandwidth: slow"


def test_mfu_is_not_of_a_peak_that_failed(tmp_path: Path) -> None:
    for status, flops in (("PASS", 2e14), ("WARN", 2e14), ("FAIL", None)):
        gemm = judge("gemm", "", fail=status == "FAIL", warn=status == "WARN", flops=2e14)
        assert command.informed(examination(tmp_path), [gemm]).gemm_flops == flops


def test_it_ends_with_rows_a_second_and_days() -> None:
    findings = [
        judge("load", "fine").model_copy(update={"model": "xl"}),
        judge("throughput", "fast").model_copy(update={"values": {"128/256": 30.0}}),
    ]
    report = make_report(findings, GpuFacts("NVIDIA GeForce RTX 5090", 2**35), 250.0)
    assert report.summary == [
        "2 PASS in 4 min 10 s",
        "FLAN-T5-XL at 128/256 tokens: 30.0 rows/s, so 5 epochs of 6 M rows take 11 d 14 h",
    ]
    for doubtful in (judge("mfu", "", fail=True, mfu=4.5), judge("graphs", "", fail=True)):
        doubted = make_report([*findings, doubtful], GpuFacts("NVIDIA GeForce RTX 5090", 2**35), 250.0)
        assert doubted.summary == ["1 FAIL, 2 PASS in 4 min 10 s"]
    assert json.loads(report.to_json())["days"] == {"128/256": pytest.approx(11.574, abs=1e-3)}


@pytest.mark.parametrize("group", GROUPS)
def test_each_group_is_a_module_with_its_checks(group: str) -> None:
    assert callable(importlib.import_module(f"worker.training.doctor.{group}").checks)
