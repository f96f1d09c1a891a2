"""Rows a second of our training loop and of transformers' `Seq2SeqTrainer`: same model, rows, dtype, AdamW, threads.

    python -m benchmarks.throughput [--data FILE] [--tokenizer FOLDER] [--rounds 4] [--rows-per-round 128]

The model is FLAN-T5-small's shape (8 + 8 layers, d_model 512, d_ff 1024 gated-gelu, 6 heads, vocabulary 32128, head
not tied, dropout 0.1), random; the file is prepared as a job would have it. The contenders:

    ours     worker.training: order, micro-batches of as many positions as 8 of the longest rows, fused model, own loop
    seed     eager attention, every layer recomputed, random batches of 8 padded to their longest row
    best     as transformers documents it: sdpa, nothing recomputed, group_by_length, micro-batch 8 (widths as ours)
    expert   `best`, its length column being target tokens x 1024 + input tokens

Each is a process of its own and works when its turn has come; in every round each has one turn of as many rows. Which
rows is its own affair: it orders the whole file with its own sampler, and runs a part drawn from that evenly by cost
(`Contender.course`), so its rows are a little longer or shorter than the file's. Therefore rows/s are given twice:
raw, and for the file's mean row (raw x FLOPs of a mean row of the part / of the file), and the latter are compared. The
ratios are medians over rounds; `cpu_vs_...` is the same by CPU time, which other work on the machine disturbs less.

glibc's allocator is as it comes, for all. A job's trainer has other settings (worker/supervise.py), so that memory that
runs out on a CPU can be recovered from; with them ours takes twice the CPU time.

transformers 5.23 multiplies T5's loss and gradients by the number of accumulation steps, which would clip every
gradient; `loss_is_scaled_for_ga = False` repairs that here. Before the rounds all get the same rows, in steps of a
micro-batch: the losses of held-out rows after them must agree to within three standard deviations of the peers', who
differ in dropout and attention, or a hundredth of what they have learned. JSON on the last line. Exit code 1 when a
limit is broken.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch.utils.data import Dataset
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    PreTrainedModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
)
from transformers.trainer_pt_utils import LengthGroupedSampler

from benchmarks.command_line import RECIPES, parse
from benchmarks.corpus import dataset_of, prepared_job
from benchmarks.versus import (
    SAME_LOSS,
    Figures,
    Said,
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
from worker.training.dataset.data import Int64, PreparedDataset, Rows
from worker.training.kernels.head_loss import IGNORED
from worker.training.loop import accumulate
from worker.training.models.model_files import read_config
from worker.training.network.model import load
from worker.training.steps.order import StepOrder, rounded
from worker.training.steps.randomness import seed_step
from worker.training.tasks.limits import cut
from worker.training.tasks.seq2seq import builtin
from worker.training.tasks.seq2seq.batches import PairLimit
from worker.training.tasks.seq2seq.layout import PairFlops
from worker.training.tasks.seq2seq.task import Seq2Seq
from worker.training.tasks.widths import PairWidths

KEYS = (
    "vs_seed", "vs_best", "vs_expert", "cpu_vs_seed", "cpu_vs_best", "cpu_vs_expert", "same_loss_difference",
    "same_loss_allowed", "contenders", "rows", "rows_per_round", "rounds", "batch_size", "dtype", "matmul_gflops",
    "threads", "shape", "load", "accumulation_fault", "versions", "broken",
)  # fmt: skip
LIMITS = {"vs_seed": 2.5, "vs_best": 1.3, "vs_expert": 1.0}
STRETCH = {"vs_best": 1.45, "vs_expert": 1.15}
LEAST_ROWS = 2000
SHAPES: dict[str, dict[str, Any]] = {
    "small": builtin.CONFIG
    | {"vocab_size": 32128, "d_model": 512, "d_kv": 64, "d_ff": 1024, "num_heads": 6}
    | {"num_layers": 8, "num_decoder_layers": 8},
    "tiny": builtin.CONFIG | {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_heads": 2},
}
COLUMNS = (
    "rows_per_s", "raw_rows_per_s", "tokens_per_s", "waste", "epoch_waste", "tokens_per_row", "rows_per_micro_batch",
    "peak_gib", "start_loss", "same_loss", "end_loss",
)  # fmt: skip
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
CPU = torch.device("cpu")
NAMES = ("ours", "seed", "best", "expert")


def main(argv: list[str]) -> int:
    """Prepare, let them run, compare, print."""
    arguments = parsed(argv)
    if arguments.contender is not None:
        name, text = arguments.contender
        (Ours if name == "ours" else Peer)(name, Race(**json.loads(text))).run()
        return 0
    load_average = [os.getloadavg()[0]]
    rates = {name: matmul_rate(dtype, arguments.threads) for name, dtype in DTYPES.items()}
    dtype = arguments.dtype if arguments.dtype != "auto" else max(rates, key=lambda name: rates[name])
    print(f"GFLOP/s of matrix products: {rates}; {dtype} it is")
    with tempfile.TemporaryDirectory(prefix="longhaul-throughput-") as scratch:
        config = SHAPES[arguments.shape]
        run = prepared_job(
            arguments.data, Path(scratch), tokenizer=arguments.tokenizer, config=config, data={"validation": 0.02}
        )
        plan, rows = run.plan(), dataset_of(run).train
        assert plan.data.prepared is not None
        race = Race(
            model=str(plan.model.folder),
            prepared=plan.data.prepared,
            dtype=dtype,
            threads=arguments.threads,
            batch_size=arguments.batch_size,
            micro_batch=arguments.micro_batch,
            rounds=arguments.rounds,
            steps_per_round=max(1, arguments.rows_per_round // arguments.batch_size),
            same_steps=arguments.same_steps,
            held_out=arguments.held_out,
            learning_rate=1e-3,
            max_grad_norm=1.0,
            seed=arguments.seed,
        )
        text = json.dumps(asdict(race))
        commands = {name: [sys.executable, "-m", "benchmarks.throughput", "--contender", name, text] for name in NAMES}
        with contenders(commands, Path(scratch)) as turns:
            table = next_turns(turns, "ready")
            for name, figures in next_turns(turns, "same").items():
                table[name] |= {"start_loss": figures["start_loss"], "same_loss": figures["loss"]}
                print(f"the same {race.same_steps * race.micro_batch} rows, {name:7} loss {figures['loss']:.4f}")
            mean_flops = PairFlops.of_config(config).rows(rows.input_lengths, rows.target_lengths) / len(rows)
            take_turns(turns, table, race.rounds, "flops", mean_flops)
    load_average.append(os.getloadavg()[0])
    result: Figures = {
        **compared(table),
        **same_loss(table),
        "contenders": {name: summary(figures) for name, figures in table.items()},
        "rows": len(rows),
        "rows_per_round": race.steps_per_round * race.batch_size,
        "rounds": race.rounds,
        "batch_size": race.batch_size,
        "dtype": dtype,
        "matmul_gflops": rates,
        "threads": race.threads,
        "shape": arguments.shape,
        "load": load_average,
        "accumulation_fault": "repaired: loss_is_scaled_for_ga = False",
        "versions": versions(transformers.__version__),
    }
    result["broken"] = wrong(result) + ([] if arguments.smoke else broken(result))
    show(result["contenders"], COLUMNS)
    for key, least in LIMITS.items():
        stretch = f", stretch {STRETCH[key]}" if key in STRETCH else ""
        print(f"{key} {result[key]:.2f} (limit {least}{stretch}); by CPU time {result[f'cpu_{key}']:.2f}")
    for line in result["broken"]:
        print(f"broken: {line}")
    print(json.dumps(result))
    return 1 if result["broken"] else 0


def parsed(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.throughput", description="Ours against transformers.")
    parser.add_argument("--data", type=Path, default=RECIPES, help="a file of rows")
    parser.add_argument(
        "--tokenizer", type=Path, help="a folder with a tokenizer.json; else one is learned from the rows"
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="small")
    race_options(parser, batch_size=128)
    parser.add_argument("--rows-per-round", type=int, default=128, help="of each contender")
    parser.add_argument(
        "--same-steps", type=int, default=16, help="first steps, of a micro-batch each, the same rows for all"
    )
    parser.add_argument(
        "--dtype", choices=("auto", *DTYPES), default="auto", help="auto: the faster in matrix products"
    )
    parser.add_argument("--contender", nargs=2, metavar=("NAME", "RACE"), help="be one of them; not for people")
    arguments = parse(
        parser, argv, shape="tiny", rounds=2, rows_per_round=8, batch_size=8, micro_batch=4, held_out=4, same_steps=2,
        threads=1,
    )  # fmt: skip
    refuse_uneven(parser, arguments)
    return arguments


def matmul_rate(dtype: torch.dtype, threads: int) -> float:
    """GFLOP/s of the feed-forward's product at 2,048 positions: which dtype this CPU computes fast in."""
    torch.set_num_threads(threads)
    left, right = torch.randn(2048, 512, dtype=dtype), torch.randn(512, 1024, dtype=dtype)
    seconds = []
    for _ in range(20):
        begun = time.perf_counter()
        left @ right
        seconds.append(time.perf_counter() - begun)
    return round(2 * 2048 * 512 * 1024 / min(seconds) / 1e9, 1)


