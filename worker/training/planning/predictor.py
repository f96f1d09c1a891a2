"""Peak memory of one training step, before a weight is loaded and without a GPU (architecture.md: Memory).

One step of the real code runs on tensors without data, while a tracker counts what is live. The step is one in the
middle of a run: optimizer states are there, and so are the gradients of an earlier micro-batch, to which those of this
one are added. Between two steps a micro-batch as large is evaluated, when there are no gradients.

On a GPU, layers may be compiled. They keep other tensors for the backward pass than these, fewer in all: what is
predicted is then an upper bound. A compiled layer that is recomputed holds at once what it has computed again, which
eager modules give back one by one: of a layer as wide as FLAN-T5-XL's about 40 MiB more than predicted, which what a
plan leaves free covers.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel

from jobs.disk.files import read_regular, write_atomically
from jobs.memory_plan import Device, OptimizerName
from jobs.spec import TrainingSpec
from worker.training.adapters.method import Full, Method
from worker.training.optimizers.adamw_offload import gpu_half
from worker.training.optimizers.optimizer import make_optimizer
from worker.training.planning import tracker as counted
from worker.training.planning.kernels import (
    WORKSPACES,
    WithoutData,
    bare_model,
    give_device,
    inside_cpu,
    inside_cuda,
    run_backward,
    without_data,
)
from worker.training.planning.ladder import ModelSize, Prediction, Setting, next_rows
from worker.training.planning.tracker import CATEGORIES, MetaResults, Tracker
from worker.training.steps.shape import MicroBatchShape
from worker.training.store import content_key
from worker.training.tasks.self_check import SelfCheck
from worker.training.tasks.task import Config, Task

# -- trace cache -------------------------------------------------------------------------------------------------------
# What was traced of a model before, on disk: tracing takes seconds, and a sweep's trials ask the same of one model.
#
# One file a model in a folder (`LONGHAUL_TRACES`), named after all that decides the answers, the trainer's code
# included. Its first line is the SHA-256 of the rest: an answer that was changed would fail jobs, or plan them
# wrongly. It may be deleted at any time.

log = logging.getLogger("longhaul.trainer")

MOST_FILES = 500
"""The ones not used for longest go first."""
Answer = TypeVar("Answer", list[int], str | None)
_TRACED_WITH = ("torch", "transformers", "peft", "torchao")


class TraceCache:
    """Question → answer, for one model. Without a folder it lives as long as this object."""

    def __init__(self, folder: Path | None, facts: Sequence[Any]) -> None:
        """`facts`: all that decides an answer, besides question and code."""
        self._file = None if folder is None else folder / f"{content_key([code(), *facts])}.json"
        self._known: dict[str, list[int] | str | None] = {}
        self._on_disk = 0
        if self._file is not None:
            self._read(self._file)

    @property
    def empty(self) -> bool:
        """Nothing is known."""
        return not self._known

    def answer(self, question: str, find: Callable[[], Answer]) -> Answer:
        """The answer that is known, else what `find` returns, from now on."""
        if question not in self._known:
            self._known[question] = find()
        return cast(Answer, self._known[question])

    def keep(self) -> None:
        """Write what has been added, if there is a folder; a file that cannot be written costs time only."""
        if self._file is None or len(self._known) == self._on_disk:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            content = json.dumps(self._known).encode()
            write_atomically(self._file, digest(content) + b"\n" + content)
            self._on_disk = len(self._known)
            files = sorted(self._file.parent.glob("*.json"), key=lambda file: file.stat().st_mtime)
            for old in files[:-MOST_FILES]:
                old.unlink(missing_ok=True)
        except OSError as error:
            log.info("traces are not kept in %s: %s", self._file.parent, error.strerror)

    def _read(self, file: Path) -> None:
        try:
            written, _, content = read_regular(file).partition(b"\n")
            if written != digest(content):
                raise ValueError("it is not as it was written")
            self._known = dict(json.loads(content))
            os.utime(file)
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError) as error:
            log.info("%s is of no use: %s", file.name, error)
        self._on_disk = len(self._known)


def digest(content: bytes) -> bytes:
    """SHA-256, in hex."""
    return hashlib.sha256(content).hexdigest().encode()


@functools.cache
def code() -> list[str]:
    """Versions of the libraries that are traced, what the CPU can do, and a hash of the trainer's code."""
    own = hashlib.sha256()
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        own.update(file.read_bytes())
    versions = [importlib.metadata.version(name) for name in _TRACED_WITH]
    return [own.hexdigest(), *versions, torch.backends.cpu.get_cpu_capability()]


