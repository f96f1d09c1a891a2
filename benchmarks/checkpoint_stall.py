"""What a checkpoint in the background costs the training: the same steps with a save and without, in turn, in one run.

    python -m benchmarks.checkpoint_stall [--saves 5] [--seconds 60]

FLAN-T5-small's shape in bf16 with AdamW's fp32 states (1.08 GB), steps of real forward and backward passes. A stretch
is so many steps as take about `--seconds`; one of each pair begins with a save and ends when that is on disk. `ratio`
is the time of all stretches with a save over those without; `ratio_waiting` the same for saves that the training waits
for, as most trainers do it (one pair). JSON on the last line.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import T5Config, T5ForConditionalGeneration

from benchmarks.command_line import parse
from jobs.attempt import Noted
from jobs.disk.rundir import RunDir
from jobs.spec import CheckpointSpec, TrainingSpec
from jobs.trainer_facts import CheckpointSaved
from worker.training.adapters.method import weights_of
from worker.training.checkpoints.checkpoint import TrainState, newest
from worker.training.checkpoints.saving import Saver
from worker.training.journal import Journal
from worker.training.loop import accumulate
from worker.training.optimizers.optimizer import Optimizer, make_optimizer
from worker.training.tasks.seq2seq.batches import PairBatch
from worker.training.tasks.seq2seq.fused import fuse

KEYS = (
    "state_bytes", "saves", "seconds_between", "ratio", "ratio_waiting", "stall_s", "save_s", "save_mb_per_s",
    "waiting_mb_per_s", "disk_mb_per_s", "threads", "cores", "load",
)  # fmt: skip
ROWS, TOKENS = 16, 64


@dataclass
class Training:
    """Steps over the same random rows."""

    model: T5ForConditionalGeneration
    optimizer: Optimizer
    batches: list[PairBatch]
    step: int = 0

    def steps(self, count: int) -> float:
        """Seconds that so many took."""
        begun = time.perf_counter()
        for _ in range(count):
            self.step += 1
            torch.manual_seed(self.step)
            loss = accumulate(self.model, self.batches)
            self.optimizer.step(self.step, 1e-5, loss)
            self.model.zero_grad(set_to_none=True)
        return time.perf_counter() - begun


def main(argv: list[str]) -> int:
    """Measure, and print the JSON line."""
    arguments = parsed(argv)
    training = make_training(arguments.layers, arguments.vocabulary)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        run = RunDir(Path(folder) / "job-1")
        run.path.mkdir()
        journal = Journal(run.attempt_file(1))
        training.steps(2)
        count = max(1, round(arguments.seconds / (training.steps(3) / 3)))
        savers = {
            kind: Saver(
                run,
                weights_of(training.model),
                training.optimizer,
                CheckpointSpec(keep=1),
                journal,
                copies=kind == "beside",
            )
            for kind in ("beside", "waiting")
        }
        times: dict[str, list[float]] = {"beside": [], "waiting": [], "without": [], "stalls": []}

        def with_save(kind: str) -> None:
            begun = time.perf_counter()
            savers[kind].save(TrainState(spec_sha256="s", micro_batch=ROWS, step=training.step))
            stall = time.perf_counter() - begun
            training.steps(count)
            savers[kind].wait()
            times[kind].append(time.perf_counter() - begun)
            if kind == "beside":
                times["stalls"].append(stall)

        def without() -> None:
            times["without"].append(training.steps(count))

        savers["beside"].save(TrainState(spec_sha256="s", micro_batch=ROWS, step=training.step))  # makes the buffers
        savers["beside"].wait()
        for number in range(arguments.saves):
            pair = [lambda: with_save("beside"), without]
            for stretch in pair if number % 2 else reversed(pair):
                stretch()
            print(json.dumps({name: [round(each, 2) for each in all] for name, all in times.items()}), flush=True)
        with_save("waiting")
        found = newest(run, "s", journal)
        assert found is not None and found.state.step == training.step - count, "what was written verifies"
        noted = [line.fact for line in run.attempt_lines(1) if isinstance(line, Noted)]
        saves = [fact for fact in noted if isinstance(fact, CheckpointSaved)]
        own_rate = disk_rate(Path(folder), saves[-1].bytes)
    mean_without = sum(times["without"]) / len(times["without"])
    beside = saves[1:-1]
    result = {
        "state_bytes": saves[-1].bytes,
        "saves": len(times["beside"]),
        "seconds_between": round(mean_without, 1),
        "ratio": round(sum(times["beside"]) / sum(times["without"]), 4),
        "ratio_waiting": round(times["waiting"][0] / mean_without, 4),
        "stall_s": round(sum(times["stalls"]) / len(times["stalls"]), 3),
        "save_s": round(sum(fact.seconds for fact in beside) / len(beside), 2),
        "save_mb_per_s": round(sum(fact.bytes / 1e6 / fact.seconds for fact in beside) / len(beside)),
        "waiting_mb_per_s": round(saves[-1].bytes / 1e6 / saves[-1].seconds),
        "disk_mb_per_s": round(own_rate / 1e6),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "load": [round(each, 2) for each in os.getloadavg()],
    }
    print(json.dumps(result))
    return 0


def parsed(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint_stall", description="The cost of a save.")
    parser.add_argument("--saves", type=int, default=5, help="stretches with a save in the background")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of a stretch")
    parser.add_argument("--folder", help="where checkpoints are written; default: the folder of temporary files")
    parser.add_argument("--layers", type=int, default=8, help="of encoder and of decoder")
    parser.add_argument("--vocabulary", type=int, default=32128)
    return parse(parser, argv, saves=1, seconds=0.01, layers=1, vocabulary=256)


def make_training(layers: int, vocabulary: int) -> Training:
    """Random bf16 weights, the head untied, as FLAN-T5-small has it."""
    torch.manual_seed(0)
    config = T5Config(  # type: ignore[call-arg]  # some are of every configuration
        vocab_size=vocabulary, d_model=512, d_kv=64, d_ff=1024, num_layers=layers, num_heads=6, dropout_rate=0.1,
        feed_forward_proj="gated-gelu", tie_word_embeddings=False, decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 0.02)
    model = model.bfloat16().train()
    fuse(model)
    optimizer = make_optimizer("adamw", model.named_parameters(), TrainingSpec(), fused=True)
    ids = torch.randint(2, vocabulary, (2, ROWS, TOKENS))
    batch = PairBatch(
        input_ids=ids[0],
        attention_mask=torch.ones_like(ids[0]),
        labels=ids[1],
        target_tokens=ids[1].numel(),
        rows=np.arange(ROWS),
        input_padded=False,
    )
    return Training(model, optimizer, [batch])


def disk_rate(folder: Path, size: int) -> float:
    """Bytes a second of a plain write and fsync of so many bytes."""
    piece = os.urandom(1 << 24)
    begun = time.perf_counter()
    with open(folder / "plain", "wb") as handle:
        for _ in range(size // len(piece)):
            handle.write(piece)
        handle.flush()
        os.fsync(handle.fileno())
    return size / (time.perf_counter() - begun)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