# -- comparing -----------------------------------------------------------------------------------------------


def same_loss(table: dict[str, Figures]) -> dict[str, Any]:
    """Our loss after the same rows against the mean of the peers', and how far apart they may be. Nats."""
    peers = [table[name]["same_loss"] for name in NAMES[1:]]
    mean = statistics.fmean(peers)
    learned = statistics.fmean(table[name]["start_loss"] for name in NAMES[1:]) - mean
    return {
        "same_loss_difference": table["ours"]["same_loss"] - mean,
        "same_loss_allowed": max(SAME_LOSS * learned, 3 * statistics.stdev(peers)),
    }


def summary(figures: Figures) -> Figures:
    """One contender over all rounds: medians of rates, totals of the rest."""
    total = {key: sum(values(figures, key)) for key in ("rows", "tokens", "flops", "padded_flops", "micro_batches")}
    return {
        **medians(figures, "rows_per_s", "raw_rows_per_s", "tokens_per_s", "rows_per_cpu_s"),
        "rows_run": total["rows"],
        "tokens_per_row": total["tokens"] / total["rows"],
        "rows_per_micro_batch": total["rows"] / total["micro_batches"],
        "waste": 1 - total["flops"] / total["padded_flops"],
        **{key: figures[key] for key in ("epoch_waste", "epoch_micro_batches", "start_loss", "same_loss", "end_loss")},
        "peak_gib": figures["rounds"][-1]["peak_bytes"] / 2**30,
    }


