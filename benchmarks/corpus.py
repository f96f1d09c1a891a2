"""A file of rows, prepared as a job would have it prepared: for measurements on a corpus' own lengths."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from benchmarks.command_line import traces
from jobs.disk.rundir import RunDir, create
from jobs.events import JobSubmitted
from jobs.spec import parse_spec
from worker.training.check import check
from worker.training.dataset.data import PreparedDataset
from worker.training.doctor.random_t5 import write_checkpoint
from worker.training.journal import Journal
from worker.training.prepare import prepare
from worker.training.settings import TrainerSettings
from worker.training.tasks.seq2seq import builtin


def prepared_job(
    file: Path,
    scratch: Path,
    *,
    tokenizer: Path | None = None,
    config: dict[str, Any] | None = None,
    **parts: Any,
) -> RunDir:
    """A run directory that check and prepare have been through, below `scratch`, which is new or from a call before.

    Without `tokenizer` (a folder) and `config` the model is the built-in one, with a tokenizer learned from the rows;
    else one of random weights of that config, with that tokenizer.
    """
    folder = scratch / "data"
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / file.name).exists():
        shutil.copyfile(file, folder / file.name)
    model = builtin.NAME
    if tokenizer is not None or config is not None:
        name = f"model-{_name(config)}-{tokenizer.name if tokenizer else 'own'}"
        model = f"./{name}"
        if not (folder / name).exists():
            write_checkpoint(folder / name, config or builtin.CONFIG | {"vocab_size": 32128})
            if tokenizer is not None:
                for one in tokenizer.glob("*.json"):
                    shutil.copyfile(one, folder / name / one.name)
    settings = TrainerSettings(
        data=folder, prepared=scratch / "prepared", models=scratch / "models", device="cpu", offline=True,
        traces=traces(),
    )  # fmt: skip
    (scratch / "runs").mkdir(exist_ok=True)
    spec = parse_spec({"model": model, **parts, "data": {"train": file.name, **parts.get("data", {})}})
    submitted = JobSubmitted(name=spec.name, model=spec.model, spec_sha256=spec.sha256())
    run, _ = create(scratch / "runs", f"job-{len(list((scratch / 'runs').glob('job-*'))) + 1}", spec, submitted)
    journal = Journal(run.attempt_file("check"))
    check(run, settings, journal)
    prepare(run, settings, journal)
    return run


def dataset_of(run: RunDir) -> PreparedDataset:
    """What was prepared for it."""
    folder = run.plan().data.prepared
    assert folder is not None
    return PreparedDataset.open(Path(folder))


def _name(config: dict[str, Any] | None) -> str:
    chosen = config or builtin.CONFIG
    return f"{chosen['d_model']}x{chosen['num_layers']}"
