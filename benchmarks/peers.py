"""Who competes in `throughput`: our loop, and transformers' `Seq2SeqTrainer` configured in three ways.

Each runs in a process of its own and works when its turn has come: it says on its standard output what it has done (a
line of JSON) and waits for a line on its standard input. An epoch of 20,000 rows would take hours, so each orders *all*
rows with its own sampler, and the micro-batches that are run (steps, for ours) are drawn from that order evenly by
cost: long and short ones, well and badly padded ones come in its own proportions.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
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

from benchmarks.load_once import begin_use, peak_use
from worker.training.dataset.data import Int64, PreparedDataset, Rows
from worker.training.kernels.head_loss import IGNORED
from worker.training.loop import accumulate
from worker.training.models.model_files import read_config
from worker.training.network.model import load
from worker.training.steps.order import StepOrder, rounded
from worker.training.steps.randomness import seed_step
from worker.training.tasks.limits import cut
from worker.training.tasks.seq2seq.batches import PairLimit
from worker.training.tasks.seq2seq.layout import PairFlops
from worker.training.tasks.seq2seq.task import Seq2Seq
from worker.training.tasks.widths import PairWidths

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
CPU = torch.device("cpu")
NAMES = ("ours", "seed", "best", "expert")


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
        torch.set_num_threads(race.threads)
        data = PreparedDataset.open(Path(race.prepared))
        self.name, self.race, self.rows, self.validation = name, race, data.train, data.validation
        self.lengths = (self.rows.input_lengths, self.rows.target_lengths)
        self.noise = race.seed + NAMES.index(name)
        """Seed of its dropout: another for each, so that their losses say how much that matters."""
        self.flops = PairFlops.of_config(read_config(Path(race.model), race.model))
        self.tokenizer = AutoTokenizer.from_pretrained(race.model, local_files_only=True)
        self._channel = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what libraries print is not an answer
        self._started = self._cpu_started = self._start_loss = 0.0
        self._memory = 0

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
        self._tell("ready", weights=sum(parameter.numel() for parameter in model.parameters()), **self._about)

    def stepped(self, step: Step, loss: float | None = None) -> None:
        """To be called after every optimizer step: where a turn ends, it tells and waits."""
        self._done.append(step)
        race, done = self.race, len(self._done)
        if done == race.same_steps:
            self._tell("same", loss=self._held_out_loss(), start_loss=self._start_loss)
            begin_use(CPU)  # the peak is that of training
        elif done > race.same_steps and (done - race.same_steps) % race.steps_per_round == 0:
            self._tell("round", **self._figures(self._done[-race.steps_per_round :]))
            if done == race.same_steps + (race.rounds + 1) * race.steps_per_round:
                self._tell("end", loss=self._held_out_loss())

    def same_rows(self) -> Int64:
        """[same steps, rows of each] for all, drawn at random."""
        race = self.race
        drawn = np.random.default_rng(race.seed).permutation(len(self.rows))
        return drawn[: race.same_steps * race.micro_batch].reshape(race.same_steps, -1)

    def _tell(self, event: str, **figures: Any) -> None:
        seconds, cpu_seconds = time.perf_counter() - self._started, time.process_time() - self._cpu_started
        answer = {"event": event, "seconds": seconds, "cpu_seconds": cpu_seconds, **figures}
        self._channel.write(json.dumps(answer) + "\n")
        self._channel.flush()
        ctypes.CDLL(None).malloc_trim(0)  # four who keep what they have freed would need more memory than there is
        if not sys.stdin.readline():
            raise SystemExit(f"{self.name}: nobody is listening any more")
        if event == "ready":
            self._start_loss = self._held_out_loss()
            self._memory = begin_use(CPU)  # with the weights, which have been read now
        self._started, self._cpu_started = time.perf_counter(), time.process_time()

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
            "peak_bytes": peak_use(CPU) - self._memory,
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


def main(argv: list[str]) -> int:
    """`NAME RACE`: the second as JSON."""
    name, race = argv
    kind = Ours if name == "ours" else Peer
    kind(name, Race(**json.loads(race))).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
