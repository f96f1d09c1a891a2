"""What is wrong with a specification, in a user's words: all of it at once."""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from jobs.errors import UserError
from jobs.text.units import escaped

# -- json mistakes -----------------------------------------------------------------------------------------------------
# What is wrong with text that is not JSON, in words of JSON instead of the parser's.


def json_mistake(error: json.JSONDecodeError) -> str:
    """Such as `an extra comma before } at line 3, column 14`: the place of the mistake, both counted from 1."""
    place = error.pos
    if error.msg.startswith("Expecting") and error.doc[place : place + 1] in ("}", "]"):
        place = len(error.doc[:place].rstrip()) - 1  # Python 3.13 says itself that it is the comma
    bracket = error.doc[place + 1 :].lstrip()[:1] if error.doc[place : place + 1] == "," else ""
    if bracket not in ("}", "]"):
        return f"{error.msg} at line {error.lineno}, column {error.colno}"
    line, column = error.doc.count("\n", 0, place) + 1, place - error.doc.rfind("\n", 0, place)
    return f"an extra comma before {bracket} at line {line}, column {column}"


# -- wrong spec --------------------------------------------------------------------------------------------------------

KEYS_OF_A_JOB = "`longhaul keys` and docs/reference/job.md list the keys of a job"
UNKNOWN, MISSING = "extra_forbidden", "missing"
ONE_SOURCE, SOURCES = "one source", "several sources"
"""How the specification tells its forms of `data.train` apart; users never wrote this."""
LISTED, LONGEST = 20, 200
"""Errors that are named; characters of a key."""
_IN_JSON = {
    "model_type": "must be an object", "model_attributes_type": "must be an object", "dict_type": "must be an object",
    "list_type": "must be an array",
    "string_type": "must be a string", "int_type": "must be an integer", "float_type": "must be a number",
    "bool_type": "must be true or false", MISSING: "is required", UNKNOWN: "unknown key",
}  # fmt: skip
"""By pydantic's type of error, where its words are Python's."""
_UNQUOTED = ("int_type", "float_type", "bool_type")
_NUMBER_OR_WORD = re.compile(r"-?\d+(\.\d+)?([eE][-+]?\d+)?|true|false")
ELSEWHERE = {
    "lr": "training.learning_rate", "lr_scheduler_type": "training.lr_scheduler",
    "num_train_epochs": "training.epochs", "n_epochs": "training.epochs", "num_epochs": "training.epochs",
    "per_device_train_batch_size": "training.batch_size", "train_batch_size": "training.batch_size",
    "gradient_accumulation_steps": "training.batch_size", "micro_batch_size": "memory.micro_batch",
    "warmup_steps": "training.warmup_ratio", "early_stopping_patience": "training.early_stopping.patience",
    "gradient_checkpointing": "memory.activation_checkpointing", "optim": "memory.optimizer",
    "torch_empty_cache_steps": "memory.empty_cache_steps", "torch_compile": "speed.compile",
    "logging_steps": "log.every_steps", "eval_steps": "evaluation.every_steps", "save_steps": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep", "load_best_model_at_end": "checkpoint.best",
    "metric_for_best_model": "checkpoint.best", "report_to": "integrations",
    "wandb_project": "integrations.wandb.project", "wandb_entity": "integrations.wandb.entity",
    "training_file": "data.train", "train_file": "data.train", "dataset": "data.train", "datasets": "data.train",
    "label": "data.target", "label_column": "data.target", "text_column": "data.input",
    "source": "data.input", "source_column": "data.input", "target_column": "data.target",
    "dataset_text_field": "data.target", "validation_file": "data.validation", "val_set_size": "data.validation",
    "max_source_length": "data.max_input_tokens", "max_target_length": "data.max_target_tokens",
    "max_seq_length": "data.max_tokens", "max_length": "data.max_tokens", "sequence_len": "data.max_tokens",
    "cutoff_len": "data.max_tokens", "block_size": "data.max_tokens",
    "model_name": "model", "model_name_or_path": "model", "base_model": "model", "run_name": "name", "suffix": "name",
    "adapter": "method", "peft_config": "method", "lora": "method", "use_peft": "method",
    "lora_r": "method.rank", "r": "method.rank",
    "lora_alpha": "method.alpha", "lora_dropout": "method.dropout", "target_modules": "method.targets",
    "lora_target_modules": "method.targets", "use_rslora": "method.rslora", "use_dora": "method.dora",
    "train_on_inputs": "task.loss_on", "assistant_only_loss": "task.loss_on", "completion_only_loss": "task.loss_on",
}  # fmt: skip
"""Names in other tools (Trainer, PEFT, TRL, axolotl, OpenAI): the key that does the same here."""
_ROWS_OF_A_STEP = "It counts the rows of one step: per_device_train_batch_size × gradient_accumulation_steps × GPUs."
_TOKENS = "It is for causal models; others have data.max_input_tokens, and seq2seq data.max_target_tokens, too."
OTHERWISE = {
    "per_device_train_batch_size": _ROWS_OF_A_STEP, "gradient_accumulation_steps": _ROWS_OF_A_STEP,
    "warmup_steps": "It is the share of all steps, not their number.",
    "gradient_checkpointing": "Every n-th layer is recomputed; 0: none.",
    "load_best_model_at_end": "It names the metric, and is on by default.",
    "max_seq_length": _TOKENS, "max_length": _TOKENS, "sequence_len": _TOKENS, "cutoff_len": _TOKENS,
    "block_size": _TOKENS,
    "train_on_inputs": "\"all\" learns the prompt, too.", "assistant_only_loss": "\"replies\" is the default.",
    "completion_only_loss": "\"replies\" is the default.",
}  # fmt: skip
"""Where the key here wants another value."""
_PRECISION = "weights are bf16, and float16 for LoRA where the GPU has no bf16 (method.base_dtype)"
_WHEN = "every_steps of log, evaluation and checkpoint say when"
_PUSH = "`longhaul push` sends the model to the hub, once the job has succeeded"
WITHOUT_KEY = {
    "fp16": _PRECISION, "bf16": _PRECISION, "output_dir": "the model is always in runs/JOB/model",
    "overwrite_output_dir": "each job has a directory of its own",
    "group_by_length": "rows are always grouped by length",
    "dataloader_num_workers": "rows are tokenized before training, so no workers are needed",
    "resume_from_checkpoint": "a job resumes by itself; resume_from lets a new job continue from an old one",
    "eval_strategy": _WHEN, "evaluation_strategy": _WHEN, "save_strategy": _WHEN, "logging_strategy": _WHEN,
    "per_device_eval_batch_size": "how many rows are evaluated at once follows from the memory plan",
    "do_train": "a job trains; `kind: evaluate` only evaluates", "do_eval": "`kind: evaluate` only evaluates",
    "push_to_hub": _PUSH,
    "hub_model_id": _PUSH,
}  # fmt: skip
"""Names in other tools that need no key: why."""

