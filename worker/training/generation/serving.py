"""The process that has a finished model: requests on stdin, answers on stdout, a line of JSON each, one at a time.

A request is `{"id": …, "body": GenerateBody}`; while it is answered `{"cancel": true}` ends that. The parts of an
answer have its `id` and a `type`: `loading` and `loaded`, `text` (a piece as it is written), `output` (one whole), and
at the end `done`, `error` or `cancelled`.

On a CPU it takes only time that nobody else wants. On a GPU it holds the GPU's lock, and has a memory limit of its own.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import random
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, TextIO

import torch
from pydantic import ValidationError

from jobs.dataset_report import DatasetReport
from jobs.disk.rundir import RunDir
from jobs.errors import DeviceBusy, Rejected, StageError
from jobs.generation import GenerateBody, Generated, ModelName
from jobs.plan import Plan
from jobs.spec import JobSpec
from worker.training.dataset.assembly import REPORT
from worker.training.generation.writing import Answering, Cancelled, Inputs
from worker.training.machine.device import gpu_id
from worker.training.machine.locks import gpu_lock, try_lock
from worker.training.machine.numerics import prepare_device
from worker.training.machine.out_of_memory import KINDS, is_out_of_memory, message_of
from worker.training.memory.hard_limit import on_gpu
from worker.training.network import guards
from worker.training.tasks.registry import task_of
from worker.training.trained import load_base, load_trained

TEXT_EVERY_S = 0.05
"""Pieces of text that come sooner are sent together."""
log = logging.getLogger("longhaul.trainer")


def serve(run: RunDir, checkpoint: str | None, device: torch.device, limit: int | None, lines: TextIO) -> int:
    """Answer requests until stdin ends. `limit`: bytes of the GPU at most."""
    guards.check_device(device)
    prepare_device(device)
    channel = Channel(lines)
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(_held_gpu(run, device))
        except DeviceBusy as error:
            channel.fail(error)
            return error.reason.exit_code
        held.enter_context(on_gpu(device, limit))
        models = Models(run, checkpoint, device, channel)
        for body in channel.requests():
            answer(models, body, channel)
    return 0


def _held_gpu(run: RunDir, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """The lock of the GPU, which a trainer waits for. Raises DeviceBusy where one has it."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    lock = try_lock(gpu_lock(run.path.parent / ".locks", gpu_id(device)))
    if lock is None:
        raise DeviceBusy("a trainer has the GPU", hint="ask again: the model then runs on the CPU")
    return lock


class Channel:
    """The lines between this process and the worker."""

    def __init__(self, lines: TextIO) -> None:
        self._lines = lines
        self._asked: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._id: str | None = None
        self._cancel = threading.Event()
        threading.Thread(target=self._read, name="requests", daemon=True).start()

    def requests(self) -> Iterator[GenerateBody]:
        """Each, until stdin ends."""
        while (asked := self._asked.get()) is not None:
            self._cancel.clear()
            self._id = asked["id"]
            yield GenerateBody.model_validate(asked["body"])

    def cancelled(self) -> bool:
        """Whether nobody waits for the present answer any more."""
        return self._cancel.is_set()

    def send(self, type: str, **data: object) -> None:
        """A part of the answer, with the id of its request; None: it is said before there was one."""
        self._lines.write(json.dumps({"id": self._id, "type": type, "data": data}) + "\n")
        self._lines.flush()

    def fail(self, error: StageError) -> None:
        """The answer is this error."""
        self.send("error", code=error.detail_code, message=str(error), hint=error.hint)

    def _read(self) -> None:
        for line in sys.stdin:
            message = json.loads(line)
            if "body" in message:
                self._asked.put(message)
            else:
                self._cancel.set()
        self._cancel.set()
        self._asked.put(None)


