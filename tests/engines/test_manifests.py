"""What is rendered passes the validators of SkyPilot, and what is wrong does not."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.engines.conftest import PYTHON
from tests.support.stack import ROOT
from worker.engines.engine import EngineTask
from worker.engines.skypilot import STATES, SkyPilotSettings

pytestmark = pytest.mark.engines
ODD = {
    "ODD": "a 'b' \"c\" $HOME `x` \\ {{y}} #z: - & * ! | > % @ ü 🧁\ttab",
    "EMPTY": "",
    "NUMBER": "0755",
    "YES": "yes",
}


def task(job: str = "job-01m8c19f5hnjpqdgrn6q", attempt: int = 1, gpus: int = 1) -> EngineTask:
    command = (
        "python",
        "-m",
        "worker.engines.node",
        f"/srv/runs/{job}",
        "--attempt",
        str(attempt),
        "--token",
        "0" * 16,
    )
    name = f"longhaul-{job.removeprefix('job-')}-{attempt}-00000000"[:63]
    return EngineTask(
        job=job, attempt=attempt, name=name, command=command, environment=ODD, gpus=gpus, run=Path("/srv/runs") / job,
        directory=Path("/opt/long haul"), stores=(Path("/srv/models/x"), Path("/srv/prepared/y")),
    )  # fmt: skip


def understood(text: str, home: Path) -> dict[str, Any]:
    """As the engine's own code has read it."""
    done = subprocess.run(
        [PYTHON, ROOT / "tests/engines/validate.py"], input=text, capture_output=True, text=True, timeout=300,
        env={"PATH": "/usr/bin:/bin", "HOME": str(home), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"},
    )  # fmt: skip
    if done.returncode:
        raise ValueError(done.stderr[-2000:])
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def settings(**more: object) -> dict[str, object]:
    return {
        "name": "cloud", "gpu_name": "NVIDIA H100 80GB HBM3", "gpu_memory_gib": 79.6, "gpus": 8,
        "directory": Path("/opt/long haul"), "python": ("python",), **more,
    }  # fmt: skip


SKYPILOT: list[dict[str, object]] = [
    {"accelerator": "H100"},
    {
        "accelerator": "A100-80GB", "infra": "aws/us-east-1", "use_spot": False, "cpus": "8+", "memory": "64+",
        "disk_gb": 512, "setup": "set -e\npip install -r 'a b'\n", "image": "docker:registry.example/longhaul:1",
    },
    {"device": "cpu", "gpu_name": None, "gpu_memory_gib": None},
]  # fmt: skip


@pytest.mark.parametrize("given", SKYPILOT)
@pytest.mark.parametrize("gpus", [1, 8])
def test_skypilot_reads_its_task_as_it_is_meant(given: dict[str, Any], gpus: int, tmp_path: Path) -> None:
    engine = SkyPilotSettings.model_validate(settings(kind="skypilot", bucket="file:///bucket", **given)).connect()
    handed = task(gpus=gpus if "accelerator" in given else 0)
    read = understood(engine.render(handed), tmp_path)
    assert (read["name"], read["envs"]) == (handed.name, ODD)
    assert read["accelerators"] == ({given["accelerator"]: gpus} if "accelerator" in given else None)
    assert read["use_spot"] == given.get("use_spot", True)
    assert read["run"].startswith("cd '/opt/long haul'\nexec python -m worker.engines.node /tmp/longhaul/runs/job-")
    assert read["run"].endswith("--bucket file:///bucket --exit-0\n") and read["setup"] == given.get("setup")
    assert set(read["states"]) == set(STATES), "every state of a managed job has a meaning here"


def test_what_is_wrong_is_refused(tmp_path: Path) -> None:
    engine = SkyPilotSettings.model_validate(
        settings(kind="skypilot", bucket="file:///bucket", accelerator="H100")
    ).connect()
    document = json.loads(engine.render(task()))
    document["resources"]["accelerator"] = document["resources"].pop("accelerators")
    with pytest.raises(ValueError, match="accelerator"):
        understood(json.dumps(document), tmp_path)
