"""Rows of a causal model as numbers: the tokens of the row, and the positions of those that are learned."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jobs.errors import Rejected
from jobs.preview import RowPreview, SpanPreview, TextPreview
from jobs.spec import Learn
from worker.training.dataset.data import Int64, token_dtype
from worker.training.dataset.encoding import EncodedRows, Limits
from worker.training.dataset.preview import SHOWN
from worker.training.dataset.tokens import EncodedTexts, TokenizerState, open_tokenizer, unusable
from worker.training.rows.row import NO_TOOLS, REPAIRS, Defect
from worker.training.rows.text import Texts
from worker.training.tasks.causal.chat import (
    ENDS_EARLY,
    LEFT_OUT,
    NO_CALLS,
    NO_END,
    NO_TEMPLATE,
    NOT_A_BEGINNING,
    NOT_RENDERED,
    NOT_SAID,
    NOT_THOUGHT,
    TOO_LONG,
    ChatFormat,
    Rendered,
    Span,
)

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerFast

NOTHING_LEARNED = "no reply within data.max_tokens"
ACROSS = "a token across the beginning of a reply"
REPLIES_CUT = "a chat with replies beyond data.max_tokens, which are not learned"
INDENTED = "a reply without the white space that it begins with, which the tokenizer joins with the prompt"
OTHER_PROMPT = "a reply behind other tokens than its prompt has when the model is asked"
_HELP = {
    NO_TEMPLATE: "set data.chat_template, such as to alpaca, or take an instruct model, whose tokenizer has a template",
    NO_END: "set data.chat_template to alpaca, mistral or vicuna, which end replies with the tokenizer's own end token",
    NOT_THOUGHT: "take a model whose chat template writes reasoning, or write it into the content, as "
    "<think>…</think>, or take it out of the rows",
    NO_CALLS: "take a model whose chat template writes tool calls",
    NO_TOOLS: REPAIRS[NO_TOOLS],
}
"""What else helps where a template makes no row."""
_OF_TEMPLATE = (
    NO_TEMPLATE, NOT_A_BEGINNING, NO_END, ENDS_EARLY, NOT_SAID, NOT_THOUGHT, NO_CALLS, NO_TOOLS, NOT_RENDERED, LEFT_OUT,
    TOO_LONG, ACROSS,
)  # fmt: skip
"""Defects whose cause is the tokenizer, where the first rows have them."""
_PROMPT_ENDS = 256
"""Ends of prompts whose tokens are remembered: most templates have one."""


@dataclass(frozen=True)
class CausalTokenizer(TokenizerState):
    """A tokenizer, and how it writes chats."""

    chat: ChatFormat = field(default_factory=lambda: ChatFormat(None, {}, (), ()))

    @classmethod
    def read(cls, folder: Path, chat_template: str | None = None) -> CausalTokenizer:
        """The tokenizer in a model folder, with its own chat template or with this one.

        Raises Rejected (`tokenizer_unusable`, `chat_template`).
        """
        tokenizer = open_tokenizer(folder)
        if tokenizer.eos_token_id is None:
            raise unusable(f"the tokenizer in {folder} has no end-of-sequence token")
        fast = tokenizer.backend_tokenizer
        fast.no_truncation()
        fast.no_padding()
        names = {name: token for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
        special = tuple(str(token) for token in tokenizer.added_tokens_decoder.values() if token.special)
        template: str | Mapping[str, str] | None = chat_template or tokenizer.chat_template
        tool_template = None
        if isinstance(template, Mapping):  # some have others beside it, such as one for tools
            tool_template, template = template.get("tool_use"), template.get("default")
        chat = ChatFormat(template, names, end_tokens(tokenizer, folder), special, tool_template)
        try:
            chat = chat.with_end()
        except Defect as defect:
            raise unusable_template(str(defect)) from None
        missing = -1
        return cls(
            # Untrimmed, a token across the beginning of a reply can be seen also where its first character is a space.
            content=fast.to_str().replace('"trim_offsets":true', '"trim_offsets":false'),
            end=tokenizer.eos_token_id,
            padding=missing,
            unknown=missing if tokenizer.unk_token_id is None else tokenizer.unk_token_id,
            size=len(tokenizer),
            chat=chat,
        )

    @property
    def end_ids(self) -> list[int]:
        """Tokens that end a reply."""
        ids = map(self.open().token_to_id, self.chat.ends)
        return [number for number in ids if number is not None]

    def rewrites(self) -> dict[str, str]:
        """None where every character is known, as bytes are."""
        return {} if self.unknown < 0 or _knows_bytes(self.content) else super().rewrites()


def end_tokens(tokenizer: PreTrainedTokenizerFast, folder: Path) -> tuple[str, ...]:
    """Those of the tokenizer and of the model's generation_config.json, at which generation stops."""
    try:
        named = json.loads((folder / "generation_config.json").read_bytes()).get("eos_token_id")
    except (OSError, ValueError, AttributeError):
        named = None
    ids = [tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])]
    tokens = tokenizer.convert_ids_to_tokens([number for number in ids if isinstance(number, int)])
    return tuple(dict.fromkeys(token for token in tokens if token))


