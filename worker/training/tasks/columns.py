"""Which columns of the data are learned from: an input and a target."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from jobs.errors import BadData, Mistakes, Rejected
from jobs.spec import BUILTIN_MODELS, PAIR, builtin_task
from worker.training.dataset.tokens import Encoder, TokenizerState
from worker.training.rows.chat import CHAT_FIELDS, written
from worker.training.rows.text import Placeholder, Template, Templates, Texts, input_template, template
from worker.training.tasks.task import Prompt

# -- asked -------------------------------------------------------------------------------------------------------------
# Inputs of tasks that read one text and answer beside it, without a target.


def asked_input(tokenizer: TokenizerState, texts: Texts, limit: int) -> Prompt:
    """The input, at most `limit` tokens of it; of a chat its last turn, of a text without an input the text."""
    text = written(texts.turns[-1:]) if texts.turns else texts.input or texts.target
    encoded = Encoder(tokenizer).encode([text], limit)
    return Prompt(encoded.tokens.tolist(), text, cut=bool(encoded.full_lengths[0] > encoded.lengths[0]))


# -- columns -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowFormat:
    """Rows that are recognized by the names of their columns, in any case."""

    name: str
    """For people."""
    input: str | None
    """None: the target is all there is."""
    target: str

    @property
    def columns(self) -> frozenset[str]:
        """Those that it needs."""
        made = [template(self.target, ""), *([] if self.input is None else [input_template(self.input)])]
        return frozenset(one.column for each in made for one in each.placeholders)

    def over(self, columns: Mapping[str, str]) -> Templates:
        """Its templates; `columns`: the real name of each."""

        def named(text: str) -> str:
            return re.sub(r"\{(\w+)", lambda found: "{" + columns[found[1]], text)

        input = None if self.input is None else input_template(named(self.input))
        return input, template(named(self.target), "data.target")


RECIPE_INPUT, RECIPE_TARGET = "Write the directions. {title}: {ingredients}", "{directions}"
PAIRS = (
    RowFormat("instruction, input and target", "{instruction} {input?}", "{target}"),
    RowFormat("input and target", "{input}", "{target}"),
    RowFormat("recipes", RECIPE_INPUT, RECIPE_TARGET),
    RowFormat("recipes", RECIPE_INPUT, "{instructions}"),
    RowFormat("OpenAI chat", "{messages.prompt}", "{messages.completion}"),
    RowFormat("ShareGPT chat", "{conversations.prompt}", "{conversations.completion}"),
    RowFormat("SQuAD", "question: {question} context: {context}", "{answers.text[0]}"),
    RowFormat("question, context and answer", "question: {question} context: {context?}", "{answer}"),
    RowFormat("question, passage and answer", "question: {question} context: {passage?}", "{answer}"),
    RowFormat("Alpaca", "{instruction} {input?}", "{output}"),
    RowFormat("instruction, input and response", "{instruction} {input?}", "{response}"),
    RowFormat("Dolly", "{instruction} {context?}", "{response}"),
    RowFormat("instruction, context and output", "{instruction} {context?}", "{output}"),
    RowFormat("prompt and completion", "{prompt}", "{completion}"),
    RowFormat("prompt and response", "{prompt}", "{response}"),
    RowFormat("instruction and output", "{instruction}", "{output}"),
    RowFormat("instruction and response", "{instruction}", "{response}"),
    RowFormat("question and answer", "{question}", "{answer}"),
    RowFormat("source and target", "{source}", "{target}"),
    RowFormat("inputs and targets", "{inputs}", "{targets}"),
    RowFormat("input_text and target_text", "{input_text}", "{target_text}"),
    RowFormat("input and output", "{input}", "{output}"),
    RowFormat("document and summary", "{document}", "{summary}"),
    RowFormat("article and summary", "{article}", "{summary}"),
    RowFormat("article and highlights", "{article}", "{highlights}"),
    RowFormat("dialogue and summary", "{dialogue}", "{summary}"),
    RowFormat("text and summary", "{text}", "{summary}"),
    RowFormat("text and label", "{text}", "{label}"),
    RowFormat("OpenOrca", "{question}", "{response}"),
)
"""Rows with an input and a target, in order: the first whose columns are all there is meant."""
WHOLE = (
    RowFormat("OpenAI chat", None, "{messages}"),
    RowFormat("ShareGPT chat", None, "{conversations}"),
    *(each for each in PAIRS if "chat" not in each.name),
    RowFormat("text", None, "{text}"),
)
"""The same for models that learn every reply of a chat, or plain text."""
_TEXTS = ("text", "sentence", "question", "utterance", "content", "review")
_LABELS = ("label", "labels", "intent", "category")
_JOINED = (
    ("premise", "hypothesis"), ("sentence1", "sentence2"), ("question1", "question2"), ("question", "sentence"),
    ("text1", "text2"),
)  # fmt: skip
"""Two texts that earlier versions recognized, and read as one with words in front."""
_PAIRS = (*_JOINED, ("query", "passage"), ("text", "text_pair"))
_SINGLE = tuple(RowFormat(f"{text} and {label}", f"{{{text}}}", f"{{{label}}}") for text in _TEXTS for label in _LABELS)


def _as_pair(one: str, other: str) -> str:
    return f"{{{one}}} {PAIR} {{{other}}}"


def _two_texts(
    columns: Sequence[tuple[str, str]], input: Callable[[str, str], str], labels: Sequence[str] = _LABELS[:2]
) -> Sequence[RowFormat]:
    return [
        RowFormat(f"{one}, {other} and {label}", input(one, other), f"{{{label}}}")
        for one, other in columns
        for label in labels
    ]


LABELLED = (*_two_texts(_PAIRS, _as_pair), *_SINGLE)
"""The same for texts with labels; rows with two texts first, for they may be recognized by one of them as well."""
LABELLED_BEFORE = (*_two_texts(_JOINED, lambda one, other: f"{one}: {{{one}}} {other}: {{{other}}}"), *_SINGLE)
"""The same as earlier versions read them."""
_SCORES = ("score", "rating", "stars", "similarity", "similarity_score", "label", "labels")
SCORED = (
    *_two_texts(_PAIRS, _as_pair, _SCORES),
    *(RowFormat(f"{text} and {score}", f"{{{text}}}", f"{{{score}}}") for text in _TEXTS for score in _SCORES),
)
"""The same for texts with scores."""


_OF_TASKS = {"classification": LABELLED, "regression": SCORED, "seq2seq": PAIRS, "causal": WHOLE}
_NOT_LEARNED = (
    ({"chosen", "rejected"}, "preferences, as DPO learns them, which Longhaul does not"),
    ({"tokens", "ner_tags"}, "a label for each word, for a head that Longhaul does not train"),
    ({"tokens", "pos_tags"}, "a label for each word, for a head that Longhaul does not train"),
    ({"tokens", "tags"}, "a label for each word, for a head that Longhaul does not train"),
)
"""Columns of well-known formats that no task here learns from, and what these are."""
LONGEST = 200
"""Characters of a column's name that a message repeats; longer ones are not compared with a misspelt one."""


