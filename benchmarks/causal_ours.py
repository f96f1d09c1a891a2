"""Our loop in `causal_throughput`: order, micro-batches, model, loss and `adamw` of worker.training."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from benchmarks.causal_race import CausalRace, Turns
from jobs.spec import TrainingSpec
from worker.training.dataset.data import PreparedDataset
from worker.training.loop import accumulate
from worker.training.network.model import load
from worker.training.optimizers.optimizer import make_optimizer
from worker.training.steps.order import StepOrder
from worker.training.steps.randomness import seed_step
from worker.training.tasks.causal.task import Causal


def main(argv: list[str]) -> int:
    """`RACE`, as JSON."""
    race = CausalRace(**json.loads(argv[0]))
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
