"""What a user does with the containers on the first day; CI runs this much of the folder (`make test-docker-core`)."""

from __future__ import annotations

import pytest

from tests.docker.engine import Containers, few, steps_logged
from tests.support.samples import reasons

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1400)]


def test_a_job_is_stopped_half_way_finished_after_a_restart_and_left_by_down(containers: Containers) -> None:
    spec = few(training={"epochs": 40, "batch_size": 8}, checkpoint={"every_minutes": 60})
    run = containers.submit(spec)
    containers.wait_for(lambda: steps_logged(run) >= 3 or None, "three steps", 300)
    containers.compose("stop")
    stopped_at = steps_logged(run)
    assert (reasons(run), run.record().status.value) == (["interrupted"], "queued")
    [checkpoint] = run.checkpoints.glob("step-*")
    assert int(checkpoint.name.removeprefix("step-")) >= stopped_at > 0

    containers.compose("up", "-d")
    containers.wait_for(lambda: containers.healthy("service") or None, "the service", 300, every=1)
    containers.wait_for_status(run, "succeeded", 600)
    assert reasons(run) == ["interrupted", "done"]
    made = [run.path, run.model, *run.model.iterdir(), run.events_file]
    assert {(path.stat().st_uid, path.stat().st_gid) for path in made} == {
        (int(containers.settings["UID"]), int(containers.settings["GID"]))
    }
    assert {"config.json", "model.safetensors"} <= {path.name for path in run.model.iterdir()}

    containers.compose("down")
    ours = ("--filter", f"label=com.docker.compose.project={containers.project}", "-q")
    assert containers.docker("ps", "-a", *ours) == containers.docker("network", "ls", *ours) == ""
    assert containers.docker("volume", "ls", *ours) != "" and run.record().status.value == "succeeded"
