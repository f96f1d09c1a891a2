"""Lines of text that is not UTF-8, read as Windows-1252 where they look like it: what Excel and old exports write.

No encoding of one byte a character can be told for certain. So the file decides: without a mark of another encoding, a
line that is not UTF-8 is taken for Windows-1252 if no line before it, and none of the next MiB, has a character of
UTF-8 beyond ASCII, and nine in ten of those that are not UTF-8 read as words of a Western language. Letters that stand
where no language of the West has them are those of another encoding: ţ of Romanian is þ, ő of Hungarian õ, č of
Croatian è. Then no line is taken. Whoever reads the file from its beginning decides alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

WINDOWS_1252 = "text that is not UTF-8, read as Windows-1252"
"""What is noticed of such a row."""
_AHEAD = 1 << 20
_PLAUSIBLE = 0.9
"""Share of the lines."""
_FOREIGN_WORD = re.compile("[\u00aa\u00b5\u00ba\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u00ff]{3}")
"""Cyrillic, Greek and Chinese words have such letters in a row, Western ones no three."""
_IN_A_WORD = re.compile(r"(?<=[^\W\d_])[¡¢£¤¥¦§¨©¬¯±²³¶¸¹¼½¾¿×÷ˆ˜‚„”†‡‰‹›•](?=[^\W\d_])")
"""Signs that no Western word has inside, as letters of Central Europe, of DOS and of the Macintosh look."""
_OF_THE_EAST = re.compile(
    "[ðþýÐÞÝ]"  # Turkish, Romanian, Czech, Baltic; Icelandic has them, and has to be UTF-8
    r"|õ(?!e)|Õ(?!E)"  # Hungarian; Portuguese has õe
    r"|(?<!['’])\bè(?=[^\W\d_])|è(?=[aeiouæ])|æ(?=[aeiou])"  # Croatian, Slovene
    r"|ç(?=[^\W\d_aouáâãóôõúàòù])"  # Latvian
    r"|[ºª](?=[a-zà-ÿ])|ã(?=[a-df-lp-rt-zî])"  # Romanian
    r"|ì(?=[a-z])"  # Czech
)
"""What Windows-1250, 1254 and 1257 have become."""
_TELLING = 50
"""One in so many letters beyond ASCII tells another encoding: a name may have such a letter."""
_LETTER = re.compile("[À-ÖØ-öø-ÿ]")
_WESTERN_TOO = re.compile(rb"\xc9\xa0|[\xe0\xe8\xe9]\xa0[\xab\xbb]")
"""Characters of UTF-8 that are É, à, è or é, a space that does not break, and a quote."""


class Recoded(bytes):
    """A line in UTF-8 that is not UTF-8 in the file."""


class Recoder:
    """Reads the lines of a file, and knows whether any was recoded."""

    def __init__(self) -> None:
        self.recodes = False

    def lines(self, lines: Iterator[bytes]) -> Iterator[bytes]:
        """The lines, Recoded where they were in Windows-1252; as they are where that cannot be."""
        for line in lines:
            if line.isascii() or type(line) is not bytes:  # of one that is too long, a part is here
                yield line
                continue
            if _has_utf8(line):
                yield line
                break
            ahead, size = [line], len(line)
            while size < _AHEAD and (next_line := next(lines, b"")):
                ahead.append(next_line)
                size += len(next_line)
            self.recodes = _reads_as_words([each for each in ahead if not each.isascii()])
            yield from map(self._recoded, ahead)
            break
        yield from map(self._recoded, lines) if self.recodes else lines

    def _recoded(self, line: bytes) -> bytes:
        if not self.recodes or line.isascii() or type(line) is not bytes or _has_utf8(line):
            return line
        text = _as_words(line)
        return line if text is None else Recoded(text.encode())


def _has_utf8(line: bytes) -> bool:
    """Whether it holds a whole character of UTF-8 beyond ASCII."""
    return not _WESTERN_TOO.sub(b"", line).decode("utf-8", "ignore").isascii()


def _reads_as_words(lines: list[bytes]) -> bool:
    """Of lines that are not ASCII."""
    texts = [text for line in lines if (text := _as_words(line)) is not None]
    telling = sum(len(_OF_THE_EAST.findall(text)) for text in texts)
    if telling * _TELLING > sum(len(_LETTER.findall(text)) for text in texts):
        return False
    return not any(map(_has_utf8, lines)) and len(texts) >= _PLAUSIBLE * len(lines)


def _as_words(line: bytes) -> str | None:
    """The line in Windows-1252; None: it has bytes that mean nothing there, or reads as no Western language."""
    try:
        text = line.decode("cp1252")
    except UnicodeDecodeError:
        return None
    return None if _FOREIGN_WORD.search(text) or _IN_A_WORD.search(text) else text
