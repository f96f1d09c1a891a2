"""The trainer process: `python -m worker.training check|prepare|train RUN_DIR [--attempt N]`; `… generate`, `… doctor`,
`… export RUN_DIR FORMAT [--dtype TYPE]`, `… push RUN_DIR ORG/NAME --license LICENSE`.

It reads a run directory and writes to it: no Redis, no HTTP, no W&B. What it has to say goes, line by line, into its
attempt file, the last line being the reason why it ended. Exit codes (`jobs/reasons.py`) are a fallback for that line;
any other is a crash, with a traceback on stderr and no last line.

torch is imported by the stages only, after everything that it reads at import has been set here. What a training
attempt does is described in `train.py`.
"""

from __future__ import annotations

import argparse
import errno
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import get_args

from jobs.disk.rundir import RunDir
from jobs.errors import DiskFull, LonghaulError, Rejected, StageError
from jobs.export import DType, ExportFormat, PushRequest
from jobs.process.lifeline import PARENT_PID, tie_to_parent
from jobs.process.secrets import HUB
from jobs.reasons import Reason
from jobs.text.units import format_bytes
from worker.training.journal import Journal, StopSignal, end_if_over, unfenced
from worker.training.machine.host import CHECK_S, limit_memory, limit_process
from worker.training.settings import TrainerSettings, from_environment

log = logging.getLogger("longhaul.trainer")
OOM_SCORE = Path("/proc/self/oom_score_adj")
MOST_OOM_SCORE = 1000
OOM_SCORE_ADDED = 100
"""Thousandths of the memory of the container (without a limit: of the host)."""


def main(argv: list[str]) -> int:
    """Run one stage; returns the exit code."""
    if PARENT_PID in os.environ:
        tie_to_parent(int(os.environ[PARENT_PID]))
        prefer_for_oom_kill(OOM_SCORE)
    if argv[:1] == ["doctor"]:
        return doctor(argv[1:])
    if argv[:1] == ["generate"]:
        return generate(argv[1:])
    if argv[:1] == ["warm"]:
        return warm(argv[1:])
    if argv[:1] == ["export"]:
        return export(argv[1:])
    if argv[:1] == ["push"]:
        return push(argv[1:])
    arguments = parse(argv)
    training = arguments.stage in ("train", "follow")
    set_library_switches("train" if training else arguments.stage)
    configure_log(logging.INFO, f"rank {arguments.rank}: " if arguments.stage == "follow" else "")
    run = RunDir(arguments.run_dir.resolve())
    settings = from_environment(os.environ, run.path.parent)
    attempt_file = run.attempt_file(attempt_name(arguments))
    if arguments.stage == "train" and PARENT_PID not in os.environ and attempt_file.exists() and run.held():
        # Started by hand: that file belongs to the trainer that holds the job; nothing is added to it.
        log.error("device_busy (job_busy): another trainer is at work on job %s, with %s", run.id, attempt_file.name)
        return Reason.DEVICE_BUSY.exit_code
    # One that a person starts has a number that the events may know otherwise; nobody takes its job over.
    fenced = training and PARENT_PID in os.environ
    journal = Journal(attempt_file, fence=partial(end_if_over, run, arguments.attempt) if fenced else unfenced)
    limit = 0 if training else limit_memory(settings.prepare_memory)
    try:
        match arguments.stage:
            case "check":
                return check(run, settings, journal)
            case "prepare":
                return prepare(run, settings, journal)
            case "follow":
                return follow(run, settings, journal, arguments.rank)
            case _:
                return train(run, settings, journal, arguments.attempt)
    except StageError as error:
        return fail(journal, error)
    except MemoryError:
        if not limit:
            raise
        return fail(journal, too_much_memory(arguments.stage, limit))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        return fail(journal, DiskFull(f"no room is left on the disk: {error}"))


def attempt_name(arguments: argparse.Namespace) -> int | str:
    """Of the attempt file."""
    match arguments.stage:
        case "train":
            return int(arguments.attempt)
        case "follow":
            return f"{arguments.attempt}-rank-{arguments.rank}"
        case stage:
            return str(stage)


def fail(journal: Journal, error: StageError) -> int:
    """Say why; returns the exit code, which is all that is left when even that cannot be written."""
    log.error("%s (%s): %s", error.reason, error.detail_code, error)
    try:
        journal.fail(error)
    except OSError as unwritten:
        log.error("the reason could not be written down: %s", unwritten)
    return error.reason.exit_code