NOT_QUANTIZED = (
    "models are not trained in 4 or 8 bits: merged into 16, the adapters would make another model than the one that "
    "was trained; with method: lora the model takes 2 bytes a weight, and `longhaul plan` says what fits (docs/lora.md)"
)
_QUANTIZED = re.compile(
    r"^(?!.*(adam|optim)).*([48]|four|eight)[-_ ]?bit|^int[48]$|bitsandbytes|^bnb|nf4|fp4|qlora|quanti[sz]",
    re.IGNORECASE,
)
"""What other tools call a model whose weights have 4 or 8 bits."""


def quantized(name: object) -> str:
    """What to append where a key or value asks for a quantized model; '' for any other."""
    return f"; {NOT_QUANTIZED}" if isinstance(name, str) and _QUANTIZED.search(name) else ""


def explain(
    error: ValidationError,
    model: type[BaseModel],
    *,
    keys: str | None = None,
    further: Mapping[tuple[str, ...], str] = MappingProxyType({}),
) -> UserError:
    """Every error, unknown keys before all others: the dotted key, the value, and what it may be.

    `model`: what was validated. `keys` says which keys there are; None: it is a job. `further`: what else
    is wrong, by key.
    """
    by_key: dict[tuple[str, ...], list[Any]] = {}
    for entry in error.errors(include_url=False):
        by_key.setdefault(_key(entry["loc"], model), []).append(entry)
    unknown = [key for key, entries in by_key.items() if entries[0]["type"] == UNKNOWN]
    without = WITHOUT_KEY if keys is None else {}
    keys = keys or KEYS_OF_A_JOB
    near = {key: [] if key[-1] in without else _nearest(key, model, by_key) for key in unknown[:LISTED]}
    # What a misspelt key leaves missing is not the user's mistake: the misspelt one is.
    excused = {path[:depth] for paths in near.values() for path in paths for depth in range(1, len(path) + 1)}
    meant = {key: without.get(key[-1]) or _question(key, paths) for key, paths in near.items()}
    wrong = [*unknown, *(
        key for key, entries in by_key.items()
        if entries[0]["type"] != UNKNOWN and not (entries[0]["type"] == MISSING and _without_places(key) in excused)
    ), *(key for key in further if key not in by_key)]  # fmt: skip
    texts = [
        f"{_dotted(key)}: {text}" if key else text
        for key in wrong[:LISTED]
        for text in [_said(key, by_key[key], meant.get(key)) if key in by_key else further[key]]
    ]
    param = _dotted(wrong[0]) or None
    if len(wrong) == 1:
        said, _, question = texts[0].partition("; did you mean ")
        about_keys = unknown or (wrong[0] in by_key and by_key[wrong[0]][0]["type"] == MISSING)
        reason = (without.get(wrong[0][-1]) if unknown else None) or NOT_QUANTIZED
        plain = said.removesuffix(f"; {reason}")
        general = [reason] if plain != said else [keys] if about_keys else []
        hints = [*([f"did you mean {question}"] if question else []), *general]
        return UserError(plain, param=param, hint=" ".join(hints) or None)
    head = f"{len(wrong)} errors" + (f", the first {LISTED} of them:" if len(wrong) > LISTED else ":")
    message = "\n".join([head, *(f"- {text}" for text in texts)])
    return UserError(message, param=param, hint=keys if unknown else None)


