"""A run directory on a box and on a node that share a bucket alone. The bucket is a folder, by fsspec's `file://`."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from pathlib import Path

import pytest

from jobs.attempt import Finished, Heartbeat
from jobs.disk.files import append_line
from jobs.disk.rundir import RunDir, create
from jobs.events import AttemptEnded, JobQueued, JobSubmitted
from jobs.plan import DataPlan, ModelPlan, make_plan
from jobs.reasons import Reason
from jobs.spec import parse_spec
from tests.support.samples import QUEUED, STARTED
from worker.engines.bucket import Bucket
from worker.engines.bucket_box import BoxStorage
from worker.engines.bucket_copies import LARGE
from worker.engines.bucket_stores import receive_stores
from worker.engines.copied_file import by_node
from worker.engines.engine import EngineRefused, EngineUnavailable
from worker.engines.handover import Handover, NodeReport, Orders
from worker.engines.node import NodeStorage

TOKEN = "0123456789abcdef"


class Places:
    """A box with a job at its first attempt, a bucket, and a node."""

    def __init__(self, root: Path) -> None:
        self.root, self.url = root, f"file://{root}/bucket"
        spec = parse_spec({"data": {"train": "rows.jsonl"}})
        self.box, _ = create(root / "runs", "job-1", spec, JobSubmitted(name="tiny", model="m", spec_sha256="s"))
        for store in ("models/abc", "prepared/def"):
            (root / store / "part").mkdir(parents=True)
            (root / store / "part" / "numbers").write_text(store)
        model = ModelPlan(source="x", parameters=1, folder=str(root / "models/abc"))
        data = DataPlan(train="x", input="x", target="x", rows=8, prepared=str(root / "prepared/def"))
        self.box.write_plan(make_plan(spec, model, data))
        self.box.append(QUEUED)
        self.node = RunDir(root / "node" / "job-1")
        self.attempt = 0
        self.next_attempt()

    def next_attempt(self) -> None:
        """It begins on the box: what follows is copied anew."""
        if self.attempt:
            self.box.append([AttemptEnded(reason=Reason.INTERRUPTED, step=1), JobQueued()])
        self.box.append([STARTED])
        self.attempt += 1
        self.order("train")
        self.at_box, self.at_node = BoxStorage(self.url, 0), self.start()

    def start(self) -> NodeStorage:
        """Of the task of this attempt."""
        return NodeStorage(self.url, self.attempt, f"{TOKEN}{self.attempt}", 0)

    def bucket(self, name: str) -> list[Path]:
        """Objects of the job whose names end so, whoever wrote them."""
        return sorted(self.root.glob(f"bucket/job-1/*/{name}"))

    def order(self, order: str, attempt: int | None = None) -> None:
        """Of the box."""
        attempt = attempt or self.attempt
        orders = Orders.model_validate({"token": f"{TOKEN}{attempt}", "order": order, "beat": 1})
        Handover(self.box.path, attempt).write_orders(orders)

    def begin(self) -> None:
        """The box puts all there, and the node has it."""
        self.at_box.push(self.box.path)
        self.at_node.pull(self.node.path)

    def to_box(self) -> None:
        """What the node has is on the box."""
        self.at_node.finish(self.node.path)
        self.settle()

    def settle(self) -> None:
        """The box looks until nothing is under way in the background."""
        self.at_box.pull(self.box.path)
        while self.at_box._receiver is not None and (under_way := self.at_box._receiver._receiving) is not None:
            under_way.exception()
            self.at_box.pull(self.box.path)


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(tmp_path)


def seal(run: RunDir, name: str = "checkpoints/step-00000010", weights: bytes = b"w" * 1000) -> Path:
    """A folder as the trainer leaves it: with a manifest, under its name only when it is whole."""
    made = run.path / Path(name).parent / f"tmp-{Path(name).name}"
    made.mkdir(parents=True)
    (made / "model.safetensors").write_bytes(weights)
    entry = {"bytes": len(weights), "sha256": hashlib.sha256(weights).hexdigest()}
    (made / "manifest.json").write_text(json.dumps({"files": {"model.safetensors": entry}}))
    final = run.path / name
    os.rename(made, final)
    return final


def test_the_node_begins_with_all_that_a_trainer_needs(places: Places) -> None:
    seal(places.box)
    (places.box.path / "attempts" / "1.task.json").write_text("{}")
    places.begin()
    assert places.node.record() == places.box.record() and places.node.spec() == places.box.spec()
    plan = places.node.plan()
    for folder, was in ((plan.model.folder, "models/abc"), (plan.data.prepared, "prepared/def")):
        assert folder == str(places.node.path.parent / ".stores" / was)
        assert (Path(folder) / "part" / "numbers").read_text() == was
    assert (places.node.checkpoints / "step-00000010" / "model.safetensors").stat().st_size == 1000
    assert Handover(places.node.path, 1).orders() == Handover(places.box.path, 1).orders()
    left_out = {"lock", "events.lock", "1.task.json"} & {file.name for file in places.node.path.rglob("*")}
    assert not left_out, "locks and what only the box works with stay there"


def test_what_the_trainer_writes_comes_to_the_box_in_order(places: Places) -> None:
    places.begin()
    places.node.trainer_log.write_text("begins\n")
    places.to_box()
    inode = places.box.trainer_log.stat().st_ino
    with open(places.node.trainer_log, "a") as log:
        log.write("continues\n")
    (places.node.path / "oom_reports" / "1").mkdir(parents=True)
    (places.node.path / "oom_reports" / "1" / "report.json").write_text("{}")
    append_line(places.node.attempt_file(1), Finished(at=1.0, reason=Reason.INTERRUPTED, step=3))
    seal(places.node)
    seal(places.node, "model")
    places.to_box()
    assert places.box.trainer_log.read_text() == "begins\ncontinues\n"
    assert places.box.trainer_log.stat().st_ino == inode, "who follows the log reads on"
    assert places.box.attempt_lines(1) == places.node.attempt_lines(1) != []
    assert (places.box.path / "oom_reports" / "1" / "report.json").exists()
    for folder in ("model", "checkpoints/step-00000010"):
        assert (places.box.path / folder / "model.safetensors").read_bytes() == b"w" * 1000


def test_a_metrics_file_that_was_cut_back_and_has_grown_replaces_the_longer_one(places: Places) -> None:
    places.box.metrics_file.write_text('{"step": 1}\n{"step": 2}\n')
    places.begin()
    places.node.metrics_file.write_text('{"step": 1}\n{"step": 2, "again": true}\n{"step": 3}\n')
    places.to_box()
    assert places.box.metrics_file.read_bytes() == places.node.metrics_file.read_bytes()


def test_removed_checkpoints_are_removed_on_the_box_and_in_the_bucket(places: Places) -> None:
    seal(places.box, "checkpoints/step-00000010")
    places.begin()
    seal(places.node, "checkpoints/step-00000020")
    os.rename(places.node.checkpoints / "step-00000010", places.node.checkpoints / "tmp-removed-step-00000010")
    places.to_box()
    assert [folder.name for folder in places.box.checkpoints.iterdir()] == ["step-00000020"]
    assert len(places.bucket("checkpoints/step-00000020/*")) == 2
    assert len(places.bucket("checkpoints/step-00000010/*")) == 2, "the box has put it there"
    os.rename(places.node.checkpoints / "step-00000020", places.node.checkpoints / "tmp-removed-step-00000020")
    places.to_box()
    assert not places.bucket("checkpoints/step-00000020/*"), "the node has put it there"
    places.next_attempt()
    places.at_box.push(places.box.path)
    assert not places.bucket("checkpoints/step-00000010/*") and not [*places.box.checkpoints.iterdir()]


def test_what_the_node_does_not_have_is_not_removed_unless_it_was_listed_by_this_attempt(places: Places) -> None:
    places.begin()
    places.to_box()
    seal(places.box, "checkpoints/step-00000030")  # another engine has trained on meanwhile
    places.next_attempt()
    places.next_attempt()
    places.begin()
    assert [folder.name for folder in places.box.checkpoints.iterdir()] == ["step-00000030"]
    assert (places.node.checkpoints / "step-00000030").exists()


def test_a_checkpoint_that_is_not_as_its_manifest_says_never_gets_its_name(places: Places) -> None:
    places.begin()
    seal(places.node)
    places.at_node.finish(places.node.path)
    [torn] = places.bucket("checkpoints/step-00000010/model.safetensors")
    torn.write_bytes(b"x" * 1000)
    places.settle()
    assert [*places.box.checkpoints.iterdir()] == []
    (places.node.checkpoints / "step-00000010").rename(places.node.checkpoints / "tmp-replaced-step-00000010")
    seal(places.node, weights=b"new")
    places.to_box()
    assert (places.box.checkpoints / "step-00000010" / "model.safetensors").read_bytes() == b"new"


def test_a_copy_that_is_cut_off_leaves_no_checkpoint_and_the_next_one_completes_it(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    places.begin()
    seal(places.node)
    put, failures = Bucket.put, iter([True])

    def cut_off(bucket: Bucket, file: Path, name: str) -> None:
        if name.endswith("manifest.json") and next(failures, False):
            raise EngineUnavailable("the network is gone")
        put(bucket, file, name)

    monkeypatch.setattr(Bucket, "put", cut_off)
    with pytest.raises(EngineUnavailable, match="network"):
        places.at_node.finish(places.node.path)
    places.settle()
    assert [*places.box.checkpoints.iterdir()] == []
    places.to_box()
    assert [folder.name for folder in places.box.checkpoints.iterdir()] == ["step-00000010"]


def test_events_and_orders_pass_a_large_file(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    places.begin()
    seal(places.node)
    (places.node.path / "oom_reports").mkdir()
    (places.node.path / "oom_reports" / "snapshot.pickle").write_bytes(bytes(LARGE + 1))
    put, go_on = Bucket.put, threading.Event()

    def slow(bucket: Bucket, file: Path, name: str) -> None:
        if "checkpoints" in name:
            go_on.wait(60)
        put(bucket, file, name)

    monkeypatch.setattr(Bucket, "put", slow)
    places.at_node.push(places.node.path)  # the checkpoint is under way
    append_line(places.node.attempt_file(1), Finished(at=1.0, reason=Reason.DONE, step=3))
    places.at_node.push(places.node.path)
    places.order("stop")
    places.at_box.push(places.box.path)
    places.at_box.pull(places.box.path)
    places.at_node.pull(places.node.path)
    orders = Handover(places.node.path, 1).orders()
    assert orders is not None and orders.order == "stop"
    assert places.box.attempt_lines(1) and not [*places.box.checkpoints.iterdir()]
    go_on.set()
    places.to_box()
    assert (places.box.path / "oom_reports" / "snapshot.pickle").stat().st_size == LARGE + 1
    assert [*places.box.checkpoints.iterdir()] != []


def test_the_report_of_the_end_comes_after_all_that_the_attempt_left(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    places.begin()
    seal(places.node)
    Handover(places.node.path, 1).write_report(NodeReport(token=f"{TOKEN}1", host="node", code=0))
    places.at_node.finish(places.node.path)
    get, go_on = Bucket.get, threading.Event()

    def slow(bucket: Bucket, name: str, file: Path) -> None:
        if "checkpoints" in name:
            go_on.wait(60)
        get(bucket, name, file)

    monkeypatch.setattr(Bucket, "get", slow)
    places.at_box.pull(places.box.path)
    assert Handover(places.box.path, 1).report() is None
    go_on.set()
    places.settle()
    assert Handover(places.box.path, 1).report() is not None and [*places.box.checkpoints.iterdir()] != []


def test_what_an_attempt_left_in_the_bucket_when_the_box_was_gone_is_there_at_the_next(places: Places) -> None:
    places.begin()
    seal(places.node)
    places.node.metrics_file.write_text('{"step": 1}\n')
    places.at_node.finish(places.node.path)
    append_line(places.box.attempt_file(1), Finished(at=1.0, reason=Reason.WORKER_LOST))  # reconcile
    places.next_attempt()
    places.at_box.push(places.box.path)
    assert [folder.name for folder in places.box.checkpoints.iterdir()] == ["step-00000010"]
    assert places.box.metrics_file.read_text() == '{"step": 1}\n'
    assert len(places.box.attempt_lines(1)) == 1, "what the box has recorded stands"


def test_what_is_in_the_bucket_is_not_sent_again(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    places.begin()
    seal(places.node)
    places.to_box()
    sent: list[str] = []
    put = Bucket.put

    def noted(bucket: Bucket, file: Path, name: str) -> None:
        sent.append(name)
        put(bucket, file, name)

    monkeypatch.setattr(Bucket, "put", noted)
    places.next_attempt()
    places.at_box.push(places.box.path)
    assert not [name for name in sent if "checkpoints" in name or ".stores" in name]
    fresh = RunDir(places.root / "fresh" / "job-1")
    places.at_node.pull(fresh.path)
    assert (fresh.checkpoints / "step-00000010" / "model.safetensors").stat().st_size == 1000
    assert len(places.bucket("checkpoints/step-00000010/*")) == 2 and len(places.bucket("events.jsonl")) == 1


def test_a_node_that_still_works_on_an_earlier_attempt_hears_that_it_is_over(places: Places) -> None:
    places.begin()
    earlier = places.at_node
    places.box.append([AttemptEnded(reason=Reason.WORKER_LOST, step=1), JobQueued(), STARTED])
    places.order("kill", attempt=1)
    BoxStorage(places.url).push(places.box.path)  # attempt 2 has no orders yet: it has not begun
    earlier.pull(places.node.path)
    orders = Handover(places.node.path, 1).orders()
    assert orders is not None and orders.order == "kill"


def test_a_second_start_of_a_task_hears_the_first_and_writes_nothing(places: Places) -> None:
    """Kubernetes starts another pod while the first has its grace period."""
    places.begin()
    seal(places.node, "checkpoints/step-00000010")
    second, again = RunDir(places.root / "second" / "job-1"), places.start()
    again.pull(second.path)
    report = Handover(second.path, 1).report()
    assert report is not None and (report.token, report.code) == (f"{TOKEN}1", None), "the first has not reported yet"
    first = NodeReport(token=f"{TOKEN}1", host="first")
    Handover(places.node.path, 1).write_report(first)
    places.to_box()
    seal(places.node, "checkpoints/step-00000020")
    before = {file: file.read_bytes() for file in places.root.rglob("bucket/**/*") if file.is_file()}
    again.pull(second.path)
    assert Handover(second.path, 1).report() == first and not second.plan_file.exists()
    Handover(second.path, 1).write_report(first.model_copy(update={"code": 75}))
    again.push(second.path)
    again.finish(second.path)
    assert {file: file.read_bytes() for file in places.root.rglob("bucket/**/*") if file.is_file()} == before
    places.to_box()
    assert [each.name for each in sorted(places.box.checkpoints.iterdir())] == ["step-00000010", "step-00000020"]
    assert Handover(places.box.path, 1).report() == first


def test_of_two_starts_at_the_same_moment_one_goes_on(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    places.at_box.push(places.box.path)
    second, again = RunDir(places.root / "second" / "job-1"), places.start()

    def meanwhile(bucket: Bucket, run: RunDir) -> None:
        monkeypatch.undo()
        again.pull(second.path)
        receive_stores(bucket, run)

    monkeypatch.setattr("worker.engines.node.receive_stores", meanwhile)
    places.at_node.pull(places.node.path)
    for storage, run in ((again, second), (places.at_node, places.node)):
        storage.push(run.path)
        storage.pull(run.path)
    orders = [Handover(run.path, 1).orders() for run in (second, places.node)]
    assert [each.order for each in orders if each is not None] == ["kill", "train"]


def test_a_task_of_an_earlier_attempt_ends_and_changes_nothing(places: Places) -> None:
    places.begin()
    first, node1 = places.at_node, places.node
    node1.metrics_file.write_text('{"step": 1}\n')
    places.to_box()
    places.next_attempt()
    places.at_box.push(places.box.path)
    late = NodeStorage(places.url, 1, f"{TOKEN}1", 0)  # the engine starts the first task again
    late.pull(places.root / "late" / "job-1")
    places.node = RunDir(places.root / "two" / "job-1")
    places.at_node.pull(places.node.path)
    places.node.metrics_file.write_text('{"step": 1}\n{"of": 2}\n')
    node1.metrics_file.write_text('{"step": 1}\n{"of": "attempt 1 which is over"}\n')
    first.push(node1.path)
    places.to_box()
    assert places.box.metrics_file.read_text() == '{"step": 1}\n{"of": 2}\n'
    first.pull(node1.path)
    for run in (node1.path, places.root / "late" / "job-1"):
        assert (orders := Handover(run, 1).orders()) is not None and orders.order == "kill"
    before = {file: file.read_bytes() for file in places.root.rglob("bucket/**/*") if file.is_file()}
    node1.metrics_file.write_text("more of attempt 1\n")
    first.push(node1.path)
    first.finish(node1.path)
    assert {file: file.read_bytes() for file in places.root.rglob("bucket/**/*") if file.is_file()} == before


# -- what a bucket loses ----------------------------------------------------------------------------------------------


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def test_an_object_that_is_gone_from_the_bucket_costs_the_box_nothing_and_is_sent_again(places: Places) -> None:
    places.begin()
    seal(places.node, "checkpoints/step-00000010")
    seal(places.node, "checkpoints/step-00000020")
    places.to_box()
    for file in [*places.bucket("checkpoints/step-00000010/*"), *places.bucket("plan.json")]:
        file.unlink()
    (places.root / "bucket/.stores/models/abc/part/numbers").unlink()
    places.next_attempt()
    places.at_box.push(places.box.path)
    places.node = RunDir(places.root / "fresh" / "job-1")
    places.at_node.pull(places.node.path)
    places.to_box()
    for run in (places.box, places.node):
        assert names(run.checkpoints) == ["step-00000010", "step-00000020"]


@pytest.mark.parametrize("lost", ["plan.json", "checkpoints/step-00000010/model.safetensors"])
def test_a_node_does_not_begin_without_something_of_the_attempt(places: Places, lost: str) -> None:
    seal(places.box)
    places.at_box.push(places.box.path)
    [file] = places.bucket(lost)
    content = file.read_bytes()
    file.unlink()
    with pytest.raises(EngineUnavailable, match="something that the attempt begins with"):
        places.at_node.pull(places.node.path)
    assert not places.bucket(".node.json")
    file.write_bytes(content)
    places.at_node.pull(places.node.path)
    assert places.bucket(".node.json")


@pytest.mark.parametrize("between", ["an attempt that did not begin", "a beginning that was cut off"])
def test_a_checkpoint_that_is_in_the_bucket_alone_waits_there_for_the_next_attempt_that_begins(
    places: Places, between: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    places.begin()
    seal(places.node, "checkpoints/step-00000010")
    places.to_box()
    seal(places.node, "checkpoints/step-00000020")
    places.at_node.finish(places.node.path)
    if between == "an attempt that did not begin":
        places.box.append([AttemptEnded(reason=Reason.INTERRUPTED, step=1), JobQueued(), STARTED])
        append_line(places.box.attempt_file(2), Finished(at=1.0, reason=Reason.WORKER_LOST))  # reconcile
        places.attempt = 2
        BoxStorage(places.url, 0).push(places.box.path)
    else:
        get = Bucket.get

        def cut_off(bucket: Bucket, name: str, file: Path) -> None:
            if "step-00000020" in name:
                raise EngineUnavailable("ReadTimeout")
            get(bucket, name, file)

        places.next_attempt()
        with monkeypatch.context() as patch:
            patch.setattr(Bucket, "get", cut_off)
            with pytest.raises(EngineUnavailable):
                places.at_box.push(places.box.path)
    places.next_attempt()
    places.at_box.push(places.box.path)
    assert names(places.box.checkpoints) == ["step-00000010", "step-00000020"]
    assert len(places.bucket("checkpoints/step-00000020/*")) == 2


def test_what_was_not_received_stays_in_the_bucket_where_the_job_has_trained_elsewhere(places: Places) -> None:
    places.begin()
    seal(places.node, "checkpoints/step-00000020")
    places.at_node.finish(places.node.path)
    places.box.append([AttemptEnded(reason=Reason.INTERRUPTED, step=1), JobQueued(), STARTED])
    append_line(places.box.attempt_file(2), Heartbeat(at=1.0, step=15, phase="step"))
    seal(places.box, "checkpoints/step-00000015")
    places.attempt = 2
    places.next_attempt()
    places.at_box.push(places.box.path)
    assert names(places.box.checkpoints) == ["step-00000015"]
    assert len(places.bucket("checkpoints/step-00000020/*")) == 2


def test_a_checkpoint_that_was_removed_and_is_listed_again_is_received_again(places: Places) -> None:
    places.begin()
    folder = seal(places.node)
    places.to_box()
    folder.rename(aside := folder.with_name("tmp-aside"))
    places.to_box()
    assert names(places.box.checkpoints) == []
    aside.rename(folder)
    places.to_box()
    assert names(places.box.checkpoints) == ["step-00000010"]


@pytest.mark.parametrize("how", ["torn", "gone"])
def test_a_job_whose_model_is_not_in_the_bucket_is_not_done(
    places: Places, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.engines.bucket_copies.RETRY_S", 0.0)
    places.begin()
    seal(places.node, "model")
    Handover(places.node.path, 1).write_report(NodeReport(token=f"{TOKEN}1", host="node", code=0))
    places.at_node.finish(places.node.path)
    [file] = places.bucket("model/model.safetensors")
    if how == "torn":
        file.write_bytes(b"x" * 1000)
    else:
        file.unlink()
    with pytest.raises(EngineRefused, match=r"what its node left is not in the bucket as it is listed: model$"):
        places.settle()
    assert Handover(places.box.path, 1).report() is None and not places.box.model.exists()


def test_the_report_of_the_end_does_not_overtake_the_last_lines(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    places.begin()
    append_line(places.node.attempt_file(1), Finished(at=1.0, reason=Reason.DONE, step=3))
    Handover(places.node.path, 1).write_report(NodeReport(token=f"{TOKEN}1", host="node", code=0))
    places.at_node.finish(places.node.path)
    get = Bucket.get

    def busy(bucket: Bucket, name: str, file: Path) -> None:
        if name.endswith("1.jsonl"):
            raise EngineUnavailable("SlowDown")
        get(bucket, name, file)

    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "get", busy)
        with pytest.raises(EngineUnavailable):
            places.at_box.pull(places.box.path)
    assert Handover(places.box.path, 1).report() is None
    places.settle()
    assert Handover(places.box.path, 1).report() is not None and places.box.attempt_lines(1)


def test_a_download_of_a_model_goes_on_where_it_was_cut_off(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    (places.root / "models/abc" / "more").write_text("more")
    places.at_box.push(places.box.path)
    get, names_ = Bucket.get, list[str]()

    def cut_off(bucket: Bucket, name: str, file: Path) -> None:
        if ".stores" in name:
            names_.append(name)
            if len(names_) == 2:
                raise EngineUnavailable("ReadTimeout")
        get(bucket, name, file)

    monkeypatch.setattr(Bucket, "get", cut_off)
    with pytest.raises(EngineUnavailable):
        places.at_node.pull(places.node.path)
    places.at_node.pull(places.node.path)
    assert names_.count(names_[0]) == 1 and len(names_) == 4
    stores = places.node.path.parent / ".stores"
    assert names(stores / "models") == ["abc"] and names(stores / "models/abc") == ["more", "part"]


def test_events_do_not_wait_in_the_background_however_many_there_are(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    places.begin()
    put, go_on = Bucket.put, threading.Event()

    def slow(bucket: Bucket, file: Path, name: str) -> None:
        if "checkpoints" in name:
            go_on.wait(60)
        put(bucket, file, name)

    monkeypatch.setattr(Bucket, "put", slow)
    seal(places.node)
    places.at_node.push(places.node.path)
    places.node.metrics_file.write_bytes(b"{}\n" * (LARGE // 3 + 1))
    places.at_node.push(places.node.path)
    places.at_box.pull(places.box.path)
    assert places.box.metrics_file.stat().st_size > LARGE
    go_on.set()


def test_a_disk_that_takes_nothing_is_unavailable(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    places.begin()
    places.node.trainer_log.write_text("begins\n")
    places.at_node.push(places.node.path)

    def full(*_: object) -> bool:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("worker.engines.bucket_copies.append_rest", full)
    with pytest.raises(EngineUnavailable, match="No space left"):
        places.at_box.pull(places.box.path)


def test_what_a_copy_left_that_was_cut_off_is_removed(places: Places) -> None:
    left = places.box.checkpoints / "tmp-copy-step-00000010-01234567"
    left.mkdir(parents=True)
    places.begin()
    assert names(places.box.checkpoints) == []


def test_a_link_or_a_huge_listing_in_the_bucket_is_not_read(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    places.begin()
    [listing] = places.bucket(".node.json")
    monkeypatch.setattr("worker.engines.bucket.LONGEST", 10)
    with pytest.raises(EngineUnavailable, match="is larger than 10 bytes"):
        places.at_box.pull(places.box.path)
    monkeypatch.undo()
    listing.rename(other := listing.with_name("other"))
    listing.symlink_to(other)
    with pytest.raises(EngineUnavailable, match="is a link"):
        places.at_box.pull(places.box.path)


@pytest.mark.parametrize(
    "name", ["model/../spec.json", "events.jsonl", "oom_reports/../../x", "attempts/1.orders.json"]
)
def test_a_node_can_write_nothing_but_what_trainers_write(places: Places, name: str) -> None:
    assert not by_node(name)
    places.begin()
    places.at_node.finish(places.node.path)
    [listing] = places.bucket(".node.json")
    content = json.loads(listing.read_text())
    content["files"][name] = {"bytes": 1, "modified_ns": 1, "place": listing.parent.name}
    listing.write_text(json.dumps(content))
    (evil := listing.parent / name).parent.mkdir(parents=True, exist_ok=True)
    evil.write_text("x")
    before = {file: file.read_bytes() for file in places.root.rglob("*") if file.is_file()}
    places.at_box.pull(places.box.path)
    assert {file: file.read_bytes() for file in places.root.rglob("*") if file.is_file()} == before


def test_a_bucket_that_is_away_is_unavailable_and_what_is_new_is_sent_later(places: Places) -> None:
    places.begin()
    places.node.trainer_log.write_text("begins\n")
    bucket, away = places.root / "bucket", places.root / "away"
    bucket.rename(away)
    bucket.write_text("no folder")
    for call in (places.at_node.push, places.at_node.pull):
        with pytest.raises(EngineUnavailable, match="file://"):
            call(places.node.path)
    bucket.unlink()
    away.rename(bucket)
    places.to_box()
    assert places.box.trainer_log.read_text() == "begins\n"


@pytest.mark.parametrize(
    ("url", "why"),
    [("s3://bucket", "s3://bucket: Install s3fs to access S3, with pip"), ("nope://x", "nope://x: Protocol not known")],
)
def test_a_bucket_that_nothing_here_can_read_is_refused_by_name(url: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        BoxStorage(url)
