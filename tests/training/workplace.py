"""A data directory, stores and run directories of a test's own, and the stages run on them as the trainer runs them."""

from __future__ import annotations

import csv
import gzip
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.attempt import Finished
from jobs.disk.rundir import RunDir, create
from jobs.events import JobSubmitted
from jobs.memory_plan import DType, MemoryPlan
from jobs.reasons import Reason
from jobs.spec import JobSpec, parse_spec
from tests.support.samples import memory_plan
from worker.training.check import check
from worker.training.dataset.data import PreparedDataset
from worker.training.journal import Journal
from worker.training.prepare import prepare
from worker.training.settings import TrainerSettings
from worker.training.tasks.seq2seq import builtin

EXAMPLES = Path(__file__).parents[2] / "examples" / "recipes.jsonl"
_T5_EMBEDDINGS = 32_128
SHARED_DATA = Path(__file__).parents[3] / "shared" / "data"


class Workplace:
    """Everything below one folder.

    `planned`: both stages plan the memory of the job, for which they trace its model; else they are told a plan, which
    is as good where rows are the subject, and takes a fiftieth of the time. `pictured`: they draw `memory.png` and
    `dataset.png`, which take longer than the rows of a test; else those files hold a few bytes.
    """

    def __init__(self, root: Path, *, offline: bool = True, planned: bool = True) -> None:
        self.root, self.planned, self.pictured = root, planned, False
        self.data = root / "data"
        self.data.mkdir(parents=True)
        (root / "runs").mkdir()
        self.settings = TrainerSettings(
            data=self.data,
            prepared=root / "prepared",
            models=root / "models",
            device="cpu",
            offline=offline,
            runs=root / "runs",
            traces=Path(os.environ["LONGHAUL_TRACES"]),
        )
        self._jobs = 0

    def rows(self, name: str, rows: list[Any]) -> Path:
        """Write a file of rows; a row that is text or bytes is written as it is."""
        lines = [
            row if isinstance(row, bytes) else (row if isinstance(row, str) else json.dumps(row)).encode()
            for row in rows
        ]
        content = b"".join(line + b"\n" for line in lines)
        file = self.data / name
        file.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        return file

    def t5_model(self, tokenizer: Path) -> str:
        """A model folder with the tokenizer in another one, T5's own, and embeddings for all its tokens."""
        from safetensors.torch import load_file, save_file  # torch: *check* is shown to do without it

        folder = self.data / "t5"
        folder.mkdir()
        builtin.build(folder, ["some text"], seed=0)
        weights = load_file(folder / "model.safetensors")
        for name in ("shared.weight", "lm_head.weight"):
            weights[name] = weights[name].repeat(16, 1)[:_T5_EMBEDDINGS]
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"vocab_size": _T5_EMBEDDINGS}))
        for file in tokenizer.iterdir():
            shutil.copyfile(file, folder / file.name)
        return "./t5"

    def job(self, train: Any = "rows.jsonl", *, model: str = "builtin:t5-tiny", **parts: Any) -> RunDir:
        """A run directory, as the service leaves it. `data` in `parts` adds to data.train."""
        held_out = {} if parts.get("kind") == "evaluate" else {"validation": 0.01}
        data = {"train": train, **held_out, **parts.pop("data", {})}
        spec = parse_spec({"model": model, "data": data, **parts})
        self._jobs += 1
        first = JobSubmitted(name=spec.name, model=spec.model, spec_sha256="0" * 64)
        return create(self.root / "runs", f"job-{self._jobs}", spec, first)[0]

    def check(self, run: RunDir) -> dict[str, Any]:
        """The stage's result, as JSON has it in the attempt file."""
        return self._stage("check", check, run)

    def prepare(self, run: RunDir) -> dict[str, Any]:
        """Both stages; the second one's result."""
        self.check(run)
        return self.prepare_only(run)

    def prepare_only(self, run: RunDir) -> dict[str, Any]:
        """The second stage of a job that was checked."""
        return self._stage("prepare", prepare, run)

    def _stage(self, name: str, stage: Any, run: RunDir) -> dict[str, Any]:
        journal = Journal(run.attempt_file(name))
        journal.phase("check" if name == "check" else "prepare")
        with pytest.MonkeyPatch.context() as patch:
            if not self.planned:
                patch.setattr(f"worker.training.{name}.plan_stage", told_plan)
            if not self.pictured:
                for module in ("planning.stages", "dataset.report"):
                    patch.setattr(f"worker.training.{module}.draw", lambda _: b"a picture")
            journal.finish(Reason.DONE, result=stage(run, self.settings, journal))
        last = run.attempt_lines(name)[-1]
        assert isinstance(last, Finished)
        return last.result.model_dump(mode="json")


@pytest.fixture(name="workplace")
def of_rows(tmp_path: Path) -> Workplace:
    """For files of tests whose subject is rows: the stages are told a plan of the memory."""
    return Workplace(tmp_path, planned=False)


def told_plan(_: RunDir, spec: JobSpec, *__: object, dtype: DType = "bfloat16", **___: object) -> MemoryPlan:
    """In place of `plan_stage`."""
    asked, rows = spec.memory.optimizer, spec.memory.micro_batch
    return memory_plan(
        device="cpu", gpu=None, budget_source="host", optimizer="adamw" if asked == "auto" else asked,
        micro_batch=8 if rows == "auto" else rows, dtype=dtype, compile=False, candidates=[], why="told",
    )  # fmt: skip


def dataset_of(run: RunDir) -> PreparedDataset:
    """What a job that was prepared trains on."""
    return PreparedDataset.open(Path(str(run.plan().data.prepared)))


def rejected(run: RunDir) -> list[dict[str, Any]]:
    """The rows that are not in it, duplicates included, in the order of the sources."""
    return [json.loads(line) for line in (dataset_of(run).folder / "rejected.jsonl").read_text().splitlines()]


def texts_of(run: RunDir, part: str = "train") -> list[tuple[str, str]]:
    """Inputs and targets in the order of the source, decoded; `<unk>` where the tokenizer did not know."""
    from transformers import AutoTokenizer  # torch: *check* is shown to do without it

    tokenizer, rows = AutoTokenizer.from_pretrained(run.plan().model.folder), getattr(dataset_of(run), part)
    return [
        (str(tokenizer.decode(rows.input(n)[:-1])), str(tokenizer.decode(rows.target(n)[:-1])))
        for n in range(len(rows))
    ]


def write_table(file: Path, rows: list[dict[str, Any]]) -> Path:
    """The rows as the name of the file says: .csv, .parquet, .json, or lines of JSON."""
    if file.suffix == ".csv":
        with open(file, "w", newline="") as handle:
            writer = csv.DictWriter(handle, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    else:
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        file.write_text(json.dumps(rows, indent=1) if file.suffix == ".json" else lines)
    return file


def pairs(count: int, start: int = 0) -> list[dict[str, Any]]:
    """Rows with the columns input and target, all different."""
    return [
        {"input": f"question {n} about bread", "target": f"answer {n}: knead and bake it"}
        for n in range(start, start + count)
    ]