def _key(place: Sequence[int | str], model: type[BaseModel]) -> tuple[str, ...]:
    """As the user wrote it: without the tags of union members ("literal['auto']", "constrained-float")."""
    names = [
        str(name) for above, name in zip(("", *place), place, strict=False)
        if above != "train" or name not in (ONE_SOURCE, SOURCES)
    ]  # fmt: skip
    key: list[str] = []
    while names:
        key.append(name := names.pop(0))
        if name.isdecimal():  # its place in a list
            continue
        field = model.model_fields.get(name)
        if field is None or typing.get_origin(field.annotation) is dict:
            return (*key, *names)
        if not (parts := _parts(field)):
            return tuple(key)
        model = parts[0]
        if len(parts) > 1 and names:  # the tag tells them apart
            model = next(part for part in parts if names[0] in typing.get_args(part.model_fields["type"].annotation))
            names.pop(0)
    return tuple(key)


def _without_places(key: Sequence[str]) -> tuple[str, ...]:
    """The key of each item of a list."""
    return tuple(name for name in key if not name.isdecimal())


def _dotted(key: Sequence[str]) -> str:
    """A name that is no plain word in quotes, with escapes for what a terminal obeys."""
    names = (
        name if re.fullmatch(r"[\w\- ]+", name) else escaped(json.dumps(name[:LONGEST], ensure_ascii=False))
        for name in key
    )
    return ".".join(names)[:LONGEST]


def _said(key: tuple[str, ...], entries: list[Any], meant: str | None) -> str:
    """Of one key."""
    first = entries[0]
    texts = [_IN_JSON.get(entry["type"]) or _in_our_words(entry["msg"]) for entry in entries]
    if first["type"] == UNKNOWN:
        return texts[0] + (quantized(key[-1]) or (f"; {meant}" if meant else ""))
    if first["type"] == MISSING:
        return texts[0]
    text = "; or: ".join([texts[0], *sorted({*texts} - {texts[0]})])
    given = first["input"]
    about = quantized(given) if key and key[-1].endswith("dtype") else ""
    said = next((entry["input"] for entry in entries if isinstance(entry["input"], str)), given)  # an item of a list
    about = about or _meant_value(first.get("ctx", {}).get("given", said), entries)
    return text + about if isinstance(given, Mapping) else f"{text} (got {shorten(given)}){about}"


