"""Memory that ran out, in the words of the sinks."""

from __future__ import annotations

from pathlib import Path

from jobs.disk.rundir import RunDir
from jobs.events import Event, JobSubmitted
from jobs.spec import DataSpec, JobSpec
from jobs.trainer_facts import OomRecovered
from worker.sinks.base import SinkJob
from worker.sinks.wandb.sink import alert
from worker.sinks.wording import shortage

BARE = OomRecovered(step=1234, micro_batch_before=8, micro_batch_after=4, message="no", milliseconds_lost=812.5)
FULL = BARE.model_copy(
    update={
        "cause": "other_processes",
        "bucket": "input ≤ 256, target ≤ 512",
        "requested_bytes": 2 * 2**30,
        "allocated_bytes": 27 * 2**30,
        "reserved_bytes": 28 * 2**30,
        "other_processes_bytes": 0,
    }
)


def test_what_is_known_is_told_and_nothing_else() -> None:
    assert shortage(BARE) == "micro-batch 8 → 4 rows; 0.8 s lost"
    assert shortage(FULL) == (
        "Other processes hold memory of the GPU; micro-batch 8 → 4 rows (input ≤ 256, target ≤ 512); "
        "2.0 GiB requested · 27.0 GiB allocated · 28.0 GiB reserved · 0.0 GiB held by other processes; 0.8 s lost"
    )
    same = BARE.model_copy(update={"micro_batch_after": 8, "cause": "fragmentation"})
    assert shortage(same) == ("Free memory was too fragmented; micro-batch 8 rows, as before; 0.8 s lost")


def test_the_alert_of_wandb_says_it(tmp_path: Path) -> None:
    submitted = JobSubmitted(name="chef", model="m", spec_sha256="0" * 64)
    spec, run = JobSpec(data=DataSpec(train="rows.jsonl")), RunDir(tmp_path)
    job = SinkJob("j", tmp_path, submitted, spec, {}, run.metrics, lambda: 0, run.plan, lambda name, content: None)
    told = alert(Event(number=9, job="j", at=1.0, attempt=1, fact=FULL), job)
    assert told is not None
    assert told["title"] == "chef: out of memory, recovered" and told["level"] == "WARN"
    assert told["text"] == f"Nothing was lost at step 1,234. {shortage(FULL)}. no"