# -- predictor ---------------------------------------------------------------------------------------------------------

_CUDA_GRANULARITY = 512
"""torch's allocator for GPUs rounds every size up to a multiple of this many bytes."""


@dataclass(frozen=True)
class _Trace:
    """The highest moment of something, without what is not part of it."""

    parts: tuple[int, ...]
    kept: int = 0

    @classmethod
    def of(cls, figures: Sequence[int]) -> _Trace:
        """From what a cache has kept."""
        kept, *parts = figures
        return cls(tuple(parts), kept)

    @property
    def figures(self) -> list[int]:
        """For a cache."""
        return [self.kept, *self.parts]

    @property
    def peak(self) -> int:
        return sum(self.parts)

    def beside(self, states: int) -> _Trace:
        """With so many bytes of the optimizer's."""
        parts = list(self.parts)
        parts[counted.OPTIMIZER] += states
        return _Trace(tuple(parts), self.kept)


class Predictor:
    """Predictions for one model; nothing is traced twice."""

    def __init__(
        self,
        config: Config,
        *,
        task: Task,
        dtype: torch.dtype | None = None,
        device: Device,
        fused: bool,
        dropout: float | None,
        training: TrainingSpec,
        method: Method | None = None,
        flash: bool = True,
        traces: Path | None = None,
    ) -> None:
        """`config`: the content of config.json. `dropout` None: the model's own. `method` None: all is trained.

        `dtype` None: the method's. `flash`: the GPU has flash attention (from compute capability 8.0 on). `traces`:
        the folder with those of earlier jobs, where `keep` puts new ones.

        Raises Rejected (`bad_config`) if transformers cannot build a model of it, and as `Method.inject` does.
        """
        self._config, self._task, self._method, self._schedule = config, task, method, training
        self._fused, self._dropout = fused, dropout
        self._dtype = dtype or (method or Full()).dtype
        self._cuda = device == "cuda"
        self._device = torch.device("meta" if self._cuda else "cpu")
        self._fake = None if self._cuda else FakeTensorMode()
        self._results = MetaResults() if self._cuda else None
        self._flash = flash
        self._built: PreTrainedModel | None = None
        self._activation_checkpointing = 0
        self.traced = 0
        """Passes traced so far."""
        # Of rates it matters whether they are zero: then there is nothing to do for them.
        rates = [dropout if dropout is None else dropout > 0, training.weight_decay > 0, training.max_grad_norm is None]
        facts = [dict(config), repr(task), str(self._dtype), device, fused, *rates, method and method.memory_key, flash]
        self._cache = TraceCache(traces, facts)
        if self._cache.empty:
            self._build()

    def _build(self) -> PreTrainedModel:
        model = bare_model(
            self._config, self._task, self._dtype, fused=self._fused, dropout=self._dropout, method=self._method
        )
        if self._fake is not None:
            with self._fake:
                give_device(model, self._device)
        self._built = model
        check = SelfCheck(
            f"a {self._task.name} model", "take a model of a family that docs/models.md lists as tried in the tests"
        )
        # Leaves the gradients behind, of those parameters that the loss depends on.
        with check.errors(model):
            self._trace_passes(MicroBatchShape(1, 8, 8), 0, True)
        return model

    @property
    def _model(self) -> PreTrainedModel:
        return self._built or self._build()

    @property
    def size(self) -> ModelSize:
        """Of the model, with what the method adds to it."""
        return ModelSize(*self._cache.answer("size", lambda: list(astuple(ModelSize.of(self._model)))))

    @property
    def _trains(self) -> bool:
        return self._method is None or self.size.trained > 0

    def states(self, name: OptimizerName) -> int:
        """Bytes of the states of an optimizer."""
        return self._update_of(name).kept

    def keep(self) -> None:
        """Keep what was traced, for later jobs."""
        self._cache.keep()

    def uncompiled(self, activation_checkpointing: int) -> str | None:
        """Why layers are not compiled, of which every n-th is recomputed; None: they can be."""
        recomputed = activation_checkpointing > 0
        question = f"uncompiled, {recomputed=}"
        return self._cache.answer(question, lambda: self._task.uncompiled(self._model, recomputed=recomputed))

    def predict(self, shape: MicroBatchShape, setting: Setting, *, padded: bool = True) -> Prediction:
        """The peak of a step whose micro-batches have this shape. `padded`: some inputs are shorter than the widest."""
        update = self._update_of(setting.optimizer)
        passes = self._passes_of(shape, setting.activation_checkpointing, padded).beside(update.kept)
        evaluation = self._evaluation_of(shape, padded).beside(update.kept)
        parts = max((passes.parts, evaluation.parts, update.parts), key=sum)
        return Prediction(
            parts=dict(zip(CATEGORIES, parts, strict=True)),
            peak=sum(parts),
            pass_peak=passes.peak,
            evaluation_peak=evaluation.peak,
            update_peak=update.peak,
            activations_after_forward=passes.kept,
        )

    def most_rows(
        self, inputs: int, targets: int, setting: Setting, limit_bytes: int, cap: int
    ) -> tuple[int, Prediction]:
        """The most rows, 1 to `cap`, whose peak is at most `limit_bytes`; 0, and the prediction of 1 row, if none is.

        The peak is the highest of many moments, each of which grows linearly with the rows: so nearly convex that few
        traces find the answer. It is always one that was traced itself.
        """
        fits = {1: self.predict(MicroBatchShape(1, inputs, targets), setting)}
        if fits[1].peak > limit_bytes:
            return 0, fits[1]
        too_many: tuple[int, int] | None = None
        while (rows := next_rows(fits, too_many, limit_bytes, cap)) is not None:
            prediction = self.predict(MicroBatchShape(rows, inputs, targets), setting)
            if prediction.peak <= limit_bytes:
                fits[rows] = prediction
            else:
                too_many = rows, prediction.peak
        return max(fits), fits[max(fits)]

    # -- traces ----------------------------------------------------------------------------------------------

    def _passes_of(self, shape: MicroBatchShape, activation_checkpointing: int, padded: bool) -> _Trace:
        if not self._trains:
            return self._evaluation_of(shape, padded)
        question = f"passes, {shape}, {activation_checkpointing=}, {padded=}"
        asked = shape, activation_checkpointing, padded
        return _Trace.of(self._cache.answer(question, lambda: self._trace_passes(*asked).figures))

    def _evaluation_of(self, shape: MicroBatchShape, padded: bool) -> _Trace:
        question = f"evaluation, {shape}, {padded=}"
        return _Trace.of(self._cache.answer(question, lambda: self._trace_evaluation(shape, padded).figures))

    def _update_of(self, name: OptimizerName) -> _Trace:
        """The highest moment of an update; `kept`: bytes of the states."""
        if not self._trains:
            return self._with_workspaces([0] * len(CATEGORIES))
        return _Trace.of(self._cache.answer(f"update, {name}", lambda: self._trace_update(name).figures))

    def _trace_update(self, name: OptimizerName) -> _Trace:
        model = self._model
        named = list(model.named_parameters())
        with without_data(name), self._tracking() as tracker:
            tracker.category = counted.OPTIMIZER
            # Of `adamw_offload` all but its GPU half is on the host, and takes none of the GPU's memory.
            offloaded = self._cuda and name == "adamw_offload"
            optimizer = None if offloaded else make_optimizer(name, named, self._schedule, fused=True)
            states = tracker.live[counted.OPTIMIZER]
            tracker.category = counted.TEMPORARIES
            loss = torch.empty((), dtype=torch.float32, device=self._device)
            tracker.begin()
            if optimizer is None:
                trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
                gpu_half(1, trained, loss, self._schedule.max_grad_norm)
            else:
                optimizer.step(1, 1e-4, loss)
            parts, _ = tracker.at_peak()
        return self._with_workspaces(parts, states)

    def _trace_passes(self, shape: MicroBatchShape, activation_checkpointing: int, padded: bool) -> _Trace:
        if not self._trains:
            return self._trace_evaluation(shape, padded)
        self._recompute(activation_checkpointing)
        self.traced += 1
        with torch.enable_grad(), self._tracking() as tracker:
            tracker.category = counted.ACTIVATIONS
            tracker.begin()
            before = tracker.total
            loss = self._loss(shape, padded)
            kept = tracker.total - before
            forward, freed = tracker.at_peak()
            # What the forward pass has dropped again is not what the backward pass needs.
            forward[counted.ACTIVATIONS] -= freed[counted.ACTIVATIONS]
            forward[counted.TEMPORARIES] += freed[counted.ACTIVATIONS]
            tracker.category = counted.TEMPORARIES
            tracker.begin()
            run_backward(loss)
            backward, _ = tracker.at_peak()
        return self._with_workspaces(max(forward, backward, key=sum), kept)

    def _trace_evaluation(self, shape: MicroBatchShape, padded: bool) -> _Trace:
        self._model.eval()
        try:
            with torch.no_grad(), self._tracking(gradients=False) as tracker:
                tracker.begin()
                result = self._task.empty_batch(shape, padded=padded, device=self._device).evaluated(self._model)
                parts, _ = tracker.at_peak()
                del result
        finally:
            self._model.train()
        return self._with_workspaces(parts)

    def _loss(self, shape: MicroBatchShape, padded: bool) -> torch.Tensor:
        """Of one micro-batch, ready for the backward pass."""
        batch = self._task.empty_batch(shape, padded=padded, device=self._device)
        return batch.loss_sum(self._model) / batch.target_tokens

    @contextlib.contextmanager
    def _tracking(self, *, gradients: bool = True) -> Iterator[Tracker]:
        """Everything inside is without data, and counted with weights and, where there are, gradients."""
        tracker = Tracker(
            self._device,
            granularity=_CUDA_GRANULARITY if self._cuda else 1,
            inside=inside_cuda if self._cuda else inside_cpu,
            results=self._results,
        )
        parameters = list(self._model.parameters())
        tracker.add([*parameters, *self._model.buffers()], counted.WEIGHTS)
        if gradients:
            tracker.add([parameter.grad for parameter in parameters if parameter.grad is not None], counted.GRADIENTS)
        with self._fake or contextlib.nullcontext(), WithoutData(cuda=self._cuda, flash=self._flash), tracker:
            yield tracker

    def _with_workspaces(self, parts: list[int], kept: int = 0) -> _Trace:
        parts[counted.TEMPORARIES] += WORKSPACES if self._cuda else 0
        return _Trace(tuple(parts), kept)

    # -- the model -------------------------------------------------------------------------------------------

    def _recompute(self, every: int) -> None:
        if every == self._activation_checkpointing:
            return
        # Hooks of frozen weights, which transformers leaves behind: they would keep more for the backward pass.
        self._model.disable_input_require_grads()
        if every:
            self._model.activation_checkpointing_enable({"use_reentrant": False}, every_n_layers=every)
        else:
            self._model.activation_checkpointing_disable()
        self._activation_checkpointing = every