def wrong(result: Figures) -> list[str]:
    """What has to hold at any size and does not, in words."""
    rows = result["rounds"] * result["rows_per_round"]
    found = [
        f"{name} has run {figures['rows_run']} rows of {rows}"
        for name, figures in result["contenders"].items()
        if figures["rows_run"] != rows
    ]
    found += unlearned(result["contenders"])
    if abs(result["same_loss_difference"]) > result["same_loss_allowed"]:
        found.append(f"losses after the same rows differ by {result['same_loss_difference']:+.4f}")
    return found


def broken(result: Figures) -> list[str]:
    """Limits that do not hold, in words."""
    few = [f"{result['rows']} rows to draw from, fewer than {LEAST_ROWS}"] if result["rows"] < LEAST_ROWS else []
    return below(result, LIMITS) + few


# -- contenders ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Race:
    """What is the same for all of them."""

    model: str
    """Folder of the checkpoint."""
    prepared: str
    """Folder of the prepared dataset."""
    dtype: str
    threads: int
    batch_size: int
    """Rows of an optimizer step."""
    micro_batch: int
    """Rows of a peer's micro-batch; ours: of the longest shape."""
    rounds: int
    steps_per_round: int
    same_steps: int
    """Steps over the same rows for all, to compare losses; not timed. Of one micro-batch of a peer, whose loss is then
    the same as ours; over several it is the mean of their means, which gives tokens of short rows more weight."""
    held_out: int
    """Validation rows that the losses are taken over."""
    learning_rate: float
    max_grad_norm: float
    seed: int


