"""A process that has imported what a stage imports, and forks a trainer when asked to: `… warm STAGE`.

Each attempt is a process of its own still: its memory, its CUDA context and its seeds are. Only the imports, which take
longer than a small job, are shared. Nothing is computed here, so no thread and no CUDA context is there to be forked.
Where one is, the child begins anew.

stdin is a socket of datagrams. Each is a JSON object, `arguments` and `environment`, with two descriptors: the log of
the child, and a socket that is told its pid and, at its end, its exit code. A child is killed when whoever asked closes
that socket. `worker/warm.py` is the other side.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from jobs.process.lifeline import PARENT_PID

MOST_BYTES = 1 << 20
MODEL = (
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.roberta.modeling_roberta",
    "transformers.models.t5.modeling_t5",
    "worker.training.adapters.registry",
    "worker.training.dataset.manifest",
    "worker.training.planning.memory_plan",
    *(f"worker.training.tasks.{task}.batches" for task in ("causal", "classification", "seq2seq")),
    *(f"worker.training.tasks.{task}.fused" for task in ("causal", "classification", "seq2seq")),
)
MODULES = {
    "check": ("worker.training.check", *MODEL),
    "prepare": ("worker.training.prepare", *MODEL),
    "train": (
        "worker.training.train",
        "worker.training.optimizers.adamw",
        "sacrebleu",
        "rouge_score.rouge_scorer",
        *MODEL,
    ),
}
"""What the stage imports, and what it would import once it has seen its job."""


@dataclass(frozen=True)
class Child:
    """A forked trainer."""

    pid: int
    process: int
    """A descriptor, readable once it has ended."""
    asker: socket.socket
    """Of whoever waits for it."""


def serve(stage: str, main: Callable[[list[str]], int]) -> int:
    """Fork children until stdin ends. Returns the exit code. A child ends with that of `main`."""
    import_all(stage)
    gc.collect()
    gc.freeze()
    control, selector = (
        socket.socket(fileno=os.dup(0)),
        selectors.PollSelector(),
    )  # epoll would be shared with the children
    selector.register(control, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            child: Child | None = key.data
            if child is None:
                message, files, _, _ = socket.recv_fds(control, MOST_BYTES, 2)
                if not message:
                    return 0
                asked, parent = json.loads(message), os.getpid()
                pid = os.fork()
                if pid == 0:
                    leave(selector)
                    os.close(files[1])
                    environment = asked["environment"] | {PARENT_PID: str(parent)}
                    end(become(asked["arguments"], environment, files[0], main))
                os.close(files[0])
                child = Child(pid, os.pidfd_open(pid), socket.socket(fileno=files[1]))
                tell(child, [child.process], pid=pid)
                selector.register(child.process, selectors.EVENT_READ, child)
                selector.register(child.asker, selectors.EVENT_READ, child)
            elif key.fd == child.process:
                selector.unregister(child.process)
                tell(child, code=os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1]))
                os.close(child.process)
                if child.asker.fileno() != -1:
                    selector.unregister(child.asker)
                    child.asker.close()
            elif child.asker.fileno() != -1:  # whoever asked says nothing: it is gone
                selector.unregister(child.asker)
                child.asker.close()
                signal.pidfd_send_signal(child.process, signal.SIGKILL)


def import_all(stage: str) -> None:
    """Everything, without starting a thread: numpy and scipy would, for linear algebra, which is done elsewhere."""
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    for module in MODULES[stage]:
        importlib.import_module(module)


def tell(child: Child, descriptors: Sequence[int] = (), **what: int) -> None:
    """Whoever asked, unless they are gone."""
    with contextlib.suppress(OSError):
        socket.send_fds(child.asker, [json.dumps(what).encode()], descriptors)


def leave(selector: selectors.BaseSelector) -> None:
    """In the child: what the parent listens to is not its own."""
    for key in list(selector.get_map().values()):
        selector.unregister(key.fileobj)
        key.fileobj.close() if isinstance(key.fileobj, socket.socket) else os.close(key.fd)
    selector.close()


def become(arguments: list[str], environment: Mapping[str, str], log: int, main: Callable[[list[str]], int]) -> int:
    """In the child: run the stage as a process that was started for it does."""
    os.setpgid(0, 0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for mine, standard in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(mine, standard)
    os.close(nothing)
    os.close(log)
    os.environ.clear()
    os.environ.update(environment)
    if len(os.listdir("/proc/self/task")) > 1 or (arguments[0] == "train" and forked_cuda()):
        os.execv(sys.executable, [sys.executable, "-m", "worker.training", *arguments])
    return main(arguments)


def end(code: int) -> NoReturn:
    """End this child as an interpreter ends, but for freeing what was imported.

    That would copy each page of it that is still shared with the parent, and take a third of a second.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def forked_cuda() -> bool:
    """Whether CUDA was used before the fork: it cannot be used any more."""
    import torch

    return torch.cuda._is_in_bad_fork()