def _question(key: tuple[str, ...], paths: Sequence[tuple[str, ...]]) -> str:
    """Whether these were meant by a key that there is not; '' for none."""
    if not paths:
        return ""
    names = " or ".join(_named(path, key) for path in paths)
    otherwise = OTHERWISE.get(key[-1])
    if otherwise and not ".".join(paths[0]).endswith(ELSEWHERE[key[-1]]):  # a key of that name is meant
        otherwise = None
    return f"did you mean {names}?" + (f" {otherwise}" if otherwise else "")


def _meant_value(given: object, entries: list[Any]) -> str:
    """A question whether this was meant; '' where nothing is near."""
    if not isinstance(given, str):
        return ""
    if any(entry["type"] in _UNQUOTED for entry in entries) and _NUMBER_OR_WORD.fullmatch(given):
        return f"; did you mean {given}, without quotes?"
    legal = [value for entry in entries for value in re.findall("'([^']+)'", entry.get("ctx", {}).get("expected", ""))]
    near = [value for value in legal if value.lower() == given.lower()] or get_close_matches(given, legal, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _in_our_words(message: str) -> str:
    said = re.sub(r" after validation, not (more|\d+)$", "", message.removeprefix("Value error, "))
    return re.sub(r"^(Input|String|Dictionary|List) should ", "must ", said)


def _nearest(
    key: tuple[str, ...], model: type[BaseModel], wrong: Mapping[tuple[str, ...], list[Any]]
) -> list[tuple[str, ...]]:
    """The keys that may be meant by one that there is not: those of that name elsewhere, or else the one that is spelt
    nearly so, a required one that is missing before all others."""
    paths = list(_paths(model))
    *above, last = key  # the last name is a key, whatever it looks like
    key = (*_without_places(above), last)
    here = tuple(ELSEWHERE[last].split(".")) if last in ELSEWHERE else None
    if here is not None and (named := [path for path in paths if path[-len(here) :] == here]):
        return named
    if key in paths:
        return [key]
    if (nested := tuple(".".join(key).split("."))) in paths:
        return [nested]
    lists = [path for path in _lists(model) if key[: len(path)] != path]  # `--set` reaches nothing in their items
    settable = [path for path in paths if not any(path[: len(each)] == each != path for each in lists)]
    if moved := [path for path in settable if path[-1] == key[-1]]:
        return moved
    legal = [path[-1] for path in paths if path[:-1] == key[:-1]]
    missing = [name for name in legal if wrong.get((*key[:-1], name), [{"type": None}])[0]["type"] == MISSING]
    near = get_close_matches(key[-1], missing, n=1) or get_close_matches(key[-1], legal, n=1)
    return [(*key[:-1], name) for name in near]


def _named(path: Sequence[str], key: Sequence[str]) -> str:
    """A key that there is, whole, for one who wrote `key`."""
    if ".".join(path) == ".".join(_without_places(key)):
        return "".join(f'{{"{name}": ' for name in path) + "…" + "}" * len(path)
    return _dotted((*key[:-1], path[-1]) if path[:-1] == _without_places(key[:-1]) else path)


def _paths(model: type[BaseModel], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every key, those of the parts included."""
    for name, field in model.model_fields.items():
        yield (*above, name)
        yield from dict.fromkeys(path for part in _parts(field) for path in _paths(part, (*above, name)))


def _lists(model: type[BaseModel], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The keys whose values are lists of objects."""
    for name, field in model.model_fields.items():
        items = [typing.get_args(each) for each in _forms(field.annotation) if typing.get_origin(each) is list]
        for part in _parts(field):
            if (part,) in items:
                yield (*above, name)
            yield from _lists(part, (*above, name))


def _parts(field: FieldInfo) -> list[type[BaseModel]]:
    """The models of an object with keys of its own, one or several to choose from; none: it is something else."""
    found = _forms(field.annotation)
    return list(dict.fromkeys(each for each in found if isinstance(each, type) and issubclass(each, BaseModel)))


def _forms(annotation: Any) -> list[Any]:
    """What a value may be: the annotation, and what it consists of."""
    found = [annotation]
    for each in found:
        found += typing.get_args(each)
    return found


def shorten(value: object) -> str:
    """Its repr, but `true`, `false` and `null` as in JSON; in 80 characters at most."""
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