@dataclass(frozen=True)
class Piece:
    """Rows that go through the model together."""

    rows: Int64
    inputs: int
    """Width."""
    targets: int


Step = list[Piece]


class Contender:
    """One of them, as far as they are alike: what to run, what to say, when to wait."""

    def __init__(self, name: str, race: Race) -> None:
        self._said = Said(race.threads)
        data = PreparedDataset.open(Path(race.prepared))
        self.name, self.race, self.rows, self.validation = name, race, data.train, data.validation
        self.lengths = (self.rows.input_lengths, self.rows.target_lengths)
        self.noise = race.seed + NAMES.index(name)
        """Seed of its dropout: another for each, so that their losses say how much that matters."""
        self.flops = PairFlops.of_config(read_config(Path(race.model), race.model))
        self.tokenizer = AutoTokenizer.from_pretrained(race.model, local_files_only=True)

    def run(self) -> None:
        """All turns."""
        raise NotImplementedError

    def model(self) -> PreTrainedModel:
        """In the dtype of the race, in training mode."""
        raise NotImplementedError

    def course(self, epoch: Sequence[Step]) -> list[list[int]]:
        """Which units of the epoch make up the steps of the warm-up and of the rounds, one after the other.

        The warm-up has the costliest unit of all, so that peak memory is that of a whole epoch.
        """
        race, drawn = self.race, np.random.default_rng(self.race.seed)
        by_cost = np.argsort([sum(map(self._padded, step)) for step in epoch], kind="stable")
        whole = race.batch_size // sum(len(piece.rows) for piece in epoch[0])  # units of a step
        turns = race.rounds + 1
        wanted = turns * race.steps_per_round * whole
        even = by_cost[((np.arange(wanted) + 0.5) * len(epoch) / wanted).astype(int)]
        dealt = [even[turn::turns] for turn in range(turns)]
        dealt[0][-1] = by_cost[-1]
        pieces = [piece for step in epoch for piece in step]
        self._about = {
            "epoch_rows": sum(len(piece.rows) for piece in pieces),
            "epoch_micro_batches": len(pieces),
            "epoch_waste": 1 - self._real(pieces) / sum(map(self._padded, pieces)),
        }
        return [step.tolist() for units in dealt for step in drawn.permutation(units).reshape(-1, whole)]

    def ready(self, model: PreTrainedModel) -> None:
        """Say so, and wait for the first turn."""
        self._model, self._done = model, list[Step]()
        self._said.tell("ready", weights=sum(parameter.numel() for parameter in model.parameters()), **self._about)
        self._start_loss = self._held_out_loss()
        self._said.begin_memory()  # with the weights, which have been read now

    def stepped(self, step: Step, loss: float | None = None) -> None:
        """To be called after every optimizer step: where a turn ends, it tells and waits."""
        self._done.append(step)
        race, done = self.race, len(self._done)
        if done == race.same_steps:
            self._said.tell("same", loss=self._held_out_loss(), start_loss=self._start_loss)
            self._said.forget_peak()  # it is that of training
        elif done > race.same_steps and (done - race.same_steps) % race.steps_per_round == 0:
            self._said.tell("turn", **self._figures(self._done[-race.steps_per_round :]))
            if done == race.same_steps + (race.rounds + 1) * race.steps_per_round:
                self._said.tell("end", loss=self._held_out_loss())

    def same_rows(self) -> Int64:
        """[same steps, rows of each] for all, drawn at random."""
        race = self.race
        drawn = np.random.default_rng(race.seed).permutation(len(self.rows))
        return drawn[: race.same_steps * race.micro_batch].reshape(race.same_steps, -1)

    def _figures(self, steps: Sequence[Step]) -> dict[str, float]:
        pieces = [piece for step in steps for piece in step]
        rows = np.concatenate([piece.rows for piece in pieces])
        inputs, targets = self.rows.input_lengths[rows], self.rows.target_lengths[rows]
        return {
            "rows": len(rows),
            "tokens": int(inputs.sum() + targets.sum()),
            "flops": self._real(pieces),
            "padded_flops": sum(map(self._padded, pieces)),
            "micro_batches": len(pieces),
            "peak_bytes": self._said.peak_bytes,
        }

    def _real(self, pieces: Sequence[Piece]) -> float:
        rows = np.concatenate([piece.rows for piece in pieces])
        return self.flops.rows(self.rows.input_lengths[rows], self.rows.target_lengths[rows])

    def _padded(self, piece: Piece) -> float:
        count = len(piece.rows)
        return self.flops.rows(np.full(count, piece.inputs), np.full(count, piece.targets))

    def _held_out_loss(self) -> float:
        """Mean over the target tokens of the first validation rows, of fp32 logits, by the same code for all."""
        model, chosen = self._model, np.arange(min(self.race.held_out, len(self.validation)))
        shifted: Any = model.prepare_decoder_input_ids_from_labels
        total, tokens = 0.0, 0
        model.eval()
        with torch.no_grad():
            groups = PairWidths(self.validation).groups(chosen, 4)
            for batch in PairLimit.of(self.validation, 4).batches(self.validation, groups, 0):
                logits = model(
                    input_ids=batch.input_ids,
                    attention_mask=batch.attention_mask,
                    decoder_input_ids=shifted(batch.labels),
                    use_cache=False,
                ).logits
                labels = batch.labels.flatten()
                total += float(
                    F.cross_entropy(logits.flatten(0, 1).float(), labels, ignore_index=IGNORED, reduction="sum")
                )
                tokens += batch.target_tokens
        model.train()
        return total / tokens