class _Example(NamedTuple):
    """An example as numbers, without the limit."""

    rendered: Rendered
    encoding: Encoding
    ids: Int64
    """Its tokens."""
    positions: Int64
    """Of the learned ones."""
    as_asked: bool
    """Whether every reply is (see `CausalEncoder._as_asked`)."""


class CausalEncoder:
    """By a tokenizer that was tried. `everything`: all tokens are learned, not only replies; `learn`: what of these."""

    def __init__(self, tokenizer: CausalTokenizer, limits: Limits, *, everything: bool, learn: Learn = "all") -> None:
        self._tokenizer, self._fast = tokenizer, tokenizer.open()
        self._limit, self._everything, self._learn = limits["input"], everything, learn
        self._dtype = token_dtype(tokenizer.size)
        self._special = {self._fast.token_to_id(token) for token in tokenizer.chat.special}
        self._prompt_end = functools.lru_cache(_PROMPT_ENDS)(self._ids)

    def encode(self, texts: Sequence[Texts]) -> EncodedRows:
        """Defects are those of chat templates, and rows of which nothing learned is left within the limit."""
        defects: dict[int, str] = {}
        rendered: dict[int, Sequence[Rendered]] = {}
        for place, one in enumerate(texts):
            try:
                rendered[place] = self._rendered(one)
            except Defect as defect:
                defects[place] = str(defect)
        kept: list[tuple[Int64, Int64, int, int]] = []
        examples: list[int] = []
        unknown: dict[int, Counter[str]] = {}
        whole_targets: dict[int, str] = {}
        noticed: Counter[str] = Counter()
        for place, whole in rendered.items():
            try:
                row, own = self._unjoined(texts[place], whole, self._encodings(whole))
                found = self._examples(row, own)
            except Defect as defect:
                defects[place] = str(defect)
                continue
            noticed[INDENTED] += row is not whole
            noticed[OTHER_PROMPT] += not all(each.as_asked for each in found)
            noticed[REPLIES_CUT] += len(found) < len(row)
            examples.append(len(found))
            for each in found:
                if lost := self._unknown(each.rendered.text, each.encoding):
                    unknown[len(kept)] = lost
                positions, full = each.positions, len(each.ids)
                if lost or positions[-1] >= self._limit:
                    whole_targets |= {len(kept): reply for reply in self._lossy_reply(each)}
                kept.append((each.ids[: self._limit], positions[positions < self._limit], full, len(positions)))
        sizes = [sum(found.values()) for found in (unknown.get(row, Counter()) for row in range(len(kept)))]
        return EncodedRows(
            {
                "input": self._side([one[0] for one in kept], [one[2] for one in kept], sizes, unknown),
                "target": self._side([one[1] for one in kept], [one[3] for one in kept], [0] * len(kept), {}),
            },
            defects,
            noticed,
            whole_targets,
            examples,
        )

    def preview(self, number: int, texts: Texts, rewritten: Mapping[str, int]) -> RowPreview:
        """The row as the template writes it, what of it is learned, and what is cut off."""
        whole = self._rendered(texts)
        row, own = self._unjoined(texts, whole, self._encodings(whole))
        found = self._examples(row, own)
        counts, cut, unknown = np.zeros(2, np.int64), np.zeros(2, np.int64), Counter[str]()
        shown = []
        for rendered, encoding, ids, positions, _ in found:
            cut_off = self._limit - len(self._leading(rendered))
            end = len(rendered.text) if len(ids) <= self._limit else encoding.offsets[max(0, cut_off)][0]
            begin = rendered.spans[-1].begin
            unknown |= self._unknown(rendered.text, encoding)
            counts += (min(len(ids), self._limit), (positions < self._limit).sum())
            cut += (max(0, begin - end), min(len(rendered.text) - begin, len(rendered.text) - end))
            shown.append(spans_of(rendered, end))
        sides = zip((texts.input, texts.target), counts.tolist(), cut.tolist(), (dict(unknown), {}), strict=True)
        input, target = (
            TextPreview(text=text[:SHOWN], characters=len(text), tokens=tokens, cut_characters=lost, unknown=of_side)
            for text, tokens, lost, of_side in sides
        )
        return RowPreview(
            number=number, input=input, target=target, rewritten=dict(rewritten),
            spans=shown[-1], earlier_examples=tuple(shown[:-1]),
        )  # fmt: skip

    def _rendered(self, texts: Texts) -> Sequence[Rendered]:
        return self._tokenizer.chat.render(texts, everything=self._everything, learn=self._learn)

    def _unjoined(
        self, texts: Texts, rendered: Sequence[Rendered], encodings: Sequence[Encoding]
    ) -> tuple[Sequence[Rendered], Sequence[Encoding]]:
        """The same examples; where a token reaches across the beginning of a reply that begins with white space, those
        without that. The model is asked for a reply behind the whole prompt, so no other row can teach it. Raises
        Defect."""
        if not any(map(_is_across, rendered, encodings)) or (bare := texts.without_indents()) == texts:
            return rendered, encodings
        rendered = self._rendered(bare)
        return rendered, self._encodings(rendered)

    def _encodings(self, rendered: Sequence[Rendered]) -> list[Encoding]:
        return self._fast.encode_batch([one.text for one in rendered], add_special_tokens=False) if rendered else []

    def _examples(self, row: Sequence[Rendered], encodings: Sequence[Encoding]) -> list[_Example]:
        """Those of a row of which something learned is within the limit. Raises Defect."""
        found = [self._numbers(*one) for one in zip(row, encodings, strict=True)]
        within = [one for one in found if (one.positions < self._limit).any()]
        if not within:
            raise Defect(NOTHING_LEARNED)
        return within

    def _numbers(self, rendered: Rendered, encoding: Encoding) -> _Example:
        """Raises Defect."""
        leading, own = self._leading(rendered), encoding.ids
        ids = np.array([*leading, *own], np.int64)
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        learned = np.zeros(len(offsets), bool)
        as_asked = True
        if _is_across(rendered, encoding):
            raise Defect(ACROSS)
        for span in rendered.spans:
            begin, end = span.reply
            as_asked = as_asked and self._as_asked(rendered.text, begin, own, offsets[:, 0])
            # Some end tokens take the white space behind them along (Phi-3's), and then end behind the span.
            of_reply = (offsets[:, 0] >= begin) & (offsets[:, 0] < end)
            if span.begin > begin:  # a token across the beginning of the answer is of the answer
                of_reply &= offsets[:, 1] > span.begin
            if span.end < end:
                of_reply &= offsets[:, 1] <= span.end
            learned |= of_reply
        positions = np.flatnonzero(learned) + len(leading)
        positions = positions[positions > 0]  # nothing predicts the first token
        return _Example(rendered, encoding, ids, positions, as_asked)

    def _as_asked(self, text: str, begin: int, ids: list[int], begins: Int64) -> bool:
        """Whether the tokens before a reply are those of the prompt by itself, which generation continues.

        `begin`: of the reply in the text; `begins`: [ids] of each token. With the reply behind it, the end of a prompt
        may be cut otherwise: GPT-2's tokenizer makes one token of two line breaks at the end of a text, and two before
        a word. A text is cut at special tokens first, so that nothing before the last of these can differ.
        """
        end = int((begins >= begin).argmax())
        start = next((place for place in range(end - 1, 0, -1) if ids[place] in self._special), 0)
        return ids[start:end] == self._prompt_end(text[int(begins[start]) : begin])

    def _lossy_reply(self, example: _Example) -> list[str]:
        """The last reply that begins within the limit, where its end is cut off or characters of it are unknown; none
        where nothing is before it, as in plain text."""
        rendered, encoding, _, positions, _ = example
        tokens = positions - len(self._leading(rendered))
        begins, ends = np.array(encoding.offsets, np.int64)[tokens].T
        last = begins[positions < self._limit][-1]
        span = next(each for each in rendered.spans if each.reply[0] <= last < each.reply[1])
        own = (ends > span.begin) & (begins < span.end)
        cut = positions[own][-1] >= self._limit
        if span.begin == 0 or not (cut or self._tokenizer.unknown in np.array(encoding.ids)[tokens[own]]):
            return []
        text = rendered.text[span.begin : span.end]
        for special in self._tokenizer.chat.special:
            text = text.replace(special, "")
        return [text.strip()]

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._fast.encode(text, add_special_tokens=False).ids
        return ids

    def _leading(self, rendered: Rendered) -> tuple[int, ...]:
        """Tokens before the text, which it does not hold itself."""
        return () if rendered.as_chat else self._tokenizer.leading

    def _unknown(self, text: str, encoding: Encoding) -> Counter[str]:
        found: Counter[str] = Counter()
        if self._tokenizer.unknown >= 0:
            for token, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
                if token == self._tokenizer.unknown:
                    found.update(text[start:stop])
        return found

    def _side(
        self, numbers: list[Int64], full: list[int], unknown: list[int], characters: dict[int, Counter[str]]
    ) -> EncodedTexts:
        flat = np.concatenate(numbers) if numbers else np.empty(0, np.int64)
        return EncodedTexts(
            tokens=flat.astype(self._dtype),
            lengths=np.array([len(one) for one in numbers], np.int32),
            full_lengths=np.array(full, np.int32),
            unknown_tokens=np.array(unknown, np.int32),
            unknown=characters,
        )


