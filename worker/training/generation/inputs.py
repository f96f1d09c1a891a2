"""From what somebody asks to what the model reads: the job's own template, checks, tokenizer and chat format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jobs.errors import Rejected
from jobs.generation import GenerateBody
from jobs.plan import Plan
from jobs.spec import JobSpec
from worker.training.rows.characters import Rewriter
from worker.training.rows.chat import asked_turns
from worker.training.rows.row import Defect
from worker.training.rows.text import RowReader, Texts, template
from worker.training.tasks.task import Prompt, Task


class Inputs:
    """Inputs of a job, by the tokenizer in a model folder."""

    def __init__(self, spec: JobSpec, plan: Plan, task: Task, folder: Path) -> None:
        """Raises Rejected (`tokenizer_unusable`, `chat_template`)."""
        self._task, self._data = task, spec.data
        tried = task.tried(task.tokenizer(folder), [], task.limits(spec.data))
        self._tokenizer = replace(tried, by_words=False)  # a shortcut, tried on a job's first rows only
        rewriter = Rewriter(self._tokenizer.rewrites()) if spec.data.normalize else None
        templates = dict.fromkeys((each.input, each.target, each.companions) for each in plan.data.sources_of(spec))
        self._readers = [
            RowReader(
                None if input is None else template(input, "data.input"),
                task.target_template(target, companions),
                rewriter,
            )
            for input, target, companions in templates
        ]

    def of(self, body: GenerateBody) -> list[Prompt | Defect]:
        """What the model reads, for each input. Of `rows`, one that cannot be used has its defect instead.

        Raises Rejected (`bad_input`).
        """
        if body.rows is not None:
            return [self._tried(row) for row in body.rows]
        try:
            if body.input is not None:
                return [self._prompt(self._readers[0].asked_text(body.input))]
            if body.row is not None:
                return [self._prompt(self._read(body.row))]
            assert body.messages is not None
            turns = asked_turns([message.model_dump() for message in body.messages])
            assert turns is not None
            return [self._prompt(self._readers[0].asked(turns))]
        except Defect as defect:
            raise Rejected(
                f"the input cannot be used: {defect}",
                code="bad_input",
                hint="give it as a row of the training data would be: `longhaul preview ID` shows some",
            ) from None

    def _tried(self, row: Mapping[str, Any]) -> Prompt | Defect:
        try:
            return self._prompt(self._read(row))
        except Defect as defect:
            return defect

    def _read(self, row: Mapping[str, Any]) -> Texts:
        """By the template of the first source that such a row fits. Raises the Defect of the first."""
        first: Defect | None = None
        for reader in self._readers:
            try:
                return reader.read_asked(row)
            except Defect as defect:
                first = first or defect
        assert first is not None
        raise first

    def _prompt(self, texts: Texts) -> Prompt:
        return self._task.asked(self._tokenizer, texts, self._data)
