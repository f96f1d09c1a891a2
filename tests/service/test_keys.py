"""Who is let in: keys from the environment and from a file, which is read again when it changes."""

from __future__ import annotations

import hmac
import os
from pathlib import Path

import pytest

from jobs.process.secrets import new_key
from service.edge import keys as keys_module
from service.edge.keys import Keys
from tests.service.running import running


def write(file: Path, *lines: str) -> Path:
    """As an editor does: a new file in the place of the old."""
    new = file.with_suffix(".new")
    new.write_text("".join(f"{line}\n" for line in lines))
    os.replace(new, file)
    return file


def test_names_by_key(tmp_path: Path) -> None:
    (anna, line), (bert, other) = new_key("anna"), new_key("bert")
    keys = Keys("the one in the environment", write(tmp_path / "keys", "# may in", line, other))
    given = ("the one in the environment", anna, bert, "", "anna", anna[:-1], f"{anna} ", line.split()[1])
    names = [keys.name_of(key.encode()) for key in given]
    assert names == ["default", "anna", "bert", None, None, None, None, None]


def test_no_plain_key_is_held(tmp_path: Path) -> None:
    key, line = new_key("anna")
    keys = Keys("the one in the environment", write(tmp_path / "keys", line))
    held = repr(vars(keys)).encode()
    assert b"in the environment" not in held and key.encode() not in held


def test_every_key_is_compared_whichever_is_the_right_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Time says nothing by construction: all digests, of one length, by compare_digest, with no early exit between.
    made = [new_key(f"key-{number}") for number in range(5)]
    keys = Keys(None, write(tmp_path / "keys", *(line for _, line in made)))
    compared: list[tuple[int, int]] = []

    class CountedDigests:
        @staticmethod
        def compare_digest(one: bytes, other: bytes) -> bool:
            compared.append((len(one), len(other)))
            return hmac.compare_digest(one, other)

    monkeypatch.setattr(keys_module, "hmac", CountedDigests)
    for key in (made[0][0], made[2][0], made[4][0], "wrong", ""):
        compared.clear()
        keys.name_of(key.encode())
        assert compared == [(32, 32)] * 5


def test_the_file_is_followed(tmp_path: Path) -> None:
    (anna, line), (bert, other) = new_key("anna"), new_key("bert")
    keys = Keys(None, write(tmp_path / "keys", line))
    assert (keys.name_of(anna.encode()), keys.name_of(bert.encode())) == ("anna", None)
    with open(tmp_path / "keys", "a") as file:
        file.write(f"{other}\n")
    assert (keys.name_of(anna.encode()), keys.name_of(bert.encode())) == ("anna", "bert")
    write(tmp_path / "keys", other)
    assert (keys.name_of(anna.encode()), keys.name_of(bert.encode())) == (None, "bert")
    write(tmp_path / "keys")
    assert keys.name_of(bert.encode()) is None and keys.needed  # nobody is in, rather than everybody


def test_a_file_that_becomes_unusable_locks_nobody_out_and_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key, line = new_key("anna")
    file = write(tmp_path / "keys", line)
    keys = Keys(None, file)
    write(file, line, f"bert {key}")
    for _ in range(3):
        assert keys.name_of(key.encode()) == "anna"
    assert [r.levelname for r in caplog.records] == ["ERROR"] and "line 2" in caplog.text and key not in caplog.text
    caplog.clear()
    file.unlink()
    for _ in range(3):
        assert keys.name_of(key.encode()) == "anna"
    assert "No such file" in caplog.text and len(caplog.records) == 1
    write(file, new_key("bert")[1])
    assert keys.name_of(key.encode()) is None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("# nobody\n", "holds no key"),
        ("anna 12\n", "line 1 "),
        (None, "No such file"),
        ("default {digest}\n", "default is"),
    ],
)
def test_an_unusable_file_is_refused_at_the_start(tmp_path: Path, content: str | None, said: str) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_text(content.format(digest="0" * 64))
    with pytest.raises(ValueError, match=said) as raised:
        Keys("one" if content and "default" in content else None, file)
    assert f"LONGHAUL_API_KEYS_FILE={file}" in str(raised.value)


def test_a_key_of_the_file_lets_in_and_is_named_in_the_log(
    redis_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key, line = new_key("anna")
    file = write(tmp_path / "keys", line)
    with running(redis_url, tmp_path, api_keys_file=file) as service, caplog.at_level("INFO", "longhaul.service"):
        assert service.get("/jobs").status_code == 401
        assert service.get("/jobs", headers={"Authorization": f"Bearer {key}"}).status_code == 200
        assert service.get("/jobs", headers={"Authorization": f"bearer {key}"}).status_code == 200
        assert service.get("/jobs", headers={"Authorization": f"Basic {key}"}).status_code == 401
        write(file)
        assert service.get("/jobs", headers={"Authorization": f"Bearer {key}"}).status_code == 401
    assert "by anna" in caplog.text and key not in caplog.text
