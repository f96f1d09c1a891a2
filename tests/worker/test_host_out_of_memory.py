"""The kernel's count of processes that it ended for want of memory, and which one it ends first.

The files are laid out as the kernel does; tests/docker/test_host_memory.py has it end real trainers.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from worker.training.__main__ import OOM_SCORE_ADDED, prefer_for_oom_kill
from worker.training.machine.host import oom_kills

EVENTS = "low 0\nhigh 0\nmax 812\noom 5\noom_kill {}\noom_group_kill 0\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"


def lay(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


@pytest.mark.parametrize(("groups", "counted"), [
    ("0::/\n", {"sys/fs/cgroup/memory.events": EVENTS}),  # a container
    ("0::/box/worker\n", {"sys/fs/cgroup/box/worker/memory.events": EVENTS}),  # a service of systemd
    ("7:cpu,memory:/docker/01\n0::/docker/01\n", {"sys/fs/cgroup/memory/memory.oom_control": CONTROL}),  # version 1
    ("4:memory:/box\n0::/\n", {"sys/fs/cgroup/memory/box/memory.oom_control": CONTROL,
                               "sys/fs/cgroup/memory/memory.oom_control": CONTROL.format(99)}),
])  # fmt: skip
def test_kills_of_the_own_control_group_are_counted(tmp_path: Path, groups: str, counted: dict[str, str]) -> None:
    for kills in (0, 3):
        files = {name: content.format(kills) for name, content in counted.items()}
        assert oom_kills(lay(tmp_path, {"proc/self/cgroup": groups, **files})) == kills


@pytest.mark.parametrize("files", [
    {},
    {"proc/self/cgroup": "0::/box\n"},
    {"proc/self/cgroup": "1:cpu:/\n0::/\n", "sys/fs/cgroup/memory.events": "low 0\n"},
    {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.events": "not two words\n"},
])  # fmt: skip
def test_where_the_own_group_does_not_count_the_machine_does_or_nobody(tmp_path: Path, files: dict[str, str]) -> None:
    assert oom_kills(lay(tmp_path, files)) is None
    assert oom_kills(lay(tmp_path, {**files, "proc/vmstat": "nr_free_pages 12\noom_kill 7\n"})) == 7


@pytest.mark.parametrize(("before", "after"), [(-500, OOM_SCORE_ADDED), (0, OOM_SCORE_ADDED), (300, 300)])
def test_the_trainer_goes_before_its_supervisor(tmp_path: Path, before: int, after: int) -> None:
    score = tmp_path / "oom_score_adj"
    score.write_text(f"{before}\n")
    prefer_for_oom_kill(score)
    assert int(score.read_text()) == after
