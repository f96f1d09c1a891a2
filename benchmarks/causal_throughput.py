"""Rows a second of our loop for causal models and of TRL's `SFTTrainer`: same chats, weights, dtype, AdamW, threads.

    python -m benchmarks.causal_throughput [--data FILE] [--peer-python PATH] [--rounds 4] [--rows 640] [--threads N]

TRL is no part of this project: `make peers` installs it in `.venv-peers`, an environment of its own. Without that (or
another one's interpreter as `--peer-python`) ours runs alone, and TRL's figures are null. The model has the shape of a
small Qwen2 (12 layers of 512, SwiGLU of 1408, 8 heads, 2 for keys and values: 35 M weights in bf16, random), with a
tokenizer learned from the rows; these are drawn at random from the file, as chats. The contenders:

    ours             worker.training: order, micro-batches of as many positions as 8 of the longest rows, `adamw`
    trl              as documented: assistant_only_loss, its defaults, so every layer is recomputed; micro-batches of 8
    trl_packed       the same with packing=True
    trl_kept, trl_packed_kept    the same two without recomputation

Each trains one epoch over the same rows in as many steps (`train_ours`; benchmarks/causal_trl.py), in a process of
its own, and works when its turn has come; an epoch is cut into as many turns as there are rounds, and one to warm up.
Rows of a turn are counted by their tokens, as rows of the mean length. Ratios are medians over the rounds; `cpu_vs_...`
is the same by CPU time, which other work on the machine disturbs less. All learn the same tokens, which is checked, and
ours must not end with a higher loss of held-out rows than the best of those with as many steps, but for a hundredth of
what that has learned. Ours keeps weights in fp32 beside those in bf16, the others do not. JSON on the last line. Exit
code 1 when a limit is broken.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.command_line import RECIPES, ROOT, parse
from benchmarks.corpus import dataset_of, prepared_job
from benchmarks.versus import (
    SAME_LOSS,
    CausalRace,
    Figures,
    Turns,
    below,
    compared,
    contenders,
    medians,
    next_turns,
    race_options,
    refuse_uneven,
    show,
    take_turns,
    unlearned,
    values,
    versions,
)
from jobs.spec import TrainingSpec
from worker.training.dataset.data import PreparedDataset, Rows
from worker.training.loop import accumulate
from worker.training.network.model import load
from worker.training.optimizers.optimizer import make_optimizer
from worker.training.rows.chat import ASSISTANT
from worker.training.rows.chat import Turn as ChatTurn
from worker.training.rows.reading import open_files
from worker.training.rows.row_filter import RowFilter
from worker.training.rows.sources import DataFile
from worker.training.rows.text import RowReader, Texts
from worker.training.steps.order import StepOrder
from worker.training.steps.randomness import seed_step
from worker.training.tasks.causal import builtin
from worker.training.tasks.causal.task import Causal
from worker.training.tasks.columns import PAIRS, recognize

KEYS = (
    "trl", "trl_packed", "trl_kept", "trl_packed_kept", "install", "contenders", "rows", "tokens_per_row",
    "learned_per_row", "rounds", "batch_size", "threads", "shape", "load", "versions", "broken",
)  # fmt: skip
PEERS = ("trl", "trl_packed", "trl_kept", "trl_packed_kept")
PEERS_PYTHON = ROOT / ".venv-peers/bin/python"
LIMITS = {"vs_trl": 2.0, "vs_trl_packed": 1.15}
COLUMNS = ("rows_per_s", "tokens_per_s", "padding", "peak_gib", "steps", "start_loss", "end_loss")
LONGEST = 1024
"""Tokens of a row, and of a packed sequence: TRL's default."""
SHAPES: dict[str, dict[str, Any]] = {
    "small": builtin.CONFIG
    | {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 12, "num_attention_heads": 8},
    "tiny": builtin.CONFIG | {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
}
_REPLY = "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
TEMPLATE = builtin.CHAT_TEMPLATE.replace(
    _REPLY,
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}",
)
"""That of the model, with what is learned marked as TRL wants it."""