def too_much_memory(stage: str, limit: int) -> Rejected:
    """A file of rows or a model has taken *check* or *prepare* to its limit, which a trainer beside it is safe from."""
    return Rejected(
        f"{stage} needs more memory than the {format_bytes(limit)} that it may have",
        code="memory_limit",
        hint="a value, a column or a file of the model is probably far too large; if they are as they should be, "
        "set LONGHAUL_PREPARE_MEMORY_GB higher, or free memory of the host",
    )


def prefer_for_oom_kill(score: Path) -> None:
    """When memory runs out, have the kernel end this process and not its supervisor, which can tell why and continue.

    It picks by size, with so much added to ours: wherever training has room at all, more than supervisor and worker
    weigh (60 MB each), also while we are still small; and too little to draw its eye from a program that is eating up
    the host. A higher score is left as it is: lowering it takes a privilege.
    """
    if int(score.read_text()) < OOM_SCORE_ADDED:
        score.write_text(str(OOM_SCORE_ADDED))


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m worker.training", description="One stage of one job.")
    parser.add_argument("stage", choices=("check", "prepare", "train", "follow"))
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--attempt", type=int, default=1, help="number of the attempt (train only)")
    parser.add_argument("--rank", type=int, default=0, help="of a process that another trainer starts (follow only)")
    return parser.parse_args(argv)


