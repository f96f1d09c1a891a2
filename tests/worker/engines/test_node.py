"""The program on the node: what it does with orders, signals and silence. Its trainer is a script."""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.disk.rundir import RunDir
from tests.sinks.driving import until
from worker.engines.engine import SharedStorage
from worker.engines.handover import Handover, NodeReport, Orders
from worker.engines.node import attend, main

TRAINER = """#!/bin/sh
echo "$@" >> {folder}/started
trap 'echo stopped >> {folder}/started; exit 75' TERM
while [ ! -e {folder}/finish ]; do sleep 0.02; done
exit $(cat {folder}/finish)
"""
DEAF = TRAINER.replace("exit 75' TERM", "' TERM")


class Node:
    """The program in a thread, with the box played by the test."""

    def __init__(self, folder: Path, alone_s: float) -> None:
        self.folder = folder
        self.run = RunDir(folder / "job-1")
        (self.run.path / "attempts").mkdir(parents=True)
        self.handover = Handover(self.run.path, 3)
        self.asked = threading.Event()
        self.code: int | None = None
        self.beat = 0
        self.thread = threading.Thread(target=self._attend, args=(alone_s,))

    def _attend(self, alone_s: float) -> None:
        self.code = attend(self.run, 3, "right", alone_s, self.asked, SharedStorage())

    def order(self, order: str = "train", token: str = "right") -> None:
        self.beat += 1
        self.handover.write_orders(Orders.model_validate({"token": token, "order": order, "beat": self.beat}))

    def start(self) -> None:
        self.order()
        self.thread.start()

    def ended(self) -> int | None:
        self.thread.join(40)
        assert not self.thread.is_alive()
        return self.code

    def report(self) -> NodeReport | None:
        return self.handover.report()

    def started(self) -> list[str]:
        file = self.folder / "started"
        return file.read_text().splitlines() if file.exists() else []

    def training(self) -> None:
        """Once the trainer runs: the box has given a second sign of life."""

        def look() -> bool:
            self.order()
            return bool(self.started())

        until(look)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Node]:
    program = tmp_path / "trainer"
    program.write_text(getattr(request, "param", TRAINER).format(folder=tmp_path))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr("sys.executable", str(program))
    monkeypatch.setattr("worker.engines.node.LOOK_S", 0.02)
    node = Node(tmp_path, alone_s=1000)
    yield node
    (tmp_path / "finish").write_text("1")
    if node.thread.is_alive():
        node.order("kill")
        node.ended()


def test_it_trains_and_reports_the_exit_code(node: Node) -> None:
    node.start()
    node.training()
    until(lambda: node.report() is not None)
    report = node.report()
    assert report is not None and (report.token, report.code, report.host) == ("right", None, os.uname().nodename)
    (node.folder / "finish").write_text("76")
    assert node.ended() == 76
    assert node.started() == [f"-m worker.training train {node.run.path} --attempt 3"]
    assert (report := node.report()) is not None and report.code == 76


def test_no_trainer_starts_before_a_sign_of_life(node: Node) -> None:
    """A task that an engine starts hours after its supervisor died finds old orders."""
    node.start()
    node.asked.set()
    assert node.ended() == 75 and node.started() == []
    assert (report := node.report()) is not None and report.code == 75


def test_a_disk_that_takes_no_report_ends_no_trainer(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.engines.node.RETRY_S", 0.02)
    write, full, refused = Handover.write_report, [True], []

    def failing(self: Handover, report: NodeReport) -> None:
        if full[0]:
            refused.append(report.code)
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, report)

    monkeypatch.setattr(Handover, "write_report", failing)
    node.start()
    node.training()
    until(lambda: None in refused)
    (node.folder / "finish").write_text("0")
    until(lambda: 0 in refused)
    full[0] = False
    assert node.ended() == 0
    assert (said := node.report()) is not None and said.code == 0


