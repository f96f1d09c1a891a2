"""Characters that tokenizers commonly cannot represent, written with others: ½ becomes 1/2, 1½ becomes 1 1/2.

What is rewritten depends on the tokenizer (`needed`): only what it does not know, or knows as something else (T5 reads
180ºF as 180oF). What it cannot represent and cannot be written differently (`<` in T5) stays, and is reported.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping
from string import ascii_lowercase

_FRACTIONS = {
    "¼": "1/4", "½": "1/2", "¾": "3/4", "⅐": "1/7", "⅑": "1/9", "⅒": "1/10", "⅓": "1/3", "⅔": "2/3",
    "⅕": "1/5", "⅖": "2/5", "⅗": "3/5", "⅘": "4/5", "⅙": "1/6", "⅚": "5/6", "⅛": "1/8", "⅜": "3/8",
    "⅝": "5/8", "⅞": "7/8", "⅟": "1/", "↉": "0/3",
}  # fmt: skip
_EM_DASH = "—"
TYPOGRAPHY: Mapping[str, str] = {
    **_FRACTIONS,
    "⁄": "/", "∕": "/", "‘": "'", "’": "'", "‚": ",", "‛": "'", "′": "'", "“": '"', "”": '"', "„": '"',
    "‟": '"', "″": '"', "‹": "'", "›": "'", "«": '"', "»": '"', "´": "'", "º": "°", "˚": "°", "×": "x",
    "‐": "-", "‑": "-", "‒": "-", "–": "-", "―": "-", "−": "-", _EM_DASH: "-", "…": "...",
    "\u00ad": "", "\u200b": "", "\u2060": "", "\ufeff": "",  # soft hyphen, zero width
    "\u00a0": " ", "\u2007": " ", "\u2009": " ", "\u200a": " ", "\u202f": " ", "\u2028": " ", "\u2029": " ",
}  # fmt: skip
"""Plain spellings of fractions and typographic characters."""
_ASCII = {"{": "(", "}": ")", "`": "'"}
_LETTERS = {
    "ø": "o", "Ø": "O", "ł": "l", "Ł": "L", "đ": "d", "Đ": "D", "ı": "i", "æ": "ae", "Æ": "AE", "œ": "oe", "Œ": "OE",
    "ß": "ss",
}  # fmt: skip
_ACCENTED = [*range(0x00C0, 0x0250), *range(0x1E00, 0x1F00)]
_MARKS = range(0x0300, 0x0370)


class Rewriter:
    """Rewrites the characters of a table, and composes letters with their accents (NFC).

    Not NFKC: that would write 1½ as 11⁄2, and ⁄ is unknown to T5.
    """

    def __init__(self, table: Mapping[str, str] = TYPOGRAPHY) -> None:
        self.table = dict(table)
        self._odd = re.compile(f"[{re.escape(''.join(self.table))}]") if self.table else None
        self._odd_ascii = [character for character in self.table if character.isascii()]

    def __call__(self, text: str, counts: Counter[str]) -> str:
        """The text; `counts` goes up for each character that was rewritten."""
        if text.isascii():
            if not any(odd in text for odd in self._odd_ascii):
                return text
        elif not unicodedata.is_normalized("NFC", text):
            counts.update(filter(unicodedata.combining, text))
            text = unicodedata.normalize("NFC", text)
            counts.subtract(filter(unicodedata.combining, text))
        if self._odd is None:
            return text

        def plain(found: re.Match[str]) -> str:
            start, end = found.span()
            character, before, after = (
                found.group(),
                found.string[max(0, start - 1) : start],
                found.string[end : end + 1],
            )
            counts[character] += 1
            replacement = self.table[character]
            if character in _FRACTIONS:
                return (" " if before.isdigit() else "") + replacement
            if character == _EM_DASH:
                return (" " if before.strip() else "") + replacement + (" " if after.strip() else "")
            return replacement

        return self._odd.sub(plain, text)


def needed(tokens: Callable[[str], list[int]], text: Callable[[list[int]], str], unknown: int) -> dict[str, str]:
    """Which rewritable characters must be rewritten for a tokenizer, given as functions `tokens` and `text`."""
    before, after = [*(each for each in ascii_lowercase if unknown not in tokens(each)), "", ""][:2]

    def within(character: str) -> list[int]:
        """Its tokens, between letters that are known."""
        return tokens(f"{before}{character}{after}")

    def lost(character: str) -> bool:
        ids = within(character)
        return unknown in ids or character.casefold() not in text(ids).casefold()

    candidates = dict(TYPOGRAPHY) | _ASCII | _LETTERS
    for code in _ACCENTED:
        base = unicodedata.normalize("NFD", chr(code))
        if len(base) > 1 and base[0].isascii():
            candidates[chr(code)] = base[0]
    table = {
        character: plain
        for character, plain in candidates.items()
        if lost(character) and within(character) != within(plain)
    }
    # Those that NFC leaves: no letter has them composed.
    return table | {chr(code): "" for code in _MARKS if unknown in tokens(chr(code))}
