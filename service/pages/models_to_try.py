"""Models that suit rows, by what rows are recognized as."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from jobs.plan import Plan
from jobs.preview import DataPreview

RowKind = Literal["labels", "whole", "pairs"]
"""Texts with labels; chats and plain text, learned as a whole; inputs with targets."""
RECOGNIZERS = ("builtin:roberta-tiny", "builtin:qwen-tiny")
"""Whose tasks together recognize all rows: a classifier those with labels, a language model the others."""
MODELS_TO_TRY: Mapping[RowKind, Mapping[str, str]] = {
    "labels": {
        "answerdotai/ModernBERT-base": "0.15 B, long texts",
        "FacebookAI/roberta-base": "0.12 B",
        "builtin:roberta-tiny": "tiny, to try things out",
    },
    "whole": {
        "Qwen/Qwen3-0.6B": "0.6 B",
        "Qwen/Qwen3-4B": "4 B",
        "Qwen/Qwen2.5-7B-Instruct": "7.6 B, with LoRA",
        "builtin:qwen-tiny": "tiny, to try things out",
    },
    "pairs": {
        "google/flan-t5-base": "0.25 B",
        "google/flan-t5-xl": "2.8 B",
        "Qwen/Qwen3-0.6B": "0.6 B, a language model",
        "builtin:t5-tiny": "tiny, to try things out",
    },
}
"""By name, with what tells them apart; the first one is taken where nobody chooses."""


def kind_of(plan: Plan, preview: DataPreview) -> RowKind:
    """What the rows of a checked job were taken for; where it writes, `labels_noticed` says that its targets look like
    labels."""
    if plan.task == "classification" or preview.labels_noticed:
        return "labels"
    return "whole" if preview.sources[0].input is None else "pairs"
