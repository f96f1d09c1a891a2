"""Files that grow together: what was committed stays, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from worker.training.dataset.data import Ledger

NAMES = ("one", "two")


def ledger(folder: Path) -> Ledger:
    return Ledger(folder, "log", NAMES)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two commits, and something behind them as a killed process leaves it."""
    first = ledger(tmp_path)
    for number, (one, two) in enumerate([(b"aa", b"b"), (b"", b"cc")]):
        first.append("one", one)
        first.append("two", two)
        first.commit({"number": number})
    first.append("one", b"not committed")
    first.close()
    with open(tmp_path / "log", "ab") as log:
        log.write(b'{"sizes": {"one": 15, "tw')
    return tmp_path


def test_what_was_committed_is_gone_on_with(folder: Path) -> None:
    later = ledger(folder)
    assert later.notes == [{"number": 0}, {"number": 1}]
    assert later.sizes == {"one": 2, "two": 3}
    later.append("one", b"dd")
    later.commit({"number": 2})
    later.close()
    assert (folder / "one").read_bytes() == b"aadd"
    assert (folder / "two").read_bytes() == b"bcc"
    last = ledger(folder)
    assert len(last.notes) == 3
    last.close()


def damage_log(folder: Path) -> None:
    (folder / "log").write_bytes(b"\0\0\n")


def lose_the_end(folder: Path) -> None:
    (folder / "two").write_bytes(b"b")


def lose_a_file(folder: Path) -> None:
    (folder / "one").unlink()


@pytest.mark.parametrize("loss", [damage_log, lose_the_end, lose_a_file])
def test_what_the_disk_lost_is_made_anew(folder: Path, loss: object) -> None:
    assert callable(loss)
    loss(folder)
    anew = ledger(folder)
    assert anew.notes == []
    assert anew.sizes == {"one": 0, "two": 0}
    anew.close()
    assert (folder / "one").read_bytes() == (folder / "two").read_bytes() == (folder / "log").read_bytes() == b""