def choose_templates(
    input: str | None,
    target: str | None,
    columns: Collection[str],
    name: str,
    formats: Sequence[RowFormat],
    elsewhere: Collection[str] = (),
    *,
    pairs: bool = False,
) -> Templates:
    """The templates of a source (`name`): those of the job, else recognized by its columns as one of `formats`.

    `elsewhere`: columns of the job's other sources, which this one may lack where they are optional. `pairs`: whether
    the task reads pairs of texts.

    Raises BadData (`unknown_column`, `no_usable_columns`), Rejected (`bad_template`).
    """
    if target is not None:
        mistakes, chosen = Mistakes(), []
        for param, text in (("data.input", input), ("data.target", target)):
            if text is None:
                continue
            with mistakes.kept_back():
                chosen.append(template(text, param) if param == "data.target" else input_template(text))
                if chosen[-1].pair is not None and not pairs:
                    raise _no_pairs(chosen[-1].pair)
                for placeholder in chosen[-1].placeholders:
                    if not (
                        _is_known(placeholder, columns) or (placeholder.optional and _is_known(placeholder, elsewhere))
                    ):
                        mistakes.add(_unknown(placeholder, param, columns, name))
        mistakes.raise_all()
        return None if input is None else chosen[0], chosen[-1]
    names = _by_lower_case(columns)
    if (found := recognize(columns, formats)) is not None:
        return found.over(names)
    others = [(task, recognize(columns, known)) for task, known in _OF_TASKS.items() if known is not formats]
    languages = sorted(name for name in columns if name.lower().startswith("translation.") and len(name) < LONGEST)
    if len(languages) > 1:
        first, second = (f"{{{name}}}" for name in languages[:2])
        hint = f"say which way: data.input: {first} and data.target: {second}, or the reverse"
    elif unlearned := next((what for known, what in _NOT_LEARNED if known <= names.keys()), None):
        hint = f"these are rows of {unlearned}"
        if "chosen" in names:
            prompt = f"--set {shlex.quote('data.input=' + names['prompt'])} " if "prompt" in names else ""
            hint += (
                f"; to learn the chosen replies alone: {prompt}--set {shlex.quote('data.target=' + names['chosen'])}"
            )
    elif of_another := next(((task, found.name) for task, found in others if found is not None), None):
        task, read_as = of_another
        set_task = "set task: regression, and " if task == "regression" else ""  # auto does not take it
        builtin = next(model for model in BUILTIN_MODELS if builtin_task(model, task) == task)
        hint = (
            f"rows of {read_as} are for the task {task}: {set_task}take a model for it, such as {builtin}; or say what "
            "to learn from, with data.input and data.target"
        )
    else:
        hint = say_which(columns)
    raise BadData(
        f"no columns to learn from are recognized in {name}; it has: {_listed(columns)}",
        code="no_usable_columns",
        param="data.input",
        hint=hint,
    )


