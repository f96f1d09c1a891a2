"""Inputs of tasks that read one text and answer beside it, without a target."""

from __future__ import annotations

from worker.training.dataset.tokens import Encoder, TokenizerState
from worker.training.rows.chat import written
from worker.training.rows.text import Texts
from worker.training.tasks.task import Prompt


def asked_input(tokenizer: TokenizerState, texts: Texts, limit: int) -> Prompt:
    """The input, at most `limit` tokens of it; of a chat its last turn, of a text without an input the text."""
    text = written(texts.turns[-1:]) if texts.turns else texts.input or texts.target
    encoded = Encoder(tokenizer).encode([text], limit)
    return Prompt(encoded.tokens.tolist(), text, cut=bool(encoded.full_lengths[0] > encoded.lengths[0]))