def main(argv: list[str]) -> int:
    """Prepare, let them run, compare, print."""
    arguments = parsed(argv)
    if arguments.ours is not None:
        return train_ours(CausalRace(**json.loads(arguments.ours)))
    load = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory(prefix="longhaul-causal-") as scratch:
        race, rows = prepared(arguments, Path(scratch))
        text = json.dumps(asdict(race))
        commands = {"ours": [sys.executable, "-m", "benchmarks.causal_throughput", "--ours", text]}
        if (python := arguments.peer_python) is not None:
            commands |= {name: [str(python), "-m", "benchmarks.causal_trl", name, text] for name in arguments.peers}
        with contenders(commands, Path(scratch)) as turns:
            ready = next_turns(turns, "ready")
            table = {
                name: {"start_loss": each["loss"], "steps": each["steps"], "versions": each["versions"]}
                for name, each in ready.items()
            }
            take_turns(turns, table, arguments.rounds, "tokens", float(rows.input_lengths.mean()))
    for figures in table.values():
        figures["learned"] = figures["warm_up"]["learned"] + sum(values(figures, "learned"))
    load.append(os.getloadavg()[0])
    ratios = compared(table)
    result: Figures = {
        **{name: against(name, ratios) if name in table else None for name in PEERS},
        "install": "make peers" if arguments.peer_python is None else None,
        "contenders": {name: summary(figures) for name, figures in table.items()},
        "rows": race.rows,
        "tokens_per_row": float(rows.input_lengths.mean()),
        "learned_per_row": float(rows.target_lengths.mean()),
        "rounds": arguments.rounds,
        "batch_size": race.batch_size,
        "threads": race.threads,
        "shape": arguments.shape,
        "load": load,
        "versions": versions(transformers.__version__)
        | {key: one for figures in table.values() for key, one in figures["versions"].items()},
    }
    result["broken"] = wrong(table, int(rows.target_lengths.sum()))
    result["broken"] += [] if arguments.smoke else below(ratios, LIMITS)
    show(result["contenders"], COLUMNS)
    if len(table) == 1:
        print("TRL is not installed (make peers): ours has run alone, and nothing is compared")
    for name in table.keys() - {"ours"}:
        limit = f" (limit {LIMITS[f'vs_{name}']})" if f"vs_{name}" in LIMITS else ""
        print(f"vs_{name} {ratios[f'vs_{name}']:.2f}{limit}; by CPU time {ratios[f'cpu_vs_{name}']:.2f}")
    for line in result["broken"]:
        print(f"broken: {line}")
    print(json.dumps(result))
    return 1 if result["broken"] else 0


def parsed(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.causal_throughput", description="Ours against TRL.")
    parser.add_argument("--data", type=Path, default=RECIPES, help="a file of rows")
    there = PEERS_PYTHON if PEERS_PYTHON.exists() else None
    parser.add_argument(
        "--peer-python", type=Path, default=there, help="the interpreter of an environment that has TRL"
    )
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=PEERS, help="those that compete (default: all)")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="small")
    race_options(parser, batch_size=32)
    parser.add_argument("--rows", type=int, help="of the epoch (default: 640, or as many as the file has)")
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--ours", metavar="RACE", help="be our contender; not for people")
    arguments = parse(
        parser, argv, shape="tiny", rounds=2, rows=24, batch_size=4, micro_batch=2, held_out=4, threads=1, peers=["trl"]
    )
    refuse_uneven(parser, arguments)
    return arguments


# -- rows and model ------------------------------------------------------------------------------------------