def configure_log(level: int, who: str = "") -> None:
    """Lines on stderr from this level on; of libraries, what a reader of the log can do something about. `who`: before
    each message."""
    logging.basicConfig(stream=sys.stderr, level=level, format=f"%(asctime)s %(levelname)s {who}%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line a request
    logging.getLogger("torchao").setLevel(logging.ERROR)  # that its CUDA extensions are not loaded
    # That torchao registers enums in a way that torch deprecates. A filter: torch sets levels when it is imported.
    logging.getLogger("torch.utils._pytree").addFilter(lambda record: record.levelno > logging.WARNING)


def set_library_switches(stage: str) -> None:
    """Set what libraries read from the environment when they are imported. What is already set stands."""
    # Pinned copies of checkpoints take what they hold: torch rounds all that it caches up to a power of two. (Its
    # `pinned_max_round_threshold_mb` instead would hand a freed block to a larger tensor: torch 2.13.)
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True,pinned_max_cached_size_mb:1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true" if stage == "prepare" else "false")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    # Threads that spin for long while they wait take the cores from other processes: with 7 runnable processes on 2
    # cores, steps on the CPU took 6 to 10 times as long. Threads that do not spin at all wake up for each operation:
    # steps of a small model took twice as long. So those of training spin for some 30 µs.
    if stage == "train" and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")  # none of its CUDA extensions is used
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it warns of what the guards judge, and says to repair it
    if stage == "train":
        os.environ["HF_HUB_OFFLINE"] = "1"


def warm(argv: list[str]) -> int:
    """Import what the stages import, and fork their processes when asked to."""
    parser = argparse.ArgumentParser(prog="python -m worker.training warm", description=warm.__doc__)
    parser.add_argument("socket", help="where it listens")
    socket = parser.parse_args(argv).socket
    given = dict(os.environ)
    set_library_switches("train")
    configure_log(logging.INFO)

    from worker.training.warm import serve

    serve(socket, given, main)


def doctor(argv: list[str]) -> int:
    """Examine machine and GPU; no job is needed."""
    from worker.training.doctor.command import main as examine

    set_library_switches("train")
    configure_log(logging.WARNING)
    try:
        settings = from_environment(os.environ)
    except ValueError as error:
        print(f"doctor: a setting is wrong: {error}", file=sys.stderr)
        return 2
    try:
        return examine(argv, settings, os.environ)
    except BrokenPipeError:  # `doctor | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def generate(argv: list[str]) -> int:
    """Answer requests with the model of a job, which is not changed: not a stage of it, without an attempt file."""
    parser = argparse.ArgumentParser(prog="python -m worker.training generate", description=generate.__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--checkpoint", help="name of a checkpoint, such as step-00000500 (default: the result)")
    parser.add_argument("--gpu-limit", type=int, metavar="BYTES", help="of the GPU at most")
    arguments = parser.parse_args(argv)
    lines = os.fdopen(os.dup(sys.stdout.fileno()), "w")  # what libraries print goes to the log
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    set_library_switches("train")
    configure_log(logging.INFO)
    settings = from_environment(os.environ)
    if PARENT_PID in os.environ:
        OOM_SCORE.write_text(str(MOST_OOM_SCORE))  # when memory runs out, this is what nobody misses

    import torch

    from worker.training.generation.serving import serve, threads_on, yield_to_others

    if settings.device == "cpu":
        yield_to_others(threads_on(len(os.sched_getaffinity(0))))
    run, device = RunDir(arguments.run_dir.resolve()), torch.device(settings.device)
    return serve(run, arguments.checkpoint, device, arguments.gpu_limit, lines)


def export(argv: list[str]) -> int:
    """Write a finished model in the format of another program, and verify it."""
    parser = argparse.ArgumentParser(prog="python -m worker.training export", description=export.__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("format", type=ExportFormat, choices=list(ExportFormat), metavar="FORMAT")
    parser.add_argument("--dtype", choices=get_args(DType), help="of the weights; left out: that of the model")
    arguments = parser.parse_args(argv)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the GPU is for what trains
    set_library_switches("train")

    def make(run: RunDir, journal: Journal) -> None:
        from worker.training.export.export import export as write

        write(run, journal, arguments.format, arguments.dtype)

    return on_finished(arguments.run_dir, f"export-{arguments.format}", make)


def push(argv: list[str]) -> int:
    """Upload a finished model to the hub, with a model card. HF_TOKEN in the environment gives the right to."""
    parser = argparse.ArgumentParser(prog="python -m worker.training push", description=push.__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("repository", metavar="ORG/NAME")
    parser.add_argument("--license", required=True, help="of the model, as the hub names it, such as apache-2.0")
    parser.add_argument("--public", action="store_true", help="a repository that is made is public, not private")
    parser.add_argument("--export", type=ExportFormat, choices=list(ExportFormat), metavar="FORMAT", help="this export")
    arguments = parser.parse_args(argv)
    set_library_switches("prepare")
    os.environ.setdefault(
        "HF_HUB_DISABLE_XET", "1"
    )  # LFS, which the tests try, and which skips what is there by sha256

    def upload(run: RunDir, journal: Journal) -> None:
        from worker.training.push import push as send

        asked = PushRequest(
            repository=arguments.repository,
            license=arguments.license,
            public=arguments.public,
            export=arguments.export,
        )
        send(run, journal, asked, token=next((os.environ[name] for name in HUB if os.environ.get(name)), None))

    return on_finished(arguments.run_dir, "push", upload)


def on_finished(folder: Path, name: str, work: Callable[[RunDir, Journal], object]) -> int:
    """Work on what a job has left, which says in `attempts/<name>.jsonl` how it goes and why it ended."""
    if PARENT_PID in os.environ:
        os.nice(19)
    configure_log(logging.INFO)
    run = RunDir(folder.resolve())
    file = run.attempt_file(name)
    file.unlink(missing_ok=True)
    journal = Journal(file)
    journal.phase("load")
    try:
        work(run, journal)
    except StageError as error:
        return fail(journal, error)
    except LonghaulError as error:
        return fail(journal, Rejected(str(error), code=error.code, hint=error.hint))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        return fail(journal, DiskFull(f"no room is left on the disk: {error}"))
    journal.finish(Reason.DONE)
    return 0


def check(run: RunDir, settings: TrainerSettings, journal: Journal) -> int:
    """Look at specification, paths, model config and first rows; write the provisional plan."""
    limit_process(CHECK_S)
    from worker.training.check import check as look

    journal.phase("check")
    journal.finish(Reason.DONE, result=look(run, settings, journal))
    return 0


def prepare(run: RunDir, settings: TrainerSettings, journal: Journal) -> int:
    """Validate and tokenize all rows; bring the model into the store; complete the plan."""
    from worker.training.prepare import prepare as make

    journal.phase("prepare")
    journal.finish(Reason.DONE, result=make(run, settings, journal))
    return 0


def train(run: RunDir, settings: TrainerSettings, journal: Journal, attempt: int) -> int:
    """One attempt: from the newest checkpoint until the job is done, or the trainer is asked to stop."""
    stop = StopSignal()  # before the imports, which take seconds
    journal.phase("load")

    from worker.training.train import train as attempt_training

    gc.freeze()  # what the imports made stays: clearing the cache need not walk through it (0.15 s each time)
    return attempt_training(run, settings, journal, stop, attempt)


def follow(run: RunDir, settings: TrainerSettings, journal: Journal, rank: int) -> int:
    """One of the other ranks of an attempt on several GPUs."""
    stop = StopSignal()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, which rank 0 hears, too
    journal.phase("load")

    from worker.training.follow import follow as follow_rank_0

    gc.freeze()
    return follow_rank_0(run, settings, journal, stop, rank)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
