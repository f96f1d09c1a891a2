"""Stage *prepare*: all rows checked, tokenised and written down; the model's files in their place; the plan complete.

    sources ──lines──▶ sieve ──texts──▶ encoder ──tokens──▶ prepared/<key>/   (reused if the same was prepared before)

What was set aside is in `rejected.jsonl` of that folder.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from jobs.errors import BadData
from jobs.plan import DataPlan, ModelPlan, make_plan
from jobs.rundir import RunDir
from jobs.spec import DataSpec
from worker.training import builtin, model_store
from worker.training.data import FORMAT, Int64, PreparedDataset, Writer
from worker.training.journal import Journal
from worker.training.settings import TrainerSettings
from worker.training.sieve import Seen, Sieve
from worker.training.sources import LineReader, find_file, fingerprint
from worker.training.store import full_disk_named, make_once
from worker.training.text import RowReader, Template, template
from worker.training.tokens import Encoder

_CHUNK = 500


@dataclass(frozen=True)
class Source:
    """A file of rows."""

    path: Path
    name: str
    param: str
    sha256: str


def prepare(run: RunDir, settings: TrainerSettings, journal: Journal) -> dict[str, Any]:
    """What goes into job.prepared; plan.json is completed. Raises StageError."""
    spec, plan = run.spec(), run.plan()
    sources = find_sources(spec.data, settings, journal)
    templates = template(plan.data.input, "data.input"), template(plan.data.target, "data.target")
    with full_disk_named(settings.models):
        model = ready_model(plan.model, sources[0], templates, spec.data, spec.schedule.seed, settings, journal)
    encoder = Encoder(model)
    folder = settings.prepared / key_of(sources, templates, encoder, spec.data)
    with full_disk_named(settings.prepared):
        make_once(
            folder,
            partial(write, sources=sources, templates=templates, encoder=encoder, data=spec.data, journal=journal),
            _opens,
            waiting=journal.progress,
        )
    dataset = PreparedDataset.open(folder)
    data = DataPlan(
        train=str(sources[0].path),
        validation=str(sources[1].path) if len(sources) > 1 else None,
        input=templates[0].source,
        target=templates[1].source,
        prepared=str(folder),
        rows=len(dataset.train),
        validation_rows=len(dataset.validation),
        complete=True,
    )
    complete = make_plan(spec, plan.model.model_copy(update={"folder": str(model)}), data)
    run.write_plan(complete)
    return {"data": {**dataset.manifest["report"], "prepared": str(folder)}, "steps": complete.steps}


def find_sources(data: DataSpec, settings: TrainerSettings, journal: Journal) -> list[Source]:
    """The file of training rows, then that of validation rows if there is one."""
    names = {"data.train": data.train}
    if isinstance(data.validation, str):
        names["data.validation"] = data.validation
    found = []
    for param, name in names.items():
        path = find_file(settings.data, name, param)
        found.append(Source(path, name, param, fingerprint(path, journal.progress)))
    return found


def ready_model(
    plan: ModelPlan,
    train: Source,
    templates: tuple[Template, Template],
    data: DataSpec,
    seed: int,
    settings: TrainerSettings,
    journal: Journal,
) -> Path:
    """The folder of config, tokenizer and bf16 safetensors in the model store; made now if it is not there."""
    if plan.source != builtin.NAME:
        return model_store.stored_model(plan, settings, journal)
    facts = [builtin.VERSION, train.sha256, templates[0].source, templates[1].source, data.normalise, seed]
    folder = settings.models / f"t5-tiny-{_hash(facts)}"

    def build(empty: Path) -> None:
        builtin.build(empty, texts_of(train, templates, data), seed)
        model_store.seal(empty, builtin.NAME)

    make_once(folder, build, lambda it: model_store.damage(it) is None, waiting=journal.progress)
    return folder


def texts_of(train: Source, templates: tuple[Template, Template], data: DataSpec) -> list[str]:
    """Inputs and targets of the first rows, from which the built-in model's tokenizer is learnt; at least one row."""
    lines = LineReader(train.path, train.name, train.param)
    sieve = Sieve(lines, RowReader(*templates, normalise=data.normalise), Seen())
    rows = list(islice(sieve.good_rows(), builtin.TOKENIZER_ROWS))
    if not rows:
        _refuse_unusable(sieve, train, data)
    return [text for texts in rows for text in (texts.input, texts.target)]


def key_of(sources: list[Source], templates: tuple[Template, Template], encoder: Encoder, data: DataSpec) -> str:
    """Name of the prepared dataset: whatever decides its bytes, hashed. The seed does not."""
    return _hash(
        [
            FORMAT,
            [source.sha256 for source in sources],
            [one.source for one in templates],
            encoder.fingerprint,
            data.max_input_tokens,
            data.max_target_tokens,
            data.normalise,
            data.validation if isinstance(data.validation, float) else None,
            data.max_invalid_fraction,  # does not change a byte, but decides whether there is a dataset at all
        ]
    )


