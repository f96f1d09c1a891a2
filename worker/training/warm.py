"""A process that has imported what the stages import, and forks a trainer when asked to: `… warm SOCKET`.

Each attempt is a process of its own still: its memory, its CUDA context and its seeds are. Only the imports, which take
longer than a small job, are shared. Nothing is computed here, so no thread and no CUDA context is there to be forked.
Where a thread is, the child begins anew.

Whoever wants a trainer connects to the socket and sends one datagram: a JSON object, `arguments` and `environment`,
with the log of the child as a descriptor, and perhaps its stdin and its stderr. The answers are its pid, with a
descriptor of it, and at its end its exit code. A child is killed when whoever asked closes the connection.
`worker/warm.py` is the other side.
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
from jobs.process.secrets import HUB

MOST_BYTES = 1 << 20
MODULES = (
    "worker.training.check",
    "worker.training.prepare",
    "worker.training.train",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "sacrebleu",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.roberta.modeling_roberta",
    "transformers.models.t5.modeling_t5",
    "worker.training.adapters.lora",
    "worker.training.dataset.data",
    "worker.training.generation.serving",
    "worker.training.optimizers.adamw",
    "worker.training.planning.memory_plan",
    *(f"worker.training.tasks.{task}.batches" for task in ("causal", "classification", "seq2seq")),
    *(f"worker.training.tasks.{task}.fused" for task in ("causal", "classification", "seq2seq")),
)
"""What the stages import, and what they would import once they have seen their job."""
READ_LATER = ("CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE", "WANDB_MODE", *HUB)
"""Variables that a child may have otherwise than this process: libraries read them when they are used, or `become`
tells them. (CUDA is not used in here, and what trains on a GPU is not forked. What reads W&B's is not imported.)"""


@dataclass
class Asker:
    """Whoever has connected."""

    connection: socket.socket
    pid: int | None = None
    """Of the child that was forked for it."""
    child: int | None = None
    """A descriptor of the child, readable once that has ended."""


def serve(path: str, environment: Mapping[str, str], main: Callable[[list[str]], int]) -> NoReturn:
    """Fork children until this process is ended. A child ends with the exit code of `main`.

    `environment`: that this process was started with.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # of one before this
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen()
    imported = read_at_import(environment)
    import_all()
    gc.collect()
    gc.freeze()
    selector = selectors.PollSelector()  # epoll would be shared with the children
    selector.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            asker: Asker | None = key.data
            if asker is None:
                connection, _ = listener.accept()
                selector.register(connection, selectors.EVENT_READ, Asker(connection))
            elif key.fd == asker.child:
                end_of_child(selector, asker)
            elif asker.connection.fileno() == -1:  # it was told the end of its child a moment ago
                continue
            elif asker.pid is None:
                answer(selector, asker, imported, main)
            else:  # whoever asked says nothing: it is gone
                forget(selector, asker)
                assert asker.child is not None
                signal.pidfd_send_signal(asker.child, signal.SIGKILL)


def answer(
    selector: selectors.BaseSelector, asker: Asker, imported: Mapping[str, str], main: Callable[[list[str]], int]
) -> None:
    """Fork what is asked for; nothing, if libraries would have to be imported under another environment."""
    message, (*files,), _, _ = socket.recv_fds(asker.connection, MOST_BYTES, 3)
    asked = json.loads(message) if message and files else None
    if asked is None or read_at_import(asked["environment"]) != imported:
        for file in files:
            os.close(file)
        tell(asker)
        forget(selector, asker)
        return
    parent = os.getpid()
    asker.pid = os.fork()
    if asker.pid == 0:
        leave(selector)
        end(become(asked["arguments"], asked["environment"] | {PARENT_PID: str(parent)}, files[0], main, *files[1:]))
    for file in files:
        os.close(file)
    asker.child = os.pidfd_open(asker.pid)
    selector.register(asker.child, selectors.EVENT_READ, asker)
    tell(asker, [asker.child], pid=asker.pid)


def end_of_child(selector: selectors.BaseSelector, asker: Asker) -> None:
    """Say its exit code, if anybody still waits for it."""
    assert asker.pid is not None and asker.child is not None
    selector.unregister(asker.child)
    tell(asker, code=os.waitstatus_to_exitcode(os.waitpid(asker.pid, 0)[1]))
    os.close(asker.child)
    if asker.connection.fileno() != -1:
        forget(selector, asker)


def forget(selector: selectors.BaseSelector, asker: Asker) -> None:
    """Close the connection."""
    selector.unregister(asker.connection)
    asker.connection.close()


def read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    """What libraries may read when they are imported; our own settings are read by each trainer."""
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith("LONGHAUL_") and name not in READ_LATER
    }


def import_all() -> None:
    """Everything, without starting a thread: numpy and scipy would, for linear algebra, which is done elsewhere."""
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    for module in MODULES:
        importlib.import_module(module)
    # What transformers makes when a process loads its first model, for every architecture that it knows.
    importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("t5")


def tell(asker: Asker, descriptors: Sequence[int] = (), **what: int) -> None:
    """Whoever asked, unless they are gone."""
    with contextlib.suppress(OSError):
        socket.send_fds(asker.connection, [json.dumps(what).encode()], descriptors)


def leave(selector: selectors.BaseSelector) -> None:
    """In the child: what the parent listens to is not its own."""
    for key in list(selector.get_map().values()):
        selector.unregister(key.fileobj)
        key.fileobj.close() if isinstance(key.fileobj, socket.socket) else os.close(key.fd)
    selector.close()


def become(
    arguments: list[str],
    environment: Mapping[str, str],
    log: int,
    main: Callable[[list[str]], int],
    stdin: int | None = None,
    stderr: int | None = None,
) -> int:
    """In the child: run the stage as a process that was started for it does."""
    os.setpgid(0, 0)
    files = (os.open(os.devnull, os.O_RDONLY) if stdin is None else stdin, log, log if stderr is None else stderr)
    for standard, mine in enumerate(files):
        os.dup2(mine, standard)
    for mine in set(files):
        os.close(mine)
    os.environ.clear()
    os.environ.update(environment)
    if len(os.listdir("/proc/self/task")) > 1:
        os.execv(sys.executable, [sys.executable, "-m", "worker.training", *arguments])
    from huggingface_hub import constants

    offline = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE")
    constants.HF_HUB_OFFLINE = constants._is_true(offline)
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