def prepared(arguments: argparse.Namespace, scratch: Path) -> tuple[CausalRace, Rows]:
    """Chats, model and prepared dataset below `scratch`."""
    texts = list(usable(arguments.data))
    size, turns = arguments.batch_size, arguments.rounds + 1
    count = min(arguments.rows or 640, len(texts) * 9 // 10) // size * size
    if count < turns * size:
        raise SystemExit(f"{len(texts)} rows in {arguments.data}: too few for {turns} turns of {size} rows")
    drawn = np.random.default_rng(arguments.seed).permutation(len(texts))[: count + arguments.held_out].tolist()
    (scratch / "data").mkdir()
    chats, others = scratch / "chats.jsonl", scratch / "data" / "held_out.jsonl"
    for file, chosen in ((chats, drawn[:count]), (others, drawn[count:])):
        file.write_text("".join(json.dumps({"messages": messages(texts[number])}) + "\n" for number in chosen))
    write_model(scratch / "data" / "model", SHAPES[arguments.shape], texts, arguments.seed)
    run = prepared_job(
        chats,
        scratch,
        model="./model",
        task={"type": "causal"},
        data={"validation": others.name, "max_tokens": LONGEST},
    )
    plan, data = run.plan(), dataset_of(run)
    if len(data.train) != count:
        raise SystemExit(f"{count - len(data.train)} of {count} chats cannot be learned from within {LONGEST} tokens")
    assert plan.data.prepared is not None
    held_out = scratch / "held_out_tokens.jsonl"
    tokens = [(data.validation.input(row), data.validation.target(row)) for row in range(len(data.validation))]
    held_out.write_text("".join(json.dumps([one.tolist() for one in both]) + "\n" for both in tokens))
    race = CausalRace(
        model=str(plan.model.folder),
        prepared=plan.data.prepared,
        chats=str(chats),
        held_out=str(held_out),
        template=TEMPLATE,
        rows=count,
        longest=LONGEST,
        threads=arguments.threads,
        batch_size=size,
        micro_batch=arguments.micro_batch,
        turns=turns,
        learning_rate=arguments.learning_rate,
        max_grad_norm=1.0,
        seed=arguments.seed,
    )
    return race, data.train


def usable(file: Path) -> Iterator[Texts]:
    """What a job would keep of the file, each row as a prompt and its reply."""
    blocks = open_files([DataFile(file, file.name, file.stat().st_size)], "data.train").blocks(1000)
    rows = chain.from_iterable(block.rows() for block in blocks)
    first = next(rows)
    found = recognize(first.columns or {}, PAIRS)
    if found is None:
        raise SystemExit(f"{file}: which columns are prompt and reply? There are {', '.join(first.columns or {})}")
    columns = {name.lower(): name for name in first.columns or {}}
    kept = RowFilter(chain([first], rows), RowReader(*found.over(columns), None)).good_rows()
    return (texts for _, texts in kept)


def messages(texts: Texts) -> list[dict[str, str]]:
    """Of a chat."""
    turns = texts.turns or (ChatTurn("user", texts.input, False), ChatTurn(ASSISTANT, texts.target, True))
    return [{"role": turn.role, "content": turn.content} for turn in turns]


def write_model(folder: Path, config: Mapping[str, Any], texts: list[Texts], seed: int) -> None:
    """Random weights in bf16, and a tokenizer learned from the texts."""
    learned_from = chain.from_iterable(one.all for one in texts[: builtin.TOKENIZER_ROWS])
    torch.manual_seed(seed)
    model: Any = Qwen2ForCausalLM(Qwen2Config(**config))
    model.to(torch.bfloat16).save_pretrained(folder)
    builtin.learn_tokenizer(learned_from).save_pretrained(str(folder))


# -- our contender -------------------------------------------------------------------------------------------


def train_ours(race: CausalRace) -> int:
    """Order, micro-batches, model, loss and `adamw` of worker.training."""
    turns = Turns(race)
    task, rows = Causal(), PreparedDataset.open(Path(race.prepared)).train
    loaded = load(
        Path(race.model), torch.device("cpu"), task=task, dropout=None, fused=True, activation_checkpointing=0
    )
    training = TrainingSpec(weight_decay=0.0, max_grad_norm=race.max_grad_norm)
    model = loaded.model
    optimizer = make_optimizer("adamw", model.named_parameters(), training, fused=True)
    order, limit = StepOrder(task.widths(rows), race.batch_size, 1, race.seed), task.limit(rows, race.micro_batch)
    model.train()
    turns.ready(model, order.steps)
    for step in range(1, order.steps + 1):
        batches = limit.batches(rows, order.groups_of(step - 1), loaded.pad_id)
        seed_step(race.seed, step)
        loss = accumulate(model, batches)
        optimizer.step(step, race.learning_rate, loss)
        model.zero_grad(set_to_none=True)
        for batch in batches:
            turns.ran(
                rows=len(batch.rows),
                tokens=int(batch.lengths.sum()),
                learned=batch.target_tokens,
                positions=batch.input_ids.numel(),
            )
        turns.stepped(step)
    return 0


# -- comparing -----------------------------------------------------------------------------------------------


def against(name: str, ratios: Mapping[str, float]) -> dict[str, float]:
    """What ours is of one of the others."""
    return {"vs": ratios[f"vs_{name}"], "cpu_vs": ratios[f"cpu_vs_{name}"]}


def summary(figures: Figures) -> Figures:
    """One contender over all rounds."""
    tokens, positions = sum(values(figures, "tokens")), sum(values(figures, "positions"))
    return {
        **medians(figures, "rows_per_s", "tokens_per_s", "rows_per_cpu_s"),
        "rows_run": sum(values(figures, "rows")),
        "padding": 1 - tokens / positions,
        "peak_gib": figures["rounds"][-1]["peak_bytes"] / 2**30,
        **{name: figures[name] for name in ("steps", "learned", "start_loss", "end_loss")},
    }


def wrong(table: Mapping[str, Figures], learned: int) -> list[str]:
    """What has to hold at any size and does not, in words. `learned`: tokens that each must have learned."""
    found = unlearned(table)
    for name, figures in table.items():
        if figures["learned"] != learned:
            found.append(f"{name} has learned {figures['learned']} tokens of {learned}")
    ours = table["ours"]
    if others := [figures for figures in table.values() if figures is not ours and figures["steps"] == ours["steps"]]:
        best = min(others, key=lambda figures: float(figures["end_loss"]))
        difference = ours["end_loss"] - best["end_loss"]
        if difference > SAME_LOSS * (best["start_loss"] - best["end_loss"]):
            found.append(f"the held-out loss of ours is {difference:.4f} above that of the others")
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
