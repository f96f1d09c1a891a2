"""Small jobs of every task and method, each trained once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jobs.disk.rundir import RunDir
from tests.training.attempts import attempt
from tests.training.workplace import Workplace, pairs
from worker.training.tasks.causal import builtin

CHATS = [
    {"messages": [{"role": "user", "content": f"What is in pot {n}, {word} or not?"},
                  {"role": "assistant", "content": f"There is {word} in it."}]}
    for n in range(16) for word in ("bread", "soup", "cake")
]  # fmt: skip
FOXES = [{"input": f"question {n}", "target": "the fox 🦊"} for n in range(48)]
"""Of a model whose tokenizer has a token for each byte of the last character."""
CLASSES = [{"text": f"{word} number {n}", "label": word} for n in range(24) for word in ("bread", "soup", "cake")]
SCORES = [{"text": f"{word} number {n}", "score": n % 5 / 2} for n in range(24) for word in ("bread", "soup", "cake")]
TRAINING: dict[str, Any] = {"epochs": 4, "batch_size": 8, "learning_rate": 0.01}
LORA = {"type": "lora", "rank": 4}
JOBS: dict[str, dict[str, Any]] = {
    "seq2seq": {"train": "pairs.jsonl", "data": {"input": "ask: {input}", "target": "{target}"}},
    "seq2seq lora": {"train": "pairs.jsonl", "method": LORA | {"merge": True}},
    "seq2seq adapters": {"train": "pairs.jsonl", "method": LORA},
    "causal": {"train": "chats.jsonl", "model": "builtin:qwen-tiny"},
    "causal lora": {"train": "chats.jsonl", "model": "builtin:qwen-tiny", "method": LORA | {"merge": True}},
    "causal adapters": {"train": "chats.jsonl", "model": "builtin:qwen-tiny", "method": LORA},
    "causal bytes": {
        "train": "foxes.jsonl",
        "model": "./bytes",
        "training": TRAINING | {"epochs": 8, "learning_rate": 0.005},
    },
    "classification": {"train": "classes.jsonl", "model": "builtin:roberta-tiny"},
    "regression": {"train": "scores.jsonl", "model": "builtin:roberta-tiny", "task": "regression"},
}


class TrainedJobs:
    """Trains the jobs above when they are asked for."""

    def __init__(self, folder: Path) -> None:
        self.place = Workplace(folder / "place", planned=False)
        self.place.rows("pairs.jsonl", pairs(48))
        self.place.rows("chats.jsonl", CHATS)
        self.place.rows("foxes.jsonl", FOXES)
        self.place.rows("classes.jsonl", CLASSES)
        self.place.rows("scores.jsonl", SCORES)
        (self.place.data / "bytes").mkdir()
        builtin.build(self.place.data / "bytes", ["the fox"], seed=0)
        self._runs: dict[str, RunDir] = {}

    def __getitem__(self, name: str) -> RunDir:
        if name not in self._runs:
            job = dict(JOBS[name])
            data = {"validation": 0.2} | job.pop("data", {})
            job = {"training": TRAINING, "evaluation": {"samples": 3, "generate_rows": 3}} | job
            run = self.place.job(job.pop("train"), data=data, **job)
            self.place.prepare(run)
            assert attempt(run) == 0
            self._runs[name] = run
        return self._runs[name]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainedJobs:
    return TrainedJobs(tmp_path_factory.mktemp("trained"))