class Models:
    """The models of one job, each loaded when it is asked for, once."""

    def __init__(self, run: RunDir, checkpoint: str | None, device: torch.device, channel: Channel) -> None:
        self._run, self._checkpoint, self.device, self._channel = run, checkpoint, device, channel
        self._spec: JobSpec = run.spec()
        self._plan: Plan = run.plan()
        self._task = task_of(self._spec, self._plan.task, self._plan.data)
        self._loaded: dict[ModelName, Answering] = {}
        self._inputs: Inputs | None = None

    def get(self, name: ModelName) -> Answering:
        """Raises Rejected, NotPrepared."""
        if name not in self._loaded:
            self._channel.send("loading", model=name, device=self.device.type)
            loaded = (
                load_base(self._run, self._task, self.device)
                if name == "base"
                else load_trained(self._run, self._task, self._checkpoint, self.device)
            )
            log.info("%s model of job %s loaded in %.1f s", name, self._run.id, loaded.seconds)
            several, new_tokens = self._spec.task.multi_label, learned_new_tokens(self._run)
            self._loaded[name] = Answering(loaded, name, several=several, new_tokens=new_tokens)
            self._channel.send("loaded", model=name, seconds=loaded.seconds)
        return self._loaded[name]

    def inputs(self) -> Inputs:
        """Of the job. Raises Rejected."""
        if self._inputs is None:
            self._inputs = Inputs(self._spec, self._plan, self._task, self.get("trained").loaded.folder)
        return self._inputs


def learned_new_tokens(run: RunDir) -> int | None:
    """Tokens that 99 % of the targets of its data do not exceed; None: the job has no whole report of its data."""
    try:
        report = DatasetReport.model_validate_json((run.path / REPORT).read_bytes())
    except (FileNotFoundError, ValidationError):
        return None
    return report.lengths.target.after.p99


def answer(models: Models, body: GenerateBody, channel: Channel) -> None:
    """All parts of one answer."""
    try:
        _answer(models, body, channel)
    except Cancelled:
        channel.send("cancelled")
    except StageError as error:
        channel.fail(error)
    except KINDS as error:
        if not is_out_of_memory(error):
            raise
        if models.device.type == "cuda":
            torch.cuda.empty_cache()
        channel.fail(
            Rejected(
                f"memory ran out: {message_of(error)}",
                code="out_of_memory",
                hint="shorten the input or lower max_new_tokens, or leave the base model out",
            )
        )


def _answer(models: Models, body: GenerateBody, channel: Channel) -> None:
    began = time.perf_counter()
    answering = [models.get(name) for name in body.models]
    prompts = models.inputs().of(body)
    loading_s = time.perf_counter() - began
    seed = None
    if body.temperature and not answering[0].loaded.task.has_labels:
        seed = random.SystemRandom().randrange(2**32) if body.seed is None else body.seed
    tokens, began = 0, time.perf_counter()
    for index, prompt in enumerate(prompts):
        for name, model in zip(body.models, answering, strict=True):
            if channel.cancelled():
                raise Cancelled
            if seed is not None:
                torch.manual_seed(seed)  # each as if it were alone
            with TextSender(channel, name, index) as sender:
                output = model.answer(index, prompt, body, sender.add, channel.cancelled)
            tokens += output.tokens
            channel.send("output", **output.model_dump())
    seconds = time.perf_counter() - began
    done = Generated(
        device="cuda" if models.device.type == "cuda" else "cpu",
        seconds=seconds,
        loading_s=loading_s,
        tokens_per_s=tokens / seconds if tokens else None,
        seed=seed,
    )
    channel.send("done", **done.model_dump())


class TextSender:
    """Sends pieces of one text, those that come soon after another together."""

    def __init__(self, channel: Channel, model: ModelName, index: int) -> None:
        self._channel, self._about = channel, {"model": model, "index": index}
        self._text, self._sent = "", 0.0

    def add(self, text: str) -> None:
        """More of it."""
        self._text += text
        if time.monotonic() - self._sent >= TEXT_EVERY_S:
            self._flush()

    def __enter__(self) -> TextSender:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._flush()

    def _flush(self) -> None:
        if self._text:
            self._channel.send("text", **self._about, text=self._text)
            self._text, self._sent = "", time.monotonic()


def yield_to_others(threads: int) -> None:
    """Take only time of the CPU that nobody else wants, on so many threads. Before torch is used.

    The kernel puts it behind everything else of its control group and, where it groups processes by session, of its
    session alone: workers start their processes in groups of their own, not in sessions of their own.
    """
    os.nice(19)
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except OSError as error:  # a sandbox without it
        log.warning("SCHED_IDLE is not available here, nice 19 is: %s", error)
    torch.set_num_threads(threads)


def threads_on(cpus: int) -> int:
    """Threads of generation on the CPU, beside what trains: a quarter of the cores."""
    return max(1, cpus // 4)
