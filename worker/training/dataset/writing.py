"""From the rows of a job to a prepared dataset, and to the first texts, which train the built-in tokenizer.

source ─blocks─▶ pool: rows → checks → templates → normalized → tokens ─encoded blocks, in order─▶ assembly:
    duplicates rejected, files appended, committed every few blocks ─after the last─▶ split, report, manifest
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from itertools import chain, islice
from pathlib import Path

from jobs.errors import BadData
from jobs.spec import DataSpec
from worker.training.dataset.assembly import Assembly, EncoderPool, cores
from worker.training.dataset.data import FORMAT
from worker.training.dataset.encoding import Recipe, RowTask
from worker.training.journal import Journal
from worker.training.rows.characters import Rewriter
from worker.training.rows.csv_rows import CsvFormat
from worker.training.rows.reading import format_of, naming_part, open_source
from worker.training.rows.row import Reader, RowCounts
from worker.training.rows.row_filter import RowFilter, parse_rows
from worker.training.rows.sources import Source
from worker.training.rows.text import RowReader, Templates, Texts
from worker.training.store import content_key

BLOCK_ROWS = 500

log = logging.getLogger("longhaul.trainer")


def dataset_key(
    sources: Sequence[tuple[Source, Templates]],
    tokenizer: str,
    data: DataSpec,
    task: RowTask,
    format: int | None = None,
) -> str:
    """Name of the prepared dataset: whatever decides its bytes, hashed; so neither the seed nor the weights of sources.

    `sources` with their templates; `tokenizer`: a fingerprint; `format`: None for that of this version.
    """
    named = [[one and one.decides for one in both] for _, both in sources]
    return content_key(
        [
            FORMAT if format is None else format,
            [[format_of(file, source.format, source.param) for file in source.files] for source, _ in sources],
            [each for source, _ in sources for each in source.hashes],
            named[0] if all(each == named[0] for each in named) else named,
            tokenizer,
            [task.name, task.variant, task.limits(data)],
            data.csv_lists,
            data.csv_quoting,
            data.normalize,
            data.validation if isinstance(data.validation, float) else None,
            data.max_invalid_fraction,  # does not change a byte, but decides whether there is a dataset at all
        ]
    )


def write_dataset(
    folder: Path,
    *,
    sources: Sequence[tuple[Source, Templates]],
    model: Path,
    embeddings: int,
    data: DataSpec,
    task: RowTask,
    journal: Journal,
    workers: int | None = None,
) -> None:
    """Prepare all rows in `folder`, by the templates of each source, with this many processes (None: one per core).

    Resumes where an earlier one ended.

    Raises BadData (`too_many_invalid_rows`, `no_rows`), Rejected as `RowTask.tried`, HostOutOfMemory (`worker_killed`).
    """
    limits = task.limits(data)
    tokenizer = task.tokenizer(model)
    tokenizer.check_vocabulary(embeddings)
    rewrites = tokenizer.rewrites() if data.normalize else None
    rewriter = None if rewrites is None else Rewriter(rewrites)
    first = islice(_row_filter(*sources[0], data, rewriter).good_rows(), BLOCK_ROWS)
    tokenizer = task.tried(tokenizer, [texts for _, texts in first], limits)
    with Assembly(folder, tokenizer.size, len(sources), data.validation) as assembly:
        if any(assembly.blocks):
            log.info("resuming behind the %d rows that were prepared before", assembly.rows)
        for number, (source, both) in enumerate(sources):
            if number == len(assembly.ends):
                recipe = Recipe(task.encoder(tokenizer, limits), both, rewrites)
                reader = open_source(source, _columns(both), CsvFormat.of(data))
                with EncoderPool(recipe, cores() if workers is None else workers) as pool:
                    _add_source(assembly, pool, reader, len(sources), journal)
            check_usable(assembly.source_counts[number], source, data)
        names = [source.name for source, _ in sources]
        assembly.finish(names, limits, task.label_report(tokenizer))
    folder.chmod(0o755)
    for file in folder.iterdir():
        file.chmod(0o444)  # other users read it; nobody writes


def _add_source(assembly: Assembly, pool: EncoderPool, reader: Reader, sources: int, journal: Journal) -> None:
    number = len(assembly.ends)

    def progressed() -> None:
        journal.progress((number + reader.fraction) / sources)

    blocks = reader.blocks(BLOCK_ROWS)
    for _ in islice(blocks, assembly.blocks[number]):  # read, but not parsed
        progressed()
    with closing(pool.encoded(blocks)) as encoded:
        for block in encoded:
            assembly.add(block)
            progressed()
    assembly.end_source()


def check_usable(counts: RowCounts, source: Source, data: DataSpec) -> None:
    """Raise BadData (`too_many_invalid_rows`, `no_rows`) if too few rows of a source are usable."""
    with naming_part(source.files, source.param, source.format, CsvFormat.of(data)):
        counts.check_invalid(data.max_invalid_fraction, source.name, counts.read)
        if not counts.kept:
            why = (
                f"{counts.read} read, {counts.invalid} unusable, {counts.left_out} left out, "
                f"{counts.duplicates} duplicates of earlier or training rows"
            )
            raise BadData(
                f"{source.param}: no row of {source.name} is left to use ({why})", code="no_rows", param=source.param
            )


def labels_of(
    sources: Sequence[tuple[Source, Templates]], data: DataSpec, task: RowTask, journal: Journal
) -> Counter[str]:
    """How many rows have each label, in all sources together; rows that cannot be used are not looked at."""
    found: Counter[str] = Counter()
    for number, (source, both) in enumerate(sources):
        reader, row_reader = open_source(source, _columns(both), CsvFormat.of(data)), RowReader(*both, None)
        for block in reader.blocks(BLOCK_ROWS):
            for _, texts in parse_rows(block.rows(), row_reader):
                if isinstance(texts, Texts):
                    found.update(task.labels_of(texts))
            journal.progress((number + reader.fraction) / len(sources))
    return found


def first_texts(train: Sequence[tuple[Source, Templates]], data: DataSpec, most: int) -> list[str]:
    """The texts of the first rows, at least one of each source and at most so many of all: what the tokenizer
    is learned from."""
    found = []
    for source, both in train:
        row_filter = _row_filter(source, both, data, _typography(data))
        rows = list(islice(row_filter.good_rows(), max(1, most // len(train))))
        if not rows:
            check_usable(row_filter.counts, source, data)
        found += [text for _, texts in rows for text in texts.all]
    return found


def _row_filter(source: Source, templates: Templates, data: DataSpec, rewrite: Rewriter | None) -> RowFilter:
    blocks = open_source(source, _columns(templates), CsvFormat.of(data)).blocks(BLOCK_ROWS)
    return RowFilter(chain.from_iterable(block.rows() for block in blocks), RowReader(*templates, rewrite))


def _columns(templates: Templates) -> set[str]:
    return {column for one in templates if one for column in one.columns}


def _typography(data: DataSpec) -> Rewriter | None:
    return Rewriter() if data.normalize else None
