"""Rows of seq2seq as numbers: the tokens of the input, and those of the target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jobs.preview import RowPreview, TextPreview
from worker.training.dataset.data import SIDES
from worker.training.dataset.encoding import EncodedRows, Limits
from worker.training.dataset.preview import SHOWN
from worker.training.dataset.tokens import Encoder, TokenizerState
from worker.training.rows.text import Texts


class PairEncoder:
    """Both texts of a row, tokenized alike."""

    def __init__(self, tokenizer: TokenizerState, limits: Limits) -> None:
        self._encoder, self._limits = Encoder(tokenizer), limits

    def encode(self, texts: Sequence[Texts]) -> EncodedRows:
        """No row has a defect."""
        input, target = (
            self._encoder.encode([getattr(one, side) for one in texts], self._limits[side]) for side in SIDES
        )
        short = (target.full_lengths > target.lengths) | (target.unknown_tokens > 0)
        lossy = [row for row, one in enumerate(texts) if short[row] or not self._encoder.keeps(one.target)]
        return EncodedRows({"input": input, "target": target}, whole_targets={row: texts[row].target for row in lossy})

    def preview(self, number: int, texts: Texts, rewritten: Mapping[str, int]) -> RowPreview:
        """Both texts."""
        input, target = (
            self._preview(text, self._limits[side]) for side, text in (("input", texts.input), ("target", texts.target))
        )
        return RowPreview(number=number, input=input, target=target, rewritten=dict(rewritten))

    def _preview(self, text: str, limit: int) -> TextPreview:
        tokens, cut, unknown = self._encoder.inspect(text, limit)
        return TextPreview(
            text=text[:SHOWN], characters=len(text), tokens=tokens, cut_characters=cut, unknown=dict(unknown)
        )
