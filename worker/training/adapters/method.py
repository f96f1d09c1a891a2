"""What the trainer asks of a method: which weights are trained, and what of a model is saved and delivered."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import nn

from worker.training.models.model_files import CONFIG, SINGLE
from worker.training.tasks.layout import Layout
from worker.training.tasks.task import Config, Flops


@dataclass(frozen=True)
class BaseModel:
    """Where the model that was trained comes from, as another program would open it."""

    name: str
    """Hub id, or the absolute path of a folder."""
    revision: str | None = None
    """Commit of a hub model."""


class Method(Protocol):
    """Which weights are trained. The order below is that of a job."""

    @property
    def whole(self) -> bool:
        """Whether a checkpoint holds the whole model: then the weights that the model came with need not be read."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the model in memory, as it comes, and of a whole model that is delivered."""

    @property
    def description(self) -> str:
        """For people."""

    @property
    def memory_key(self) -> str:
        """What of it decides how much memory training takes."""

    def inject(self, model: nn.Module, seed: int, head_modules: Collection[str] = ()) -> None:
        """Give the model, in place, the parameters that are trained, and let them alone require gradients.

        `head_modules`: see `Layout`.
        The same seed gives the same bytes on every device; generators stay as they are. Raises Rejected where the
        model cannot be trained so.
        """

    def weights(self, model: nn.Module) -> Mapping[str, torch.Tensor]:
        """Name → tensor, as checkpoints and the result hold what is trained; the tensors themselves, not copies."""

    def untrained_sha256(self, model: nn.Module) -> str | None:
        """Hash of the weights that must not change; None: there are none."""

    def flops(self, model: Flops, trained: int, layout: Layout) -> Flops:
        """Of training a model of this layout so that `trained` weights are; `model`: the same where every weight is."""

    # -- the result -----------------------------------------------------------------------------------------------

    @property
    def merged(self) -> Method | None:
        """That of the whole model with what was trained merged into it, if that is to be delivered; else None."""

    def result_bytes(self, trained: int, model: int) -> int:
        """Of all that is delivered, for so many bytes of trained weights, and of the model as it came."""

    @property
    def weights_file(self) -> str:
        """Name of the file of `weights` in the folder of the result."""

    @property
    def library(self) -> str:
        """That opens the result, as the hub names it."""

    def configs(
        self, model: nn.Module, config: Config, layout: Layout, base: BaseModel
    ) -> Mapping[str, Mapping[str, object]]:
        """File name → content of the JSON files that say what the result is. `config`, `layout`: the model's own."""

    def opening(self, auto_class: str, base: BaseModel, layout: Layout) -> list[str]:
        """Lines of Python that open the folder of the result, which is the current one, as `model`."""


# -- full --------------------------------------------------------------------------------------------------------------
# Every weight is trained.


@dataclass(frozen=True)
class Full:
    """See `Method`."""

    dtype: torch.dtype = torch.bfloat16
    whole: ClassVar[bool] = True
    weights_file: ClassVar[str] = SINGLE
    library: ClassVar[str] = "transformers"

    evaluated: bool = False
    """Nothing is trained."""

    @property
    def description(self) -> str:
        """See `Method`."""
        return "none: the model is evaluated" if self.evaluated else "full: every weight"

    @property
    def memory_key(self) -> str:
        """See `Method`."""
        return repr(self)

    def inject(self, model: nn.Module, seed: int, head_modules: Collection[str] = ()) -> None:
        """The parameters are there; all require gradients, or none does."""
        model.requires_grad_(not self.evaluated)

    def weights(self, model: nn.Module) -> Mapping[str, torch.Tensor]:
        """See `Method`."""
        return weights_of(model)

    def untrained_sha256(self, model: nn.Module) -> str | None:
        """See `Method`."""
        return None

    def flops(self, model: Flops, trained: int, layout: Layout) -> Flops:
        """See `Method`."""
        return model

    @property
    def merged(self) -> Method | None:
        """See `Method`."""
        return None

    def result_bytes(self, trained: int, model: int) -> int:
        """See `Method`."""
        return model

    def configs(
        self, model: nn.Module, config: Config, layout: Layout, base: BaseModel
    ) -> Mapping[str, Mapping[str, object]]:
        """config.json is the original one: dropout and fused modules of this job are not part of the model.

        Two keys are set to what is true of the weights: `dtype`, and `tie_word_embeddings`, which transformers 5 saves
        as true always.
        """
        tied = model.get_parameter(layout.head) is model.get_parameter(layout.embedding)
        own = {**config, "dtype": dtype_name(self.dtype), "tie_word_embeddings": tied}
        own.pop("torch_dtype", None)  # the old name of dtype
        return {CONFIG: own}

    def opening(self, auto_class: str, base: BaseModel, layout: Layout) -> list[str]:
        """See `Method`."""
        return [
            f"from transformers import {auto_class}, AutoTokenizer",
            "",
            f'model = {auto_class}.from_pretrained(".", dtype="{dtype_name(self.dtype)}")  # this folder',
        ]


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16`."""
    return str(dtype).removeprefix("torch.")


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Name → tensor as files hold them: a shared tensor once, under its first name (`shared.weight` for T5)."""
    named: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            named[name] = tensor.detach()
    return named