def test_what_a_newer_side_says_besides_is_left_out(node: Node) -> None:
    folder = node.run.path / "attempts"
    (folder / "3.orders.json").write_text('{"token": "right", "order": "stop", "beat": 1, "new": 2}')
    (folder / "3.node.json").write_text('{"token": "right", "host": "h", "code": 0, "new": 2}')
    orders, report = node.handover.orders(), node.handover.report()
    assert orders is not None and orders.order == "stop" and report is not None and report.code == 0
    (folder / "3.node.json").write_text(json.dumps({"token": "right", "host": "h" * 256, "code": 0}))
    with pytest.raises(ValueError, match=r"3\.node\.json cannot be read: String should have at most 255"):
        node.handover.report()


def test_orders_follow_no_link_and_wait_for_no_pipe(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of the file in between is not known to the node's user, and if it were, it would not help."""
    monkeypatch.setattr("worker.engines.handover.uuid.uuid4", lambda: uuid.UUID(int=0))
    folder, mine = node.run.path / "attempts", node.folder / "mine"
    mine.write_text("kept")
    between = folder / ".3.orders.json.00000000"
    between.symlink_to(mine)
    with pytest.raises(FileExistsError):
        node.order()
    assert mine.read_text() == "kept"
    os.mkfifo(between)
    with pytest.raises(FileExistsError):
        node.order()
    node.order()
    assert node.handover.orders() is not None


def test_a_bucket_that_nothing_on_the_node_reaches_is_named_and_no_crash(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(tmp_path / "job-1"), "--attempt", "1", "--token", "t", "--bucket", "s3://bucket"]
    assert (main(given), main([*given, "--exit-0"])) == (75, 0)
    assert "s3://bucket: Install s3fs to access S3, with pip" in capsys.readouterr().err


@pytest.mark.parametrize(("order", "token"), [("train", "another"), ("kill", "right")])
def test_a_task_that_is_not_the_attempt_does_nothing(node: Node, order: str, token: str) -> None:
    node.order(order, token)
    node.thread.start()
    assert node.ended() == 75 and node.started() == [] and node.report() is None


@pytest.mark.parametrize("code", [None, 0])
def test_a_task_that_the_engine_starts_again_says_how_the_first_start_ended(
    node: Node, code: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.engines.node.GRACE_S", 0.5)
    node.handover.write_report(NodeReport(token="right", host="node-1", code=code))
    node.start()
    assert node.ended() == 75 and node.started() == []
    assert (report := node.report()) is not None
    assert (report.host, report.code) == ("node-1", 75 if code is None else code), "interrupted, unless it says itself"


@pytest.mark.parametrize("who", ["box", "engine"])
def test_a_stop_reaches_the_trainer_once(node: Node, who: str) -> None:
    node.start()
    node.training()
    if who == "engine":
        node.asked.set()
    else:
        node.order("stop")
    assert node.ended() == 75
    assert node.started()[1:] == ["stopped"]
    assert (report := node.report()) is not None and report.code == 75


@pytest.mark.parametrize("node", [DEAF], indirect=True)
@pytest.mark.parametrize(("order", "token"), [("train", "another"), ("kill", "right")])
def test_a_kill_ends_a_trainer_that_does_not_listen(node: Node, order: str, token: str) -> None:
    node.start()
    node.training()
    node.order("stop")
    until(lambda: "stopped" in node.started())
    node.order(order, token)
    assert node.ended() == 128 + signal.SIGKILL
    assert (report := node.report()) is not None and report.code == -signal.SIGKILL


@pytest.mark.parametrize(("node", "lines"), [(TRAINER, 2), (DEAF, 2)], indirect=["node"])
def test_nothing_outlives_its_supervisor_for_ever(node: Node, lines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The box falls silent, and its orders cannot even be read. The clock is the test's."""
    now = [0.0]
    monkeypatch.setattr("worker.engines.node.monotonic", lambda: now[0])
    node.start()
    node.training()
    orders = node.run.path / "attempts" / "3.orders.json"
    orders.unlink()
    orders.mkdir()
    now[0] = 1001.0
    until(lambda: "stopped" in node.started())
    now[0] = 2001.0
    code = node.ended()
    assert code in (75, 128 + signal.SIGKILL) and len(node.started()) == lines
