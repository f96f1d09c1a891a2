"""Characters written differently: what a tokenizer cannot represent, and nothing else."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import SupportsIndex

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from worker.training.rows.characters import TYPOGRAPHY, Rewriter, needed


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("½ cup", "1/2 cup"),
        ("1½ cups, 2 ¼ cups, 1⅛", "1 1/2 cups, 2 1/4 cups, 1 1/8"),
        ("3⁄4 cup", "3/4 cup"),
        ("“it’s”…", '"it\'s"...'),
        ("5–6 min—then − wait — more", "5-6 min - then - wait - more"),
        ("a\u00a0b, soft\u00adly", "a b, softly"),
        ("180 ºF", "180 °F"),
        ("crème brûlée 180 °C", "crème brûlée 180 °C"),
    ],
)
def test_typography_is_made_plain(before: str, after: str) -> None:
    assert Rewriter()(before, Counter()) == after


def test_every_rewritten_character_is_counted() -> None:
    counts: Counter[str] = Counter()
    Rewriter({"½": "1/2", "{": "("})("½ and ½ {cup}", counts)
    assert counts == {"½": 2, "{": 1}


def test_an_empty_table_leaves_everything() -> None:
    assert Rewriter({})("½ {}", Counter()) == "½ {}"


def test_letters_are_composed_before_their_accents_are_looked_at() -> None:
    counts: Counter[str] = Counter()
    rewrite = Rewriter({"ñ": "n", "\u0301": ""})
    assert rewrite("jalapen\u0303o, sable\u0301, q\u0301", counts) == "jalapeno, sablé, q"
    assert counts == {"\u0303": 1, "\u0301": 2, "ñ": 1}


def knowing(characters: str, normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    """A tokenizer of single characters."""
    vocabulary = {character: number for number, character in enumerate(["?", *dict.fromkeys("▁" + characters)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, "?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return tokenizer


def needed_by(tokenizer: Tokenizer) -> dict[str, str]:
    return needed(
        lambda text: list(tokenizer.encode(text).ids), lambda ids: tokenizer.decode(ids).replace(" ", ""), unknown=0
    )


def test_what_a_tokenizer_knows_is_left_to_it() -> None:
    table = needed_by(knowing("ab1/2½'’eé({n"))
    assert not {"½", "’", "é", "{"} & set(table)
    assert table["¼"] == "1/4"
    assert (table["ñ"], table["è"]) == ("n", "e")
    assert "}" not in table, "it does not know ) either"


def test_letters_are_looked_at_between_letters_that_the_tokenizer_knows() -> None:
    assert not set("öß") & set(needed_by(knowing("Grösseß")))


def test_what_a_tokenizer_reads_as_something_else_is_rewritten() -> None:
    """T5 reads º as o, which is another thing, and … as three points, which is the same."""
    table = needed_by(knowing("abo°.", normalizers.NFKC()))
    assert table["º"] == "°"
    assert "…" not in table


def test_everything_typographic_is_rewritten_for_a_tokenizer_that_knows_ascii_alone() -> None:
    ascii_only = knowing("".join(map(chr, range(32, 127))))
    table = needed_by(ascii_only)
    rewrite = Rewriter(table)
    for character in TYPOGRAPHY.keys() - {"º", "˚", "\u200b"}:
        assert 0 not in ascii_only.encode(rewrite(f"1{character}2", Counter())).ids, character


def test_t5_keeps_its_own_signs(t5_tokenizer: Path) -> None:
    tokenizer = Tokenizer.from_file(str(t5_tokenizer / "tokenizer.json"))
    table = needed(lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids), tokenizer.decode, unknown=2)
    assert not set("’–—“”•®°éèêçîâôàüöä\u00a0\u2009\u2029™…") & set(table)
    rewrite = Rewriter(table)
    for character in "½¼¾⅓⅔⅛⅜⁄ñíïúëìò‚‟´×{}`":
        assert 2 not in tokenizer.encode(rewrite(f"1{character} a", Counter())).ids, character
    assert rewrite("350ºF for 1½ jalapeño", Counter()) == "350°F for 1 1/2 jalapeno"
    assert "<" not in table


class Watched(str):
    """A text that remembers how many characters of it were copied out."""

    copied = 0

    def __getitem__(self, place: SupportsIndex | slice) -> str:
        piece = super().__getitem__(place)
        self.copied += len(piece)
        return piece


def test_rewriting_copies_the_neighbours_of_a_character_and_not_the_text_around_it() -> None:
    text = Watched("1½ cups — " * 1000)
    assert Rewriter()(text, Counter()) == "1 1/2 cups - " * 1000
    assert text.copied <= 2 * 2000
