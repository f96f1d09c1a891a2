"""API keys and the file of their hashes."""

from __future__ import annotations

import re

import pytest

from jobs.errors import UserError
from jobs.process.secrets import digest_of, new_key, read_keys


def test_a_new_key_and_its_line_belong_together_and_no_two_are_the_same() -> None:
    made = [new_key("anna") for _ in range(20)]
    assert len({key for key, _ in made}) == 20
    for key, line in made:
        assert re.fullmatch(r"lh_[A-Za-z0-9_-]{43}", key) and key not in line
        assert read_keys(line) == {"anna": digest_of(key.encode())}


@pytest.mark.parametrize("name", ["", "two words", "#anna", "a\nb 00", "a" * 65, "-x"])
def test_an_illegal_name_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="cannot name a key"):
        new_key(name)


def test_comments_and_empty_lines_are_passed_over() -> None:
    (_, anna), (_, bert) = new_key("anna"), new_key("bert")
    assert list(read_keys(f"# who may in\n\n{anna}\n   \n  {bert.replace(' ', '   ')}\n")) == ["anna", "bert"]


@pytest.mark.parametrize("wrong", ["anna", "anna 12", "anna {digest} x", "{key}", "an/na {digest}", "anna {key}"])
def test_a_wrong_line_is_named_by_its_number_and_not_shown(wrong: str) -> None:
    key, line = new_key("anna")
    text = wrong.format(key=key, digest=line.split()[1])
    with pytest.raises(ValueError, match="line 3 ") as raised:
        read_keys(f"# keys\n{new_key('bert')[1]}\n{text}\n")
    assert key not in str(raised.value)


def test_a_name_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="line 2: the name anna"):
        read_keys("\n".join([new_key("anna")[1], new_key("anna")[1]]))
