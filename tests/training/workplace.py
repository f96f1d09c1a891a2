"""A data directory, stores and run directories of a test's own, and the stages run on them as the trainer runs them."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from pathlib import Path
from typing import Any

from jobs.attempt import Finished
from jobs.disk.rundir import RunDir, create
from jobs.events import JobSubmitted
from jobs.reasons import Reason
from jobs.spec import parse_spec
from worker.training.check import check
from worker.training.journal import Journal
from worker.training.prepare import prepare
from worker.training.settings import TrainerSettings
from worker.training.tasks.seq2seq import builtin

EXAMPLES = Path(__file__).parents[2] / "examples" / "recipes.jsonl"
_T5_EMBEDDINGS = 32_128
SHARED_DATA = Path(__file__).parents[3] / "shared" / "data"


class Workplace:
    """Everything below one folder."""

    def __init__(self, root: Path, *, offline: bool = True) -> None:
        self.root = root
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
        data = {"train": train, **parts.pop("data", {})}
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
        journal.finish(Reason.DONE, result=stage(run, self.settings, journal))
        last = run.attempt_lines(name)[-1]
        assert isinstance(last, Finished)
        return last.result.model_dump(mode="json")


def pairs(count: int, start: int = 0) -> list[dict[str, Any]]:
    """Rows with the columns input and target, all different."""
    return [
        {"input": f"question {n} about bread", "target": f"answer {n}: knead and bake it"}
        for n in range(start, start + count)
    ]