def write(
    folder: Path,
    *,
    sources: list[Source],
    templates: tuple[Template, Template],
    encoder: Encoder,
    data: DataSpec,
    journal: Journal,
) -> None:
    """Read all rows, write the prepared dataset into `folder`. Raises BadData: `too_many_invalid_rows`, `no_rows`."""
    rows, seen, keys = RowReader(*templates, normalise=data.normalise), Seen(), array("Q")
    truncated, tokens, unknown = {"input": 0, "target": 0}, {"input": 0, "target": 0}, 0
    sieves: list[Sieve] = []
    ends: list[int] = []
    with Writer(folder, encoder.vocabulary) as writer, _rejections(folder) as rejected:
        for source in sources:
            lines = LineReader(source.path, source.name, source.param)
            sieve = Sieve(lines, rows, seen, partial(_reject, rejected, source.name))
            good = sieve.good_rows()
            while chunk := list(islice(good, _CHUNK)):
                inputs = encoder.encode([texts.input for texts in chunk], data.max_input_tokens)
                targets = encoder.encode([texts.target for texts in chunk], data.max_target_tokens)
                writer.add(inputs.ids, targets.ids)
                keys.extend(texts.key for texts in chunk)
                for side, encoded in (("input", inputs), ("target", targets)):
                    truncated[side] += encoded.truncated
                    tokens[side] += encoded.tokens
                    unknown += encoded.unknown
                journal.progress((len(sieves) + lines.fraction) / len(sources))
            _refuse_unusable(sieve, source, data)
            sieves.append(sieve)
            ends.append(writer.rows)
        parts = split(np.frombuffer(keys, np.uint64), ends, data.validation)
        report = {
            "rows_read": sum(sieve.read for sieve in sieves),
            "kept": writer.rows,
            "set_aside": dict(sum((sieve.set_aside for sieve in sieves), start=type(sieves[0].set_aside)())),
            "duplicates": sum(sieve.duplicates for sieve in sieves),
            "truncated_inputs": truncated["input"],
            "truncated_targets": truncated["target"],
            "normalised": dict(rows.normalised.most_common()),
            "train_rows": len(parts["train"]),
            "validation_rows": len(parts["validation"]),
            "input_tokens": tokens["input"],
            "target_tokens": tokens["target"],
            "unknown_tokens": unknown,
        }
        rejected.flush()
        writer.finish(parts, {"sources": {source.name: source.sha256 for source in sources}, "report": report})


def split(keys: Any, ends: list[int], validation: float | str) -> dict[str, Int64]:
    """Row numbers of training and validation. `keys` [rows] uint64 are hashes of the rows, `ends` where each file ends.

    A fraction is chosen by hash: the same rows whatever their order, and whatever rows come later. A fraction above 0
    of at least two rows is at least one row, and never all.
    """
    rows = np.arange(len(keys), dtype=np.int64)
    if isinstance(validation, str):
        return {"train": rows[: ends[0]], "validation": rows[ends[0] :]}
    # As fractions of 2**64, so that a fraction close to 1 does not overflow.
    chosen = keys < np.uint64(validation * 2.0**64)
    if validation > 0 and len(keys) >= 2:
        chosen[np.argmin(keys)] = True
        chosen[np.argmax(keys)] = False
    elif len(keys) == 1:
        chosen[:] = False  # a single row is learnt from
    return {"train": rows[~chosen], "validation": rows[chosen]}


def _refuse_unusable(sieve: Sieve, source: Source, data: DataSpec) -> None:
    sieve.refuse_too_many(data.max_invalid_fraction, source.name, sieve.read)
    if not sieve.kept:
        why = f"{sieve.read} read, {sieve.invalid} unusable, {sieve.duplicates} duplicates of earlier or training rows"
        raise BadData(
            f"{source.param}: no row of {source.name} is left to use ({why})", code="no_rows", param=source.param
        )


@contextmanager
def _rejections(folder: Path) -> Iterator[TextIO]:
    with open(folder / "rejected.jsonl", "w", encoding="ascii") as file:
        yield file


def _reject(file: TextIO, name: str, line: int, reason: str, excerpt: str) -> None:
    entry = {"file": name, "line": line, "reason": reason, "excerpt": excerpt}
    # ASCII: excerpts hold what many readers take for the end of a line.
    file.write(json.dumps(entry) + "\n")


def _opens(folder: Path) -> bool:
    try:
        PreparedDataset.open(folder)
    except BadData:
        return False
    return True


def _hash(facts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]
