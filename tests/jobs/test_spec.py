"""A job file says what is wrong with it: the dotted key, the value, what to do."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from jobs.data_names import DATA_SUFFIXES, HubData, data_format, hub_data
from jobs.errors import UserError
from jobs.integrations import WandbSpec
from jobs.plan import resolve
from jobs.spec import EarlyStoppingSpec, JobSpec, parse_spec
from jobs.text.schemas import keys
from jobs.wrong_spec import ELSEWHERE, KEYS_OF_A_JOB
from tests.support.samples import memory_plan

LEAST: dict[str, Any] = {"data": {"train": "rows.jsonl"}}


def with_key(dotted: str, value: object) -> dict[str, Any]:
    """The least job with one key set."""
    raw: dict[str, Any] = json.loads(json.dumps(LEAST))
    *parents, last = dotted.split(".")
    part = raw
    for name in parents:
        part = part.setdefault(name, {})
    part[last] = value
    return raw


def test_only_the_training_file_is_required() -> None:
    spec = parse_spec(LEAST)
    assert spec.model == "google/flan-t5-xl"
    assert spec.training.batch_size == 128
    assert spec.memory.empty_cache_steps == 50


def test_a_spec_survives_its_own_json() -> None:
    spec = parse_spec(with_key("training.epochs", 2))
    assert parse_spec(json.loads(spec.model_dump_json())) == spec
    assert parse_spec(json.loads(spec.model_dump_json())).sha256() == spec.sha256()
    assert parse_spec(LEAST).sha256() != spec.sha256()


def test_a_spec_is_frozen() -> None:
    spec = parse_spec(LEAST)
    with pytest.raises(ValueError, match="frozen"):
        spec.training.epochs = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("dotted", "value", "said"),
    [
        ("epocs", 3, "unknown key"),
        ("training.learnrate", 1, "unknown key"),
        ("training.epochs", 0, "greater than or equal to 1 (got 0)"),
        ("training.learning_rate", -1, "got -1"),
        ("training.learning_rate", float("nan"), "nan"),
        ("training.lr_scheduler", "step", "'linear', 'cosine' or 'constant'"),
        ("memory.micro_batch", "many", "'auto'"),
        ("data.validation", 1.5, "less than 1"),
        ("priority", 101, "less than or equal to 100"),
        ("metadata", {"a": 3}, "must be a string"),
        ("metadata", {"k" * 65: "v"}, "64 characters"),
        ("metadata", {f"k{i}": "v" for i in range(17)}, "at most 16"),
        ("model", "not a model!", "a hub id such as"),
        ("model", "a/b@../../etc/passwd", "a hub id such as"),
        ("checkpoint.every_steps", 10**400, "less than or equal to 1000000000"),
        ("name", "../x", "letters and digits of any script"),
        ("name", "a\u202eb", "letters and digits of any script"),
        ("name", "-a", "begins with a letter or digit"),
        ("name", "x" * 65, "at most 64 characters"),
        ("task.type", "translation", "'auto', 'seq2seq', 'causal', 'classification' or 'regression'"),
        ("task.loss_on", "none", "'replies' or 'all'"),
        ("method", {"type": "qlora"}, "'full' or 'lora'"),
        ("method", {"rank": 8}, "`type` is missing"),
        ("method", "qlora", "type 'qlora' is not known"),
        ("method", 3, "must be an object"),
        ("method", {"type": "full", "rank": 8}, "unknown key"),
        ("method", {"type": "lora", "rank": 0}, "greater than or equal to 1 (got 0)"),
        ("method", {"type": "lora", "targets": "(q"}, "is no regular expression"),
        ("method", {"type": "lora", "targets": "q{99999999999}"}, "is no regular expression"),
        ("method", {"type": "lora", "targets": "(" * 500 + "q" + ")" * 500}, "is no regular expression"),
        ("method", {"type": "lora", "targets": []}, "at least 1 item"),
        ("method", {"type": "lora", "adapter_dtype": "float16"}, "'auto', 'bfloat16' or 'float32'"),
        ("method", {"type": "lora", "base_dtype": "float32"}, "'auto', 'bfloat16' or 'float16'"),
        ("method", {"type": "lora", "base_dtype": "float16", "adapter_dtype": "bfloat16"}, "adapters are float32"),
        ("method", {"type": "full", "base_dtype": "float16"}, "unknown key"),
        ("data.input", "title", "both `input` and `target`"),
        ("data.input", ["premise"], "a list is a pair of texts"),
        ("data.input", ["a", "b", "c"], "a list is a pair of texts"),
        ("data.input", ["a", 1], "a list is a pair of texts"),
        ("memory.optimizer", "sgd", "'adamw', 'adamw_offload', 'adamw_8bit' or 'adafactor'"),
    ],
)
def test_a_wrong_value_is_named(dotted: str, value: object, said: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_spec(with_key(dotted, value))
    assert said in str(caught.value)
    assert caught.value.param is not None
    assert dotted.startswith(caught.value.param) or caught.value.param.startswith(dotted)


@pytest.mark.parametrize(
    ("pair", "kept"),
    [
        (["premise", "hypothesis"], "{premise} {} {hypothesis}"),
        (["about: {title}", "a.b"], "about: {title} {} {a.b}"),
    ],
)
def test_two_columns_are_kept_as_one_text(pair: list[str], kept: str) -> None:
    spec = parse_spec({"data": {"train": "rows.jsonl", "input": pair, "target": "label"}})
    assert spec.data.input == kept
    assert parse_spec(spec.model_dump(mode="json")) == spec


@pytest.mark.parametrize(
    ("dotted", "value"),
    [
        ("load_in_4bit", True),
        ("quantization_config", {"bnb_4bit_quant_type": "nf4"}),
        ("method", "qlora"),
        ("method", {"type": "qlora", "rank": 8}),
        ("method", {"type": "lora", "load_in_8bit": True}),
        ("method", {"type": "lora", "bnb_4bit_compute_dtype": "float16"}),
        ("method", {"type": "lora", "base_dtype": "nf4"}),
        ("method", {"type": "lora", "base_dtype": "int4"}),
        ("memory.bitsandbytes", True),
    ],
)
def test_a_model_in_4_or_8_bits_is_refused_with_the_reason_and_what_to_do_instead(dotted: str, value: object) -> None:
    with pytest.raises(UserError) as caught:
        parse_spec(with_key(dotted, value))
    said = f"{caught.value} {caught.value.hint or ''}"
    assert said.count("models are not trained in 4 or 8 bits: merged into 16, the adapters would make another") == 1
    assert "with method: lora the model takes 2 bytes a weight" in said and "did you mean" not in said


@pytest.mark.parametrize(("dotted", "value"), [("memory.optimizer", "adamw_4bit"), ("optimizer_8bit", True)])
def test_an_optimizer_of_few_bits_is_no_such_model(dotted: str, value: object) -> None:
    with pytest.raises(UserError) as caught:
        parse_spec(with_key(dotted, value))
    assert "models are not trained" not in f"{caught.value} {caught.value.hint}"


@pytest.mark.parametrize("name", ["Überraschung", "2024", "हिन्दी", "日本 レシピ", "a_b.c-d", "👩 1"])
def test_names_of_every_script_are_legal(name: str) -> None:
    assert parse_spec(LEAST | {"name": name}).name == name


def test_wandb_is_switched_like_discord() -> None:
    found = [parse_spec(LEAST | {"integrations": {"wandb": on}}).integrations.wandb for on in (False, True, None)]
    assert found == [None, WandbSpec(), None]


@pytest.mark.parametrize(
    ("spec", "param", "meant"),
    [({"data": {"trian": "x"}}, "data.trian", "data.train"), ({"dta": {"train": "x"}}, "dta", "data")],
)
def test_a_misspelt_key_is_named_before_the_one_that_is_missing_for_it(
    spec: dict[str, object], param: str, meant: str
) -> None:
    with pytest.raises(UserError, match=f"^{param}: unknown key") as caught:
        parse_spec(spec)
    assert caught.value.hint is not None and caught.value.hint.startswith(f"did you mean {meant}? ")


@pytest.mark.parametrize("key", ["weight", "data.weight"])
def test_no_key_is_meant_that_only_items_of_a_list_have(key: str) -> None:
    with pytest.raises(UserError, match="unknown key") as caught:
        parse_spec(with_key(key, 1))
    assert caught.value.hint == KEYS_OF_A_JOB


def test_all_errors_are_named_at_once_with_the_key_that_was_meant() -> None:
    with pytest.raises(UserError) as caught:
        parse_spec(
            {
                "trainng": {}, "training": {"epoch": 3, "batch_size": "x", "learning_rate": -1},
                "memory": {"budget": "lots", "microbatch": 3}, "integrations": {"wandb": 3},
            }
        )  # fmt: skip
    assert str(caught.value).splitlines() == [
        "8 errors:",
        "- training.epoch: unknown key; did you mean training.epochs?",
        "- memory.microbatch: unknown key; did you mean memory.micro_batch?",
        "- trainng: unknown key; did you mean training?",
        "- data: is required",
        "- training.batch_size: must be an integer (got 'x')",
        "- training.learning_rate: must be greater than 0 (got -1)",
        "- memory.budget: must be 'auto'; or: must be a number (got 'lots')",
        "- integrations.wandb: must be an object (got 3)",
    ]
    assert (caught.value.param, caught.value.hint) == ("training.epoch", KEYS_OF_A_JOB)


@pytest.mark.parametrize(
    ("dotted", "value", "said"),
    [
        ("metadata", {str(n): "" for n in range(17)}, "must have at most 16 items"),
        ("data.input", "", "must have at least 1 character (got '')"),
        ("resources.gpu_name", "", "must match pattern '^[ -~]{1,128}$' (got '')"),
        ("data.validation", None, "must be a number; or: must be 'auto'; or: must be a string (got null)"),
    ],
)
def test_an_error_has_the_words_of_json(dotted: str, value: object, said: str) -> None:
    with pytest.raises(UserError, match=f"^{re.escape(dotted)}: {re.escape(said)}"):
        parse_spec(with_key(dotted, value))


@pytest.mark.parametrize(("raw", "said"), [([1], "[1]"), ("x", "'x'"), (None, "null"), (True, "true")])
def test_a_job_that_is_no_object_is_shown(raw: object, said: str) -> None:
    with pytest.raises(UserError, match=f"^a job is a JSON object, not {re.escape(said)}$"):
        parse_spec(raw)


def test_a_flood_of_wrong_keys_is_counted_and_not_repeated() -> None:
    with pytest.raises(UserError) as caught:
        parse_spec({"data": {"train": "a.jsonl"}} | {f"key{number}" + "x" * 1000: 1 for number in range(5000)})
    head, *lines = str(caught.value).splitlines()
    assert head == "5000 errors, the first 20 of them:" and len(lines) == 20 and len(str(caught.value)) < 6000


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("", '""'), ("$schema", '"$schema"'), ("//", '"//"'), ("int", "int"), ("½ 🍕", '"½ 🍕"'), ("<b>", '"<b>"'),
        ("a\nERROR forged", r'"a\nERROR forged"'), ("\x1b[2J\x9b\u202e", r'"\u001b[2J\u009b\u202e"'),
    ],
)  # fmt: skip
def test_a_key_is_repeated_whatever_its_name_and_does_nothing_to_a_terminal(key: str, said: str) -> None:
    for spec, param in (({**LEAST, key: "x"}, said), ({"data": {**LEAST["data"], key: "x"}}, f"data.{said}")):
        with pytest.raises(UserError, match=f"^{re.escape(param)}: unknown key$") as caught:
            parse_spec(spec)
        assert caught.value.param == param
    with pytest.raises(UserError, match=f"^{re.escape(f'metadata.{said}')}: must be a string"):
        parse_spec({**LEAST, "metadata": {key: 1}})


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("seed", "training.seed"), ("train", "data.train"), ("gpu_name", "resources.gpu_name"),
        ("training.optimizer", "memory.optimizer"), ("data.model", "model"),
        ("data.source", "data.input"), ("source_column", "data.input"), ("target_column", "data.target"),
        ("training.every_steps", "log.every_steps or checkpoint.every_steps or evaluation.every_steps"),
    ],
)  # fmt: skip
def test_a_key_of_another_part_is_sent_there(key: str, meant: str) -> None:
    with pytest.raises(UserError, match=f"^{re.escape(key)}: unknown key$") as caught:
        parse_spec(with_key(key, 1))
    assert caught.value.hint == f"did you mean {meant}? {KEYS_OF_A_JOB}"


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("training.per_device_train_batch_size", "did you mean training.batch_size? It counts the rows of one step: "),
        ("gradient_accumulation_steps", "did you mean training.batch_size? It counts the rows of one step: "),
        ("lora_r", "did you mean method.rank? "), ("training.lora_alpha", "did you mean method.alpha? "),
        ("training.warmup_steps", "did you mean training.warmup_ratio? It is the share of all steps, "),
        ("max_seq_length", "did you mean data.max_tokens? It is for causal models; others have data.max_input_tokens"),
        ("evaluation.eval_steps", "did you mean evaluation.every_steps? "),
        ("save_steps", "did you mean checkpoint.every_steps? "),
        ("training.fp16", "weights are bf16, and float16 for LoRA where the GPU has no bf16 (method.base_dtype)"),
        ("output_dir", "the model is always in runs/JOB/model"),
    ],
)  # fmt: skip
def test_a_key_of_another_tool_is_answered_with_what_does_the_same_here(key: str, hint: str) -> None:
    with pytest.raises(UserError, match=f"^{re.escape(key)}: unknown key$") as caught:
        parse_spec(with_key(key, 1))
    assert str(caught.value.hint).startswith(hint)


def test_every_key_that_other_tools_are_sent_to_is_there() -> None:
    schema = JobSpec.model_json_schema()
    known = {key.name for key in keys(schema["properties"], schema["$defs"])}
    assert set(ELSEWHERE.values()) <= known


@pytest.mark.parametrize("method", ["lorra", {"type": "lorra", "rank": 3}])
def test_a_misspelt_method_is_answered_with_the_one_that_was_meant(method: object) -> None:
    with pytest.raises(UserError, match=r"^method: type 'lorra' is not known: 'full' or 'lora'") as caught:
        parse_spec(LEAST | {"method": method})
    assert (caught.value.param, caught.value.hint) == ("method", "did you mean 'lora'?")


def test_a_misspelt_metric_is_answered_with_the_one_that_was_meant() -> None:
    with pytest.raises(UserError, match=r"^evaluation\.metrics: .*'rougeL'") as caught:
        parse_spec(with_key("evaluation.metrics", ["loss", "rougel"]))
    assert (caught.value.param, caught.value.hint) == ("evaluation.metrics", "did you mean 'rougeL'?")


def test_metrics_of_texts_need_texts() -> None:
    with pytest.raises(UserError, match="`metrics` names chrf, which is measured on generated texts"):
        parse_spec(LEAST | {"evaluation": {"metrics": ["chrf"], "generate_rows": 0}})
    evaluation = parse_spec(LEAST | {"evaluation": {"metrics": ["chrf"], "samples": 0}}).evaluation
    assert evaluation.scored_rows == 64
    assert parse_spec(LEAST | {"evaluation": {"samples": 0}}).evaluation.scored_rows == 0
    assert parse_spec(LEAST | {"evaluation": {"metrics": ["loss"]}}).evaluation.scored_rows == 0


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"method": "lora"}, "adds a token, which adapters alone do not learn: leave it out, or set `method: full`"),
        ({"kind": "evaluate"}, "trains nothing and holds nothing out: leave data.keep_line_breaks out"),
    ],
)
def test_a_token_for_line_breaks_needs_training(parts: dict[str, Any], said: str) -> None:
    data = {"train": "rows.jsonl", "keep_line_breaks": True}
    with pytest.raises(UserError, match=re.escape(said)):
        parse_spec({"data": data} | parts)
    assert parse_spec({"data": data}).learns_new_tokens
    assert not parse_spec({"data": {"train": "rows.jsonl"}} | parts).learns_new_tokens


def test_a_dotted_key_is_shown_as_objects() -> None:
    with pytest.raises(UserError) as caught:
        parse_spec({**LEAST, "training.epochs": 3})
    assert (str(caught.value), caught.value.param) == ('"training.epochs": unknown key', '"training.epochs"')
    assert caught.value.hint == f'did you mean {{"training": {{"epochs": …}}}}? {KEYS_OF_A_JOB}'


@pytest.mark.parametrize("value", ["bf16", "adamw_bf16", "sgd_bf16", "AdamW-BF16", "bfloat16_adamw"])
def test_rounding_to_the_nearest_bf16_is_refused_with_the_reason_and_the_way_out(value: str) -> None:
    with pytest.raises(UserError, match=r"^memory\.optimizer: ") as caught:
        parse_spec(with_key("memory.optimizer", value))
    assert caught.value.param == "memory.optimizer"
    for said in (
        "94 %",
        "docs/bf16.md",
        "adamw or adamw_offload (fp32 master copy)",
        "adamw_8bit",
        "adafactor",
        repr(value),
    ):
        assert said in str(caught.value)


def test_memory_is_resolved_as_planned_and_without_a_plan_as_the_job_says() -> None:
    spec = parse_spec(with_key("memory.activation_checkpointing", 3))
    assert resolve(spec, None).model_dump(exclude={"compile"}) == {
        "micro_batch": 8, "activation_checkpointing": 3, "optimizer": "adamw", "dtype": "bfloat16", "gpus": 1,
    }  # fmt: skip
    planned = resolve(spec, memory_plan(micro_batch=5, activation_checkpointing=2, optimizer="adamw_8bit"))
    assert (planned.micro_batch, planned.activation_checkpointing, planned.optimizer) == (5, 2, "adamw_8bit")


@pytest.mark.parametrize(
    ("speed", "device", "becomes"),
    [
        ({}, "cuda", True),
        ({}, "cpu", False),
        ({"compile": True}, "cpu", True),
        ({"compile": False}, "cuda", False),
        ({"fused": False}, "cuda", False),
    ],
)
def test_layers_are_compiled_on_cuda_or_where_the_job_says_so(
    speed: dict[str, bool], device: str, becomes: bool
) -> None:
    assert resolve(parse_spec({"data": {"train": "a.jsonl"}, "speed": speed}), None, device).compile is becomes


def test_only_fused_layers_can_be_compiled() -> None:
    with pytest.raises(UserError, match=r"speed: `compile: true` needs `fused: true`"):
        parse_spec({"data": {"train": "a.jsonl"}, "speed": {"compile": True, "fused": False}})


def test_what_is_missing_is_named() -> None:
    with pytest.raises(UserError, match="data: is required"):
        parse_spec({})
    with pytest.raises(UserError, match=r"data\.train: is required"):
        parse_spec({"data": {}})
    with pytest.raises(UserError, match=r"a job is a JSON object, not \[\]"):
        parse_spec([])


@pytest.mark.parametrize("value", ["job-1", "job-1a2b3c/step-00000500", "job-a_b-c/step-123456789"])
def test_a_job_or_one_of_its_checkpoints_can_be_gone_on_from(value: str) -> None:
    assert parse_spec(with_key("resume_from", value)).resume_from == value


@pytest.mark.parametrize(
    "value",
    ["", "1", "job-", "job-A", "job-1/", "job-1/step-5", "job-1/../step-00000005", "job-1/step-00000005/", "../job-1",
     "job-1\n", "job-1/tmp-step-00000005"],
)  # fmt: skip
def test_anything_else_is_not_and_an_example_is_given(value: str) -> None:
    with pytest.raises(UserError, match=r"such as job-1a2b3c/step-00000500") as caught:
        parse_spec(with_key("resume_from", value))
    assert caught.value.param == "resume_from" and repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("rows.jsonl", "jsonl"), ("a/rows.ndjson.gz", "jsonl"), ("rows.json.zst", "jsonl"), ("/data/ROWS.CSV", "csv"),
        ("rows.tsv.gz", "csv"), ("rows.parquet", "parquet"), ("rows.parquet.gz", None), ("rows.txt", None),
        ("csv", None),
    ],
)  # fmt: skip
def test_the_name_of_a_file_says_its_format(name: str, format: str | None) -> None:
    assert data_format(name) == format
    assert (format is not None) == name.lower().endswith(DATA_SUFFIXES)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("org/name", HubData("org/name", None, None, "train")),
        ("org/name:validation", HubData("org/name", None, None, "validation")),
        ("org/na.me-1@refs/convert/parquet", HubData("org/na.me-1", "refs/convert/parquet", None, "train")),
        ("org/name@v1.0:main/test", HubData("org/name", "v1.0", "main", "test")),
        ("./org/name", None),
        ("/org/name", None),
        ("org/name/more", None),
        ("name", None),
        ("org/name.jsonl", None),
        ("org/name.csv.gz", None),
    ],
)
def test_a_name_with_one_slash_and_no_known_ending_is_a_hub_data_set(name: str, named: HubData | None) -> None:
    assert hub_data(name, "auto") == named
    assert hub_data(name, "jsonl") is None


@pytest.mark.parametrize("param", ["data.train", "data.validation"])
@pytest.mark.parametrize("name", ["rows.txt", "/data/rows.docx", "./org/name", "rows.parquet.gz", "rows"])
def test_a_name_that_says_nothing_is_refused_with_the_known_endings(param: str, name: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"{param}: {name!r}")) as caught:
        parse_spec(with_key(param, name))
    assert caught.value.param == param
    assert all(suffix in str(caught.value) for suffix in DATA_SUFFIXES)
    assert "data.format" in str(caught.value.hint)
    parse_spec({"data": {"train": "rows.jsonl", param.partition(".")[2]: name, "format": "csv"}})


def test_every_field_is_documented() -> None:
    undocumented = [
        f"{part}.{name}"
        for part, schema in JobSpec.model_json_schema()["$defs"].items()
        for name, field in schema["properties"].items()
        if name != "type" and "description" not in field
    ]
    assert undocumented == []


def test_the_example_job_is_a_legal_one() -> None:
    example = Path(__file__).parents[2] / "examples" / "job.json"
    assert parse_spec(json.loads(example.read_text())).model == "builtin:t5-tiny"


def test_training_rows_come_from_one_source_or_from_several() -> None:
    one = parse_spec({"data": {"train": "a.jsonl"}}).data
    assert [(each.source, each.weight) for each in one.sources] == [("a.jsonl", 1.0)]
    train = ["a.jsonl", {"source": "org/name:train", "weight": 0.5}]
    alone = parse_spec({"data": {"train": {"source": "a.jsonl", "weight": 2}}}).data
    assert [(each.source, each.weight) for each in alone.sources] == [("a.jsonl", 2.0)]
    parse_spec({"data": {"train": ["org/name:train", "org/name:test", "name.jsonl", "other/name.jsonl"]}})
    several = parse_spec({"data": {"train": train, "validation": "held_out.csv"}}).data
    assert [(each.source, each.weight) for each in several.sources] == [("a.jsonl", 1.0), ("org/name:train", 0.5)]
    assert several.names == {
        "data.train.0.source": "a.jsonl",
        "data.train.1.source": "org/name:train",
        "data.validation": "held_out.csv",
    }


def test_rows_that_are_trained_on_do_not_validate() -> None:
    for train in ("a.jsonl", ["b.csv", "./a.jsonl"]):
        with pytest.raises(UserError, match=r"a\.jsonl is trained on: name other rows, or a fraction") as refused:
            parse_spec({"data": {"train": train, "validation": "a.jsonl"}})
        assert refused.value.param == "data.validation"
    parse_spec({"data": {"train": "org/name", "validation": "org/name:validation"}})


def test_a_fraction_in_quotes_is_no_file() -> None:
    for given in ("0.1", ".05", "0"):
        with pytest.raises(UserError) as refused:
            parse_spec({"data": {"train": "rows.jsonl", "validation": given}})
        assert (refused.value.param, refused.value.hint) == ("data.validation", None)
        assert f"(got {given!r}); did you mean {given}, without quotes?" in str(refused.value)
    with pytest.raises(UserError, match=r"2 errors:\n(?s:.*)\n- data.validation: must be a number"):
        parse_spec({"data": {"train": "rows.jsonl", "validation": "0.1"}, "traning": {}})
    parse_spec({"data": {"train": "rows", "validation": "0.1", "format": "csv"}})


@pytest.mark.parametrize(
    ("train", "param", "said"),
    [
        ([], "data.train", "must have at least 1 item"),
        (3, "data.train", "must be a string"),
        (
            ["a.jsonl", {"source": "./a.jsonl", "weight": 2}],
            "data.train.1.source",
            "./a.jsonl is named twice: name it once",
        ),
        (["org/name", "b.jsonl", "org/name"], "data.train.2.source", "org/name is named twice"),
        (["a.jsonl", 3], "data.train.1", "must be an object"),
        ([{"weight": 2}], "data.train.0.source", "is required"),
        ([{"source": "a.jsonl", "weight": 0}], "data.train.0.weight", "must be greater than 0 (got 0)"),
        ([{"sorce": "a.jsonl"}], "data.train.0.sorce", "unknown key"),
        (["a.jsonl", "b.odd"], "data.train.1.source", "'b.odd' is neither a hub data set"),
        ([{"source": "b.odd"}], "data.train.0.source", "'b.odd' is neither a hub data set"),
        ({"source": "b.odd"}, "data.train.0.source", "'b.odd' is neither a hub data set"),
    ],
)
def test_a_wrong_source_is_named_by_its_place(train: object, param: str, said: str) -> None:
    with pytest.raises(UserError) as refused:
        parse_spec({"data": {"train": train}})
    assert refused.value.param == param
    assert said in str(refused.value)
    if "sorce" in param:
        assert refused.value.hint is not None and refused.value.hint.startswith("did you mean data.train.0.source?")


def test_labels_may_be_given_as_the_numbers_that_the_rows_have() -> None:
    spec = parse_spec({"data": {"train": "rows.jsonl"}, "task": {"type": "classification", "labels": [0, 1, "two"]}})
    assert spec.task.labels == ["0", "1", "two"]
    for given in (True, 1.5, None):
        with pytest.raises(UserError) as refused:
            parse_spec({"data": {"train": "rows.jsonl"}, "task": {"type": "classification", "labels": [given]}})
        assert "task.labels: must be a string" in str(refused.value)


def test_the_best_is_chosen_by_a_metric_that_there_is() -> None:
    job = {"data": {"train": "rows.jsonl"}}
    assert parse_spec(job).checkpoint.best == "loss"
    for given, read in (("validation_loss", "loss"), ("rougeL", "rougeL"), (None, None)):
        assert parse_spec(job | {"checkpoint": {"best": given}}).checkpoint.best == read
    with pytest.raises(UserError, match=r"checkpoint.best: must be 'loss', .* \(got 'rouge_L'\)") as caught:
        parse_spec(job | {"checkpoint": {"best": "rouge_L"}})
    assert caught.value.param == "checkpoint.best" and "did you mean 'rougeL'?" in str(caught.value.hint)


@pytest.mark.parametrize(("model", "task"), [("builtin:roberta-tiny", "auto"), ("org/model", "classification")])
def test_a_metric_that_the_task_does_not_have_is_refused_with_those_that_it_has(model: str, task: str) -> None:
    job = {"model": model, "task": task, "data": {"train": "rows.jsonl"}}
    with pytest.raises(UserError, match="has loss, accuracy, macro_f1, and not 'bleu'"):
        parse_spec(job | {"checkpoint": {"best": "bleu"}})
    with pytest.raises(UserError) as caught:
        parse_spec(job | {"training": {"early_stopping": {"metric": "micro_f1"}}})
    assert caught.value.param == "training.early_stopping.metric"
    assert "did you mean 'macro_f1'?" in f"{caught.value} {caught.value.hint}"
    several = parse_spec(job | {"task": {"type": task, "multi_label": True}, "checkpoint": {"best": "micro_f1"}})
    assert several.early_stopping_metric == "micro_f1"


def test_early_stopping_is_off_or_on_or_spelled_out() -> None:
    def parsed(value: object) -> EarlyStoppingSpec | None:
        job = {"data": {"train": "rows.jsonl"}, "training": {"early_stopping": value}}
        return parse_spec(job).training.early_stopping

    assert parsed(False) is parsed(None) is None
    assert parsed(True) == EarlyStoppingSpec() and parsed({"patience": 9}) == EarlyStoppingSpec(patience=9)
    with pytest.raises(UserError, match="there is nothing to go by"):
        parse_spec({"data": {"train": "rows.jsonl", "validation": 0.0}, "training": {"early_stopping": True}})


_NAMES = st.sampled_from(["", "0", "1", "17", "data", "train", "training", "model"]) | st.text(max_size=20)
_ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES, inner, max_size=3),
    max_leaves=8,
)


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(st.dictionaries(_NAMES, _ANY, max_size=4))
@hypothesis.example({"data": {"train": "rows.jsonl"}, "1": 2})  # was an IndexError
@hypothesis.example({"": {"": {"": 0}}, "0": [], "9" * 5000: {}})
def test_whatever_the_keys_are_a_wrong_job_is_refused_by_name(body: dict[str, Any]) -> None:
    with pytest.raises(UserError) as refused:
        parse_spec({"unknown": None, **body})
    assert "unknown key" in str(refused.value)