# -- ours ----------------------------------------------------------------------------------------------------


class Ours(Contender):
    """Order, micro-batches, loss and model of worker.training; torch's own AdamW."""

    def run(self) -> None:
        """All turns."""
        race = self.race
        order, widths = StepOrder(PairWidths(self.rows), race.batch_size, 1, race.seed), PairWidths(self.rows)
        limit = PairLimit.of(self.rows, race.micro_batch)
        epoch = [self._pieces(order.groups_of(step), limit) for step in range(len(self.rows) // race.batch_size)]
        same = [widths.groups(rows, race.micro_batch) for rows in self.same_rows()]
        timed = (order.groups_of(number) for [number] in self.course(epoch))
        model = load(Path(race.model), CPU, task=Seq2Seq(), dropout=None, fused=True, activation_checkpointing=0).model
        model.to(DTYPES[race.dtype])  # type: ignore[arg-type]  # wrapped by transformers
        model.train()
        self.ready(model)
        for steps in (same, timed):
            optimizer = torch.optim.AdamW(model.parameters(), lr=race.learning_rate, weight_decay=0.0, fused=True)
            for number, groups in enumerate(steps, start=1):
                batches = limit.batches(self.rows, groups, model.config.pad_token_id)
                seed_step(self.noise, number)
                accumulate(model, batches)
                torch.nn.utils.clip_grad_norm_(model.parameters(), race.max_grad_norm)
                optimizer.step()
                model.zero_grad(set_to_none=True)
                self.stepped(self._pieces(groups, limit))

    def _pieces(self, groups: Sequence[Int64], limit: PairLimit) -> Step:
        return [
            Piece(rows, *(int(rounded(lengths[rows]).max()) for lengths in self.lengths))
            for rows in cut(self.rows, groups, limit)
        ]


# -- transformers --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """A configuration of `Seq2SeqTrainer`."""

    attention: str
    recompute: bool
    sampling: str
    multiple: int | None
    """That widths are rounded up to."""


WAYS = {
    "seed": Way("eager", recompute=True, sampling="random", multiple=None),
    "best": Way("sdpa", recompute=False, sampling="group_by_length", multiple=8),
    "expert": Way("sdpa", recompute=False, sampling="length_column", multiple=8),
}


class Tokenized(Dataset[dict[str, list[int]]]):
    """Prepared rows in a given order, as the trainer wants them."""

    def __init__(self, rows: Rows, numbers: Sequence[int] | Int64) -> None:
        self._rows, self._numbers = rows, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        if index >= len(self):
            raise IndexError(index)  # ends an iteration
        number = int(self._numbers[index])
        tokens = self._rows.input(number).tolist()
        return {"input_ids": tokens, "attention_mask": [1] * len(tokens), "labels": self._rows.target(number).tolist()}


class RepairedTrainer(Seq2SeqTrainer):
    """transformers' own, but for its fault with T5: loss and gradients times the number of accumulation steps."""

    loss_is_scaled_for_ga = False


class Peer(Contender):
    """transformers' loop, loader, loss and model; the same AdamW."""

    def run(self) -> None:
        """All turns."""
        race, way = self.race, WAYS[self.name]
        model = AutoModelForSeq2SeqLM.from_pretrained(
            race.model, dtype=DTYPES[race.dtype], attn_implementation=way.attention, local_files_only=True
        )
        # Batches that are not full are left out; of the sampler's order nothing else.
        size = race.micro_batch
        order = self._sampled(model, way)
        numbers = np.array(order[: len(order) // size * size]).reshape(-1, size)
        epoch = [[self._piece(rows, way)] for rows in numbers]
        same = [[self._piece(rows, way)] for rows in self.same_rows()]
        timed = [[piece for unit in units for piece in epoch[unit]] for units in self.course(epoch)]
        self.ready(model)
        for steps, batch_size in ((same, race.micro_batch), (timed, race.batch_size)):
            rows = [row for step in steps for piece in step for row in piece.rows]
            trainer = self._trainer(model, way, rows, batch_size)
            trainer.add_callback(_AfterStep(self, steps))
            trainer.train()

    def _trainer(
        self, model: PreTrainedModel, way: Way, numbers: Sequence[int], batch_size: int, **options: Any
    ) -> RepairedTrainer:
        race = self.race
        arguments = Seq2SeqTrainingArguments(
            output_dir=f"{race.model}-{self.name}",  # nothing is written there
            per_device_train_batch_size=race.micro_batch,
            gradient_accumulation_steps=batch_size // race.micro_batch,
            gradient_checkpointing=way.recompute,
            learning_rate=race.learning_rate,
            lr_scheduler_type="constant",
            max_grad_norm=race.max_grad_norm,
            optim="adamw_torch_fused",
            num_train_epochs=1,
            seed=self.noise,
            use_cpu=True,
            dataloader_pin_memory=False,
            report_to="none",
            logging_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
            **{"train_sampling_strategy": "sequential"} | options,
        )
        return RepairedTrainer(
            model=model,
            args=arguments,
            train_dataset=Tokenized(self.rows, numbers),
            data_collator=DataCollatorForSeq2Seq(self.tokenizer, model=model, pad_to_multiple_of=way.multiple),
            processing_class=self.tokenizer,
        )

    def _sampled(self, model: PreTrainedModel, way: Way) -> list[int]:
        """The order of an epoch, as the trainer itself makes it."""
        torch.manual_seed(self.race.seed)
        if way.sampling == "length_column":
            # What the trainer does with the column, if `remove_unused_columns=False` saves it and if it is one of a
            # `datasets.Dataset` (a package that this project does not have).
            lengths = self.rows.target_lengths.astype(int) * 1024 + self.rows.input_lengths
            return list(LengthGroupedSampler(self.race.batch_size, lengths=lengths.tolist()))
        everything = self._trainer(
            model, way, range(len(self.rows)), self.race.batch_size, train_sampling_strategy=way.sampling
        )
        return list(everything._get_train_sampler() or [])

    def _piece(self, rows: Int64, way: Way) -> Piece:
        multiple = way.multiple or 1
        return Piece(rows, *(int(-(-lengths[rows].max() // multiple) * multiple) for lengths in self.lengths))


class _AfterStep(TrainerCallback):
    def __init__(self, peer: Peer, steps: Sequence[Step]) -> None:
        self._peer, self._steps = peer, steps

    def on_step_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        self._peer.stepped(self._steps[state.global_step - 1])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
