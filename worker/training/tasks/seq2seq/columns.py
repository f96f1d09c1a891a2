"""Which columns of the data are learned from: an input and a target."""

from __future__ import annotations

from collections.abc import Collection

from jobs.errors import BadData
from worker.training.rows.text import Template, template

RECIPE_INPUT = "Write the directions. {title}: {ingredients}"
RECIPE_TARGET = "{directions}"
RECIPE_COLUMNS = frozenset({"title", "ingredients", "directions"})


def choose_templates(input: str | None, target: str | None, columns: Collection[str]) -> tuple[Template, Template]:
    """The templates of a job: those it names, else recognized by the columns of the data.

    Raises BadData (`unknown_column`, `no_usable_columns`), Rejected (`bad_template`).
    """
    # A name may hold half a surrogate pair, which no message can.
    found = ", ".join(sorted(columns)[:50]).encode("utf-8", "backslashreplace").decode() or "none"
    if input is not None and target is not None:
        chosen = template(input, "data.input"), template(target, "data.target")
        for param, one in zip(("data.input", "data.target"), chosen, strict=True):
            for column in one.columns:
                if column not in columns:
                    raise BadData(
                        f"{param}: no row has a column {column!r}; there are: {found}",
                        code="unknown_column",
                        param=param,
                        hint="name one of these columns, or a template over them with the names in braces",
                    )
        return chosen
    if "input" in columns and "target" in columns:
        return template("input", "data.input"), template("target", "data.target")
    if RECIPE_COLUMNS.issubset(columns):
        return template(RECIPE_INPUT, "data.input"), template(RECIPE_TARGET, "data.target")
    raise BadData(
        f"no columns to learn from are recognized; the data has: {found}",
        code="no_usable_columns",
        param="data.input",
        hint='say which: data.input and data.target, each a column\'s name or a template such as "Answer: {question}"; '
        "without them, columns input and target, or title, ingredients and directions, are recognized",
    )
