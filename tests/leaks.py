"""A test leaves its process as it found it: who changes what its neighbours see, fails and says what."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

TRAINERS = ("/tests/training/", "/tests/gpu/", "/tests/simulated_gpu/", "/tests/worker/engines/test_node.py")
"""Where tests call the `main` of a trainer, or parts of it, which set up a process of their own: that is put back."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2)
NOT_OURS = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}
"""Variables that pytest sets, and torch at its first use of a compiler."""


@dataclass(frozen=True)
class Shared:
    """Something that all tests of a process see."""

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], object]


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in NOT_OURS}


def _put_environment(wanted: dict[str, str]) -> None:
    for name in _environment().keys() - wanted.keys():
        del os.environ[name]
    os.environ.update(wanted)


def _umask() -> int:
    """Not by os.umask, which can only be read by changing it: other threads make files meanwhile."""
    return int(Path("/proc/self/status").read_text().split("Umask:\t", 1)[1][:4], 8)


def _log_handlers() -> list[logging.Handler]:
    """Of the root logger, but those of pytest, which come and go."""
    return [each for each in logging.getLogger().handlers if not type(each).__module__.startswith("_pytest")]


def _put_log_handlers(wanted: list[logging.Handler]) -> None:
    root = logging.getLogger()
    root.handlers[:] = [each for each in root.handlers if each not in _log_handlers()] + wanted


OF_THE_PROCESS = (
    Shared("os.environ", _environment, _put_environment),
    Shared("the working directory", os.getcwd, os.chdir),
    Shared("the umask", _umask, os.umask),
    Shared("handlers of the root logger", _log_handlers, _put_log_handlers),
    *(Shared(each.name, partial(signal.getsignal, each), partial(signal.signal, each)) for each in SIGNALS),
)


def _of_torch() -> list[Shared]:
    """Nothing as long as no test has imported it."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "backends"):
        return []
    backends, cuda = torch.backends, torch.backends.cuda
    attributes = [
        *((f"torch.backends.mkldnn.{name}", backends.mkldnn, name) for name in ("enabled", "deterministic")),
        *((f"torch.backends.cudnn.{name}", backends.cudnn, name) for name in ("enabled", "benchmark", "deterministic")),
        *(
            (f"torch.backends.{where}fp32_precision", place, "fp32_precision")
            for where, place in (
                ("", backends), ("mkldnn.", backends.mkldnn), ("mkldnn.matmul.", backends.mkldnn.matmul),
                ("cuda.matmul.", cuda.matmul),
            )
        ),
        *(
            (f"torch.backends.cuda.matmul.{name}", cuda.matmul, name)
            for name in ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
        ),
    ]  # fmt: skip
    if attention := sys.modules.get("transformers.integrations.sdpa_attention"):
        attributes.append(("use_gqa_in_sdpa of transformers", attention, "use_gqa_in_sdpa"))
    functions = [
        ("num_threads", torch.get_num_threads, torch.set_num_threads),
        ("default_dtype", torch.get_default_dtype, torch.set_default_dtype),
        ("grad_enabled", torch.is_grad_enabled, torch.set_grad_enabled),
        ("anomaly_enabled", torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
        ("deterministic", torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
        ("flash attention", cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
        ("efficient attention", cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
        ("plain attention", cuda.math_sdp_enabled, cuda.enable_math_sdp),
        ("attention of cuDNN", cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    ]
    return [
        *(Shared(f"torch: {name}", get, put) for name, get, put in functions),
        *(Shared(name, partial(getattr, place, key), partial(setattr, place, key)) for name, place, key in attributes),
    ]


def what_leaks(path: Path) -> Iterator[None]:
    """Between its two ends runs the test of a file: what it has changed is a failure, or is put back."""
    before = [(shared, shared.get()) for shared in (*OF_THE_PROCESS, *_of_torch())]
    yield
    changed = [(shared, was, now) for shared, was in before if (now := shared.get()) != was]
    if any(each in path.as_posix() for each in TRAINERS):
        for shared, was, _ in changed:
            shared.put(was)
    elif changed:
        lines = []
        for shared, was, now in changed:
            if isinstance(was, dict):
                was, now = (dict(sorted(each.items() - other.items())) for each, other in ((was, now), (now, was)))
            lines.append(f"{shared.name}: {was!r} → {now!r}")
        pytest.fail("not as it was before, and other tests see it:\n  " + "\n  ".join(lines), pytrace=False)


@pytest.fixture(autouse=True)
def nothing_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Set up before all that a test asks for, torn down after it. What longer fixtures set up is theirs.

    What torch draws is the test's own, too, whoever has drawn before; pytest-randomly does it for Python and numpy.
    """
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(crc32(request.node.nodeid.encode()))
    yield from what_leaks(request.path)


@pytest.fixture(autouse=True, scope="module")
def nothing_leaks_from_a_module(request: pytest.FixtureRequest) -> Iterator[None]:
    """The same for what a module's own fixtures set up."""
    yield from what_leaks(request.path)
