"""A tiny real T5 (untied head), a tokenizer learned here, a prepared dataset of word reversals, run directories."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from jobs.disk.rundir import RunDir, create
from jobs.events import JobSubmitted
from jobs.plan import DataPlan, ModelPlan, make_plan
from jobs.spec import JobSpec, parse_spec
from tests.support.machine import free_bytes
from tests.support.samples import dataset_summary
from tests.training.stepping import Noting
from tests.training.workplace import SHARED_DATA, Workplace
from worker.training.dataset.data import PreparedDataset, Rows, Writer
from worker.training.journal import Journal
from worker.training.planning import memory_plan
from worker.training.planning.predictor import Predictor
from worker.training.tasks.seq2seq.batches import PairBatch, PairLimit

VOCABULARY = 64
WORDS = [f"w{number}" for number in range(VOCABULARY - 3)]
TRAIN_ROWS, VALIDATION_ROWS = 41, 8
CONFIG: dict[str, Any] = {
    "architectures": ["T5ForConditionalGeneration"],
    "model_type": "t5",
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 1,
    "num_decoder_layers": 1,
    "num_heads": 2,
    "feed_forward_proj": "gated-gelu",
    "dropout_rate": 0.1,
    "tie_word_embeddings": False,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
XL: dict[str, Any] = {
    "d_model": 2048, "d_kv": 64, "d_ff": 5120, "num_layers": 24, "num_decoder_layers": 24, "num_heads": 32,
    "vocab_size": 32128, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
}  # fmt: skip
# 41 rows are soon known by heart, and the validation loss rises: the best is neither the last nor among the two newest.
OVERFIT: dict[str, Any] = {
    "training": {"epochs": 20, "dropout": 0.0},
    "evaluation": {"every_steps": 20, "samples": 0},
    "checkpoint": {"every_steps": 20, "keep": 2},
}
# 21 steps; with the rate the loss rises, too: step 8 is the best.
RISING: dict[str, Any] = {
    "training": {"epochs": 4, "learning_rate": 0.05, "warmup_ratio": 0.99, "dropout": 0.0},
    "evaluation": {"every_steps": 4, "samples": 0},
    "checkpoint": {"every_steps": 4, "keep": 2},
}


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _room_on_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of large models need gigabytes, which the disk of whoever tests may not have left."""
    free_bytes(monkeypatch, 10**14)


@pytest.fixture(autouse=True, scope="session")
def _one_predictor_a_model() -> Iterator[None]:
    """A predictor keeps what it has traced: tests that check and prepare the same model share one, and save seconds."""
    made: dict[str, Predictor] = {}

    def shared(config: dict[str, Any], **more: Any) -> Predictor:
        key = json.dumps([config, more], sort_keys=True, default=repr)
        if key not in made:
            made[key] = Predictor(config, **more)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_plan, "Predictor", shared)
        yield


def tiny_model(seed: int = 0, **config: Any) -> T5ForConditionalGeneration:
    """A T5 of FLAN's shape in fp32, random, with a head of its own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = T5ForConditionalGeneration(T5Config(**CONFIG | config))
        # transformers 5 ties the head of every T5 that it makes.
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight) * 0.05)
    return model


def write_model(folder: Path, **config: Any) -> None:
    """config.json and bf16 weights of `tiny_model`."""
    aliases = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    tensors = {
        name: tensor.to(torch.bfloat16).clone()
        for name, tensor in tiny_model(**config).state_dict().items()
        if name not in aliases
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG | config))


@pytest.fixture
def t5_tokenizer() -> Path:
    """Folder of T5's own tokenizer, which is not part of the repository."""
    folder = SHARED_DATA / "t5_tokenizer_fast"
    if not folder.exists():
        pytest.skip(f"no {folder}: shared data is not part of the repository")
    return folder


