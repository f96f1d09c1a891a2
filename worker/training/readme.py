"""README.md of a finished model: what it was made from, how, how well it does, and how to use it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version

from jobs.attempt import Noted, TrainResult
from jobs.disk.rundir import RunDir
from jobs.evaluation_metrics import metric_figure, metric_words
from jobs.plan import Plan, SourcePlan, limit_words
from jobs.process.secrets import redact
from jobs.reasons import Reason
from jobs.spec import DataSpec, WeightedSource
from jobs.text.units import format_change, format_figure
from jobs.trainer_facts import EvaluationFinished, Sample
from jobs.version import VERSION
from worker.training.adapters.method import BaseModel, Method
from worker.training.context import TrainingContext
from worker.training.dataset.split import evaluation_rows
from worker.training.network.model import generation_settings, sampling_settings

POINTS = 12
"""Evaluations in the curve."""
SAMPLES = 3
_USE = "## Use"


def readme(context: TrainingContext, method: Method, result: TrainResult, remark: str | None = None) -> str:
    """Of the model that `result` tells of, without secrets: it may become a public model card.

    `method`: the one that says what is delivered. `remark`: what else there is to say of it.
    """
    spec, plan, loaded = context.spec, context.plan, context.loaded
    step, loss = result.step, result.loss
    report = context.data.manifest.report
    evaluations = evaluations_of(context.run)
    base = plan.model.source + (f" at commit {plan.model.revision}" if plan.model.revision else "")
    loss_is = "mean squared error" if loaded.task.squares else f"nats per {loaded.task.unit}"
    measured = "not evaluated" if loss is None else f"validation loss {format_figure(loss)} ({loss_is})"
    training, resolved = spec.training, plan.resolved
    loaded_as = "bfloat16" if resolved.dtype == "bfloat16" else "float16, adapters in float32"
    dropout = "the model's own" if training.dropout is None else f"{training.dropout}"
    lines = [
        *_front_matter(plan.model.source if plan.model.revision else None, method.library),
        f"# {spec.name}",
        "",
        f"Model of job {context.run.id}: the weights after step {step:,} of {context.length.steps:,}, {measured}; "
        f"{loaded_as}.",
        *_chosen(context, result),
        "",
        "| | |",
        "|---|---|",
        f"| base model | {_cell(base)} ({loaded.parameters:,} parameters) |",
        *([f"| new | the {plan.task} head is new: {_cell(', '.join(plan.model.new))} |"] if plan.model.new else []),
        f"| data | {_cell(_named(spec.data.sources))}: {report.train_rows:,} rows to learn from, "
        f"{report.validation_rows:,} held out; prepared as `{context.data.folder.name}` |",
        f"| task | {plan.task} |",
        *(f"| rows of {_cell(each.name)} | {_read(each)} |" for each in plan.data.sources_of(spec)),
        f"| limits | {', '.join(f'{key} {_limit(spec.data, key):,}' for key in loaded.task.limit_keys)} |",
        f"| method | {_cell(loaded.method.description)}; {loaded.trained_parameters:,} weights trained |",
        f"| training | {training.epochs:,} epochs, batch size {training.batch_size:,}, learning rate "
        f"{training.learning_rate:g} ({training.lr_scheduler}, warm-up ratio {training.warmup_ratio:g}), "
        f"{resolved.optimizer}, weight decay {training.weight_decay:g}, dropout {dropout}, seed {training.seed} |",
        f"| made with | Longhaul {VERSION}, torch {version('torch')}, transformers {version('transformers')} |",
        "",
        *([f"{remark[0].upper()}{remark[1:]}.", ""] if remark else []),
        *_metrics(evaluations.get(0), evaluations.get(step), chosen=spec.checkpoint.best is not None),
        *_usage(context, method, evaluations, step),
        *_curve(context.run, evaluations),
        *_samples(evaluations.get(step)),
    ]
    return redact("\n".join(lines).rstrip() + "\n")


def exported(page: str, library: str, usage: Sequence[str], remark: str) -> str:
    """The page of a model, for an export of it that `library` opens. `usage`: Markdown; or, where the rest of the
    snippet stays as it is, the lines of Python that open it; or none: it is opened as the page says."""
    before, found, after = page.partition(f"\n{_USE}\n")
    assert found, "every page says how its model is used"
    section, next_title, rest = after.partition("\n## ")
    if usage and not usage[0].startswith("```"):
        kept = section[section.index("tokenizer = AutoTokenizer") :].splitlines()
        usage = ["```python", *usage, *kept]
    elif not usage:
        usage = section.strip().splitlines()
    names = {"merged": "transformers", "adapter": "peft"}
    before = re.sub("^library_name: .*$", f"library_name: {names.get(library, library)}", before, flags=re.MULTILINE)
    lines = [before, _USE, "", f"Exported to {library}: {remark}.", "", "\n".join(usage).rstrip(), ""]
    return "\n".join(lines) + (f"\n## {rest}" if next_title else "")


def _chosen(context: TrainingContext, result: TrainResult) -> list[str]:
    """By what, and why training ended before all steps were done."""
    found = []
    if (by := result.chosen_by) is not None and (figure := result.figure) is not None:
        found.append(f"Of the checkpoints that were evaluated it is the best by {metric_words(by)}: {figure}.")
        if (better := result.better_step) is not None:
            found.append(f"The evaluation of step {better:,} was better, and its checkpoint is missing.")
        if result.kept_from is not None:
            found.append(f"The job {result.kept_from} trained it; no step since was better.")
    if context.length.reason is Reason.EARLY_STOPPED:
        rule, end = context.spec.training.early_stopping, context.state.step
        assert rule is not None, "it ended early by it"
        found.append(
            f"Training ended early, at step {end:,}: {rule.patience:,} evaluations in a row were no better by "
            f"{metric_words(context.spec.early_stopping_metric)}."
        )
    elif words := limit_words(context.length.limited_by):
        found.append(f"Its number of steps was {words}.")
    return found


def model_card(page: str, license: str, base_license: str | None) -> str:
    """The page of a model as the hub's model card, under this licence and without secrets.

    `base_license`: of the base model; None: nobody knows.
    """
    head, found, rest = page.removeprefix("---\n").partition("\n---\n")
    assert found, "every page begins with what the hub reads"
    known = [line for line in head.splitlines() if not line.startswith("license:")]
    row = f"| licence | {license}; of the base model: {base_license or 'not known, see its own page'} |"
    before, data_row, after = rest.partition("\n| data |")
    assert data_row, "every page has a table"
    return redact("\n".join(["---", f"license: {license}", *known, "---", f"{before}\n{row}{data_row}{after}"]))


def _named(sources: Sequence[WeightedSource]) -> str:
    """With their weights where there are several."""
    if len(sources) == 1:
        return sources[0].source
    return ", ".join(f"{each.source} (weight {each.weight:g})" for each in sources)


def _read(source: SourcePlan) -> str:
    """What its rows become, and by which format."""
    arrow = " → ".join(_code(each) for each in (source.input, source.target) if each is not None)
    read_as = f"{arrow}, read as {_cell(source.read_as)}" if source.read_as else arrow
    if source.reading:
        read_as += f"; from {_cell(source.reading)}"
    return f"{read_as}; {_cell(source.companions.text)}" if source.companions.text else read_as


def generation_config(context: TrainingContext) -> dict[str, object] | None:
    """What generation_config.json has; None where the model writes nothing.

    An encoder-decoder writes as it was evaluated, with room for the targets of this data: a bare `generate()` writes
    whole texts. A causal model samples as its base does, without a limit of tokens: servers keep to one, whatever is
    asked.
    """
    loaded = context.loaded
    if loaded.task.generation(loaded.folder) is None:
        return None
    found = generation_settings(loaded.model)
    if loaded.model.config.is_encoder_decoder:
        return {**found, "max_new_tokens": context.longest_target}
    return {**sampling_settings(loaded.folder), **found}


def evaluations_of(run: RunDir) -> dict[int, EvaluationFinished]:
    """By step, as the newest attempt to get there saw it."""
    attempts = sorted(int(file.stem) for file in run.path.glob("attempts/*.jsonl") if file.stem.isdecimal())
    return {
        line.fact.step: line.fact
        for attempt in attempts
        for line in run.attempt_lines(attempt)
        if isinstance(line, Noted) and isinstance(line.fact, EvaluationFinished)
    }


def base_model(plan: Plan) -> BaseModel:
    """Of the hub, as the job names it; any other is the copy in the model store, which is what was trained."""
    if plan.model.revision is not None:
        return BaseModel(plan.model.source.partition("@")[0], plan.model.revision)
    return BaseModel(str(plan.model.folder))


def _front_matter(base: str | None, library: str) -> list[str]:
    """What the hub reads."""
    known = [f"base_model: {base.partition('@')[0]}"] if base else []
    return ["---", f"library_name: {library}", *known, "tags: [longhaul]", "---", ""]


def _usage(
    context: TrainingContext, method: Method, evaluations: dict[int, EvaluationFinished], step: int
) -> list[str]:
    """A snippet that generates from the text of a sample, where there is one that is read again as it was."""
    found = evaluations.get(step)
    text, sample = _sample_to_repeat(context, found.samples if found else [])
    loaded = context.loaded
    usage = loaded.task.usage(context.spec.data, context.longest_target)
    auto_class = loaded.task.auto_class().__name__
    lines = [
        _USE,
        "",
        "```python",
        *method.opening(auto_class, base_model(context.plan), loaded.task.layout(loaded.config)),
        'tokenizer = AutoTokenizer.from_pretrained(".")',
        _assigned(text or usage.text),
        f"inputs = {usage.inputs}",
        f"print({usage.shown})",
        "```",
        "",
    ]
    if sample is not None:
        lines += [
            f"The job's answer after step {step:,} (computed in batches, where rounding may tip a close call):",
            "",
            *_fenced(sample.generated),
            "",
        ]
    return [*lines, *_generation(context)]


def _generation(context: TrainingContext) -> list[str]:
    """What generation_config.json sets, and how long targets are."""
    config = generation_config(context)
    if config is None:
        return []
    if (most := config.get("max_new_tokens")) is not None:
        return [
            f"`generation_config.json` sets `max_new_tokens` to {most:,}, which 99 % of the targets do not exceed; how "
            "the base model samples or searches is left out.",
            "",
        ]
    sampling = ", ".join(
        f"`{key}` {json.dumps(value)}" for key, value in sampling_settings(context.loaded.folder).items()
    )
    kept = (
        f"keeps how the base model samples ({sampling})"
        if sampling
        else "has no settings of sampling, like that of the base model"
    )
    return [
        f"`generation_config.json` {kept}, and sets no limit of tokens: 99 % of the targets have at most "
        f"{context.longest_target:,}. The lines above write greedily.",
        "",
    ]


def _sample_to_repeat(
    context: TrainingContext, samples: list[Sample]
) -> tuple[str | Sequence[str] | None, Sample | None]:
    """The first sample whose text has no secret and, tokenized again, gives the tokens that the model was given; and
    that text.

    Where no rows were held out, such a text of the first training rows.
    """
    loaded, data = context.loaded, context.data
    wanted = min(context.spec.evaluation.samples, context.spec.evaluation.max_rows)
    tried: Sequence[Sample | None] = samples
    rows = data.validation
    numbers = evaluation_rows(len(rows), wanted, context.plan.data.evaluation_rows).tolist()
    if not len(rows):
        rows, tried = data.train, [None] * min(wanted, len(data.train))
        numbers = list(range(len(tried)))
    for number, sample in zip(numbers, tried, strict=False):  # a sample fewer where the evaluation is missing
        text = loaded.task.prompt(rows, number, loaded.tokenizer, context.spec.data)
        if text is not None and redact(line := _assigned(text)) == line:
            return text, sample
    return None, None


def _assigned(text: str | Sequence[str]) -> str:
    """The line of the snippet that has it."""
    return f"text = {json.dumps(text, ensure_ascii=False)}"


def _metrics(base: EvaluationFinished | None, kept: EvaluationFinished | None, *, chosen: bool) -> list[str]:
    """Whether the model is better than before training, and each metric with its interval. `chosen`: by its metric."""
    if kept is None or kept.verdict is None:
        return []
    lines = ["## Quality", "", f"{kept.verdict.text}.", ""]
    lines += ["| metric | this model | 95 % interval | base model | difference |", "|---|---:|---:|---:|---:|"]
    for name, value in kept.figures.items():
        figure = partial(metric_figure, name)
        between, change = kept.intervals.get(name), kept.against_base.get(name)
        before = base.figures.get(name) if base is not None else None
        cells = [
            kept.words(name),
            figure(value),
            "–" if between is None else f"{figure(between.low)} to {figure(between.high)}",
            "–" if before is None else figure(before),
            "–"
            if change is None
            else f"{format_change(change.difference)} ({format_change(change.low)} to {format_change(change.high)})",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    also = ", which also chose the step" if chosen else ""
    return [*lines, "", f"Measured on rows that were held out{also}.", ""]


def _limit(data: DataSpec, key: str) -> int:
    limit: int = getattr(data, key.partition(".")[2])
    return limit


def _curve(run: RunDir, evaluations: dict[int, EvaluationFinished]) -> list[str]:
    """Validation loss, and the training loss logged nearest to it before, at `POINTS` steps at most."""
    steps = sorted(evaluations)
    if not steps:
        return []
    chosen = sorted({steps[round(at * (len(steps) - 1) / (POINTS - 1))] for at in range(POINTS)})
    rows = run.metrics()
    lines = ["## Curve", "", "| step | training loss | validation loss |", "|---:|---:|---:|"]
    for step in chosen:
        before = [row for row in rows if row.step <= step]
        training = format_figure(before[-1].loss) if before else "–"
        lines.append(f"| {step:,} | {training} | {format_figure(evaluations[step].loss)} |")
    return [*lines, ""]


def _samples(evaluation: EvaluationFinished | None) -> list[str]:
    if evaluation is None or not evaluation.samples:
        return []
    lines = ["## Samples", "", "Rows that were held out."]
    for sample in evaluation.samples[:SAMPLES]:
        for title, text in (("Input", sample.input), ("Target", sample.target), ("Written", sample.generated)):
            lines += ["", f"{title}:", "", *_fenced(text)]
    return lines


def _fenced(text: str) -> list[str]:
    """A block of text whose fence is longer than any in the text."""
    fence = "`" * max(3, _longer(text))
    return [f"{fence}text", text, fence]


def _cell(text: str) -> str:
    """Text for a table's cell, in which it is nothing but text."""
    return re.sub(r"([\\`|])", r"\\\1", " ".join(text.split())).replace("<", "&lt;")


def _code(text: str) -> str:
    """The same as code, in which nothing but the end of a cell is escaped."""
    fence = "`" * _longer(text)
    space = " " if "`" in text else ""
    return f"{fence}{space}{' '.join(text.split())}{space}{fence}".replace("|", "\\|")


def _longer(text: str) -> int:
    """Than any row of backticks in the text."""
    return 1 + max(map(len, re.findall("`+", text)), default=0)