def _no_pairs(pair: tuple[Template, Template]) -> Rejected:
    one, other = (each.source for each in pair)
    return Rejected(
        f"data.input names a pair of texts, {one} and {other}, and only classifiers and regressions read pairs",
        code="bad_template",
        param="data.input",
        hint=f'for one text of both, write a template: "{one} {other}"',
    )


def say_which(columns: Collection[str]) -> str:
    """The hint where nothing is known of the columns but their names."""
    return f"say which: data.input and data.target, each a column's name or a template such as {_example(columns)}"


def recognize(columns: Collection[str], formats: Sequence[RowFormat]) -> RowFormat | None:
    """The format of rows with these columns; None: it is none of these."""
    names = _by_lower_case(columns)
    return next((each for each in formats if each.columns <= names.keys()), None)


def _by_lower_case(columns: Collection[str]) -> dict[str, str]:
    return {name.lower(): name for name in sorted(columns)}  # of two that differ in case, the lower-case one


def _is_known(placeholder: Placeholder, columns: Collection[str]) -> bool:
    if placeholder.text in columns or placeholder.name in columns:
        return True
    if placeholder.column not in columns or not (placeholder.path or placeholder.as_json):
        return False
    if not placeholder.path:
        return True
    first, *rest = placeholder.path
    of_object, of_items = _fields(f"{placeholder.column}.", columns), _fields(f"{placeholder.column}[0].", columns)
    if isinstance(first, str):
        legal = of_object | (set(CHAT_FIELDS) if of_items else set())
        return not legal or first in legal or first in CHAT_FIELDS
    return not of_items or not rest or not isinstance(rest[0], str) or rest[0] in of_items


def _fields(beginning: str, columns: Collection[str]) -> set[str]:
    """What follows this beginning in the names."""
    return {name.removeprefix(beginning) for name in columns if name.startswith(beginning)}


def _candidates(placeholder: Placeholder, columns: Collection[str]) -> list[str]:
    """What may be meant by one that is not known, as it is written in a template."""
    index = next((step for step in placeholder.path if isinstance(step, int)), 0)
    found = set()
    for name in columns:
        column, of_items, field = name.partition("[0].")
        if len(name) < LONGEST:
            found |= {f"{column}[{index}].{field}", *(f"{column}.{one}" for one in CHAT_FIELDS)} if of_items else {name}
    return sorted(found)


def _unknown(placeholder: Placeholder, param: str, columns: Collection[str], source: str) -> BadData:
    near = difflib.get_close_matches(placeholder.name, _candidates(placeholder, columns), 1)
    hint = "name one of these columns, or a template over them with the names in braces"
    return BadData(
        f"{param}: no row of {source} has a column {placeholder.name!r}; there are: {_listed(columns)}",
        code="unknown_column",
        param=param,
        hint=f"did you mean {near[0]!r}? Otherwise {hint}" if near else hint,
    )


def _example(columns: Collection[str]) -> str:
    """A template over a column that there is, if one is a plain word."""
    word = next((name for name in sorted(columns) if re.fullmatch(r"\w{1,40}", name)), "question")
    return f'"Answer: {{{word}}}"'


def _listed(columns: Collection[str]) -> str:
    # A name may hold half a surrogate pair, which no message can.
    names = (name[:LONGEST] for name in sorted(columns)[:50])
    return ", ".join(names).encode("utf-8", "backslashreplace").decode() or "none"