@pytest.fixture(scope="session")
def _made_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(
        models.WordLevel({word: n for n, word in enumerate(["<pad>", "</s>", "<unk>", *WORDS])}, "<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    fast.save_pretrained(folder)
    write_model(folder)
    (folder / "generation_config.json").write_text(
        json.dumps({"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0})
    )
    return folder


@pytest.fixture
def model_folder(_made_model: Path, tmp_path: Path) -> Path:
    """A model folder of one's own, to damage as one likes."""
    return Path(shutil.copytree(_made_model, tmp_path / "model"))


@pytest.fixture(scope="session")
def dataset_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inputs of 3 to 15 words; the target is the input's words backwards, without every third."""
    folder = tmp_path_factory.mktemp("prepared")
    draw = random.Random(5)
    inputs = [
        [draw.randrange(3, VOCABULARY) for _ in range(draw.randint(3, 15))] for _ in range(TRAIN_ROWS + VALIDATION_ROWS)
    ]
    targets = [[token for index, token in enumerate(reversed(row)) if index % 3 != 2] for row in inputs]
    with Writer(folder, VOCABULARY) as writer:
        writer.add([[*row, 1] for row in inputs], [[*row, 1] for row in targets])
        parts = {"train": np.arange(TRAIN_ROWS), "validation": np.arange(TRAIN_ROWS, TRAIN_ROWS + VALIDATION_ROWS)}
        writer.finish(parts, dataset_summary())
    return folder


@pytest.fixture
def dataset(dataset_folder: Path) -> PreparedDataset:
    """That dataset, open."""
    return PreparedDataset.open(dataset_folder)


@pytest.fixture
def noting(tmp_path: Path) -> Noting:
    """A journal that remembers its facts."""
    return Noting(tmp_path / "journal.jsonl")


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """A journal whose lines nobody reads."""
    return Journal(tmp_path / "journal.jsonl")


@pytest.fixture
def workplace(tmp_path: Path) -> Workplace:
    """Stages without a hub, on a folder of the test's own."""
    return Workplace(tmp_path)


def batches_of(rows: Rows, chosen: npt.NDArray[np.int64], micro_batch: int) -> list[PairBatch]:
    """These rows as one group, cut as the loop would cut it."""
    return PairLimit.of(rows, micro_batch).batches(rows, [chosen], 0)


MakeRun = Callable[..., RunDir]


def run_maker(runs: Path, model_folder: Path, dataset_folder: Path) -> MakeRun:
    """Makes prepared run directories in `runs`."""

    def make(name: str = "job", **parts: Any) -> RunDir:
        runs.mkdir(exist_ok=True)
        spec = tiny_spec(**parts)
        run, _ = create(runs, name, spec, JobSubmitted(name=name, model="x", spec_sha256=spec.sha256()))
        run.write_plan(
            make_plan(
                spec,
                ModelPlan(source="x", folder=str(model_folder), parameters=1),
                DataPlan(
                    train="x",
                    input="x",
                    target="x",
                    prepared=str(dataset_folder),
                    rows=TRAIN_ROWS,
                    validation_rows=VALIDATION_ROWS,
                    evaluation_rows="random",
                    complete=True,
                ),
            )
        )
        return run

    return make


@pytest.fixture
def make_run(tmp_path: Path, model_folder: Path, dataset_folder: Path) -> MakeRun:
    """A prepared run directory: `make_run("a", training={…}, …)` with the parts of the job that matter to the test."""
    return run_maker(tmp_path / "runs", model_folder, dataset_folder)


@pytest.fixture(scope="module")
def make_shared_run(tmp_path_factory: pytest.TempPathFactory, _made_model: Path, dataset_folder: Path) -> MakeRun:
    """The same for a run that several tests of a module read, and none changes."""
    return run_maker(tmp_path_factory.mktemp("shared") / "runs", _made_model, dataset_folder)


def tiny_spec(**parts: Any) -> JobSpec:
    """20 steps of 8 rows in micro-batches of 4 (41 rows, 4 epochs give 21), an evaluation every 5."""
    spec: dict[str, Any] = {
        "data": {"train": "rows.jsonl"},
        "training": {"epochs": 4, "batch_size": 8, "learning_rate": 0.01},
        "memory": {"micro_batch": 4},
        "log": {"every_steps": 4},
        "evaluation": {"every_steps": 5, "max_rows": 6, "samples": 2, "generate_rows": 0},
        "checkpoint": {"every_steps": 5, "every_minutes": None, "keep": 2},
    }
    for key, part in parts.items():
        spec[key] = spec.get(key, {}) | part if isinstance(part, dict) else part
    return parse_spec(spec)
