"""TRL's `SFTTrainer` in `causal_throughput`, in an environment that has `trl` and nothing of this project's packages.

As its documentation has it: chats, `assistant_only_loss`, a chat template with `{% generation %}`, `packing` on or off,
its defaults for all that is not the same for all contenders. Two ways besides the documented one set
`gradient_checkpointing=False`, which those who have the memory would.

Packed sequences go through the model one at a time, as many to a step as hold the rows of a step. In several, TRL would
put them behind each other in one sequence, over the whole of which attention is computed where there is no
FlashAttention.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer

from benchmarks.versus import CausalRace, Turns

IGNORED = -100


@dataclass(frozen=True)
class TrlWay:
    """A configuration of `SFTTrainer`."""

    packing: bool
    recompute: bool


WAYS = {
    "trl": TrlWay(packing=False, recompute=True),
    "trl_packed": TrlWay(packing=True, recompute=True),
    "trl_kept": TrlWay(packing=False, recompute=False),
    "trl_packed_kept": TrlWay(packing=True, recompute=False),
}


class Counting(SFTTrainer):  # type: ignore[misc]  # TRL is not installed where types are checked
    """TRL's own, which says what goes through the model."""

    turns: Turns

    def training_step(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
        """As in SFTTrainer."""
        ids, mask = inputs["input_ids"], inputs.get("attention_mask")
        self.turns.ran(
            rows=len(ids) if mask is not None else int((inputs["position_ids"] == 0).sum()),
            tokens=ids.numel() if mask is None else int(mask.sum()),
            learned=int((inputs["labels"] != IGNORED).sum()),
            positions=ids.numel(),
        )
        return super().training_step(model, inputs, *arguments, **options)


class AfterStep(TrainerCallback):
    """Ends turns."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def on_step_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        """As in TrainerCallback."""
        self._turns.stepped(state.global_step)


def main(argv: list[str]) -> int:
    """`NAME RACE`: the second as JSON."""
    name, text = argv
    way, race = WAYS[name], CausalRace(**json.loads(text))
    turns = Turns(race)
    with open(race.chats) as lines:
        chats = Dataset.from_list([json.loads(line) for line in lines])
    tokenizer = AutoTokenizer.from_pretrained(race.model, local_files_only=True)
    tokenizer.chat_template = race.template
    model = AutoModelForCausalLM.from_pretrained(race.model, dtype=torch.bfloat16, local_files_only=True)

    def trainer(accumulation: int) -> Counting:
        arguments = SFTConfig(
            output_dir=f"{race.model}-{name}",  # nothing is written there
            assistant_only_loss=True,
            packing=way.packing,
            max_length=race.longest,
            gradient_checkpointing=way.recompute,
            per_device_train_batch_size=1 if way.packing else race.micro_batch,
            gradient_accumulation_steps=accumulation,
            learning_rate=race.learning_rate,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=race.max_grad_norm,
            optim="adamw_torch_fused",
            num_train_epochs=1,
            seed=race.seed,
            use_cpu=True,
            dataloader_pin_memory=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        return Counting(model=model, args=arguments, train_dataset=chats, processing_class=tokenizer)

    steps = race.rows // race.batch_size
    sft = trainer(race.batch_size // race.micro_batch)
    if way.packing:
        sft = trainer(max(1, round(len(sft.train_dataset) / steps)))
    size = sft.args.per_device_train_batch_size * sft.args.gradient_accumulation_steps
    sft.turns = turns
    sft.add_callback(AfterStep(turns))
    turns.ready(
        model, -(-len(sft.train_dataset) // size), trl=trl.__version__, peer_transformers=transformers.__version__
    )
    sft.train()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