def tried(
    tokenizer: TokenizerState, texts: Sequence[Texts], limits: Limits, *, everything: bool, learn: Learn = "all"
) -> CausalTokenizer:
    """The tokenizer, once it has written the first rows of a job.

    Raises Rejected: `chat_template`, where its template makes none of them a row that can be learned from;
    `tokenizer_unusable`.
    """
    assert isinstance(tokenizer, CausalTokenizer)
    plain = [text for one in texts if not tokenizer.chat.takes(one) for text in one.all]
    tokenizer = replace(tokenizer, leading=tokenizer.tried(plain).leading)
    encoded = CausalEncoder(tokenizer, limits, everything=everything, learn=learn).encode(texts)
    of_template = [defect for defect in encoded.defects.values() if defect.startswith(_OF_TEMPLATE)]
    if texts and len(of_template) == len(texts):
        raise unusable_template(of_template[0])
    return tokenizer


def _is_across(rendered: Rendered, encoding: Encoding) -> bool:
    """Whether a token reaches across the beginning of a reply."""
    offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
    begins = (span.reply[0] for span in rendered.spans)
    return any(((offsets[:, 0] < begin) & (offsets[:, 1] > begin)).any() for begin in begins)


def unusable_template(defect: str) -> Rejected:
    """The error where no row can be written as a chat."""
    return Rejected(
        f"model: no row can be written as the model reads it: {defect}",
        code="chat_template",
        param="model",
        hint=_HELP.get(defect)
        or "put a chat template into the model's chat_template.jinja that writes a chat as what it asks for the last "
        "reply with, and that reply as it is",
    )


def spans_of(rendered: Rendered, end: int) -> tuple[SpanPreview, ...]:
    """The text up to `end` in parts, in order, by whether they are learned; at most `SHOWN` characters."""
    parts: list[SpanPreview] = []
    at, end = 0, min(end, SHOWN)
    for span in [*rendered.spans, Span(len(rendered.text), len(rendered.text))]:
        for begin, stop, learned in ((at, span.begin, False), (span.begin, span.end, True)):
            if text := rendered.text[begin : min(stop, end)]:
                parts.append(SpanPreview(text=text, learned=learned))
        at = span.end
    return tuple(parts)


def _knows_bytes(tokenizer: str) -> bool:
    """Whether a tokenizer.json falls back to bytes."""
    return '"ByteLevel"' in tokenizer or '"byte_fallback": true' in tokenizer or '"byte_fallback":true' in tokenizer
