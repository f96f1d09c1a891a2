"""Memory of the host: the machine's, or the tightest control group's, from files laid out as the kernel does."""

from __future__ import annotations

from pathlib import Path

from jobs.text.units import GIB
from worker.training.machine.host import HostMemory, host_memory


def lay(root: Path, files: dict[str, str]) -> Path:
    meminfo = f"MemTotal: {64 * 2**20} kB\nMemFree: 1000 kB\nMemAvailable: {40 * 2**20} kB\n"
    for name, content in {"proc/meminfo": meminfo, **files}.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return root


def test_the_machine_where_nothing_limits(tmp_path: Path) -> None:
    expected = HostMemory(used=24 * GIB, available=40 * GIB, total=64 * GIB)
    assert host_memory(lay(tmp_path, {})) == expected
    lay(tmp_path, {
        "proc/self/cgroup": "4:memory:/a\n0::/user.slice\n",
        "sys/fs/cgroup/user.slice/memory.max": "max\n",
        "sys/fs/cgroup/memory/a/memory.limit_in_bytes": f"{2**63 - 4096}\n",
        "sys/fs/cgroup/memory/a/memory.usage_in_bytes": "1\n",
    })  # fmt: skip
    assert host_memory(tmp_path) == expected


def test_the_tightest_group_above_counts_and_its_page_cache_does_not(tmp_path: Path) -> None:
    lay(tmp_path, {
        "proc/self/cgroup": "0::/box/trainer\n",
        "sys/fs/cgroup/box/trainer/memory.max": "max\n",
        "sys/fs/cgroup/box/memory.max": f"{16 * GIB}\n",
        "sys/fs/cgroup/box/memory.current": f"{12 * GIB}\n",
        "sys/fs/cgroup/box/memory.stat": f"anon {5 * GIB}\ninactive_file {6 * GIB}\nactive_file {GIB}\n",
    })  # fmt: skip
    assert host_memory(tmp_path) == HostMemory(used=5 * GIB, available=11 * GIB, total=16 * GIB)


def test_a_limit_is_all_there_is_whoever_else_is_short_of_memory(tmp_path: Path) -> None:
    lay(tmp_path, {
        "proc/self/cgroup": "0::/box\n",
        "sys/fs/cgroup/box/memory.max": f"{48 * GIB}\n",
        "sys/fs/cgroup/box/memory.current": "0\n",
        "sys/fs/cgroup/box/memory.stat": "anon 0\n",
    })  # fmt: skip
    assert host_memory(tmp_path) == HostMemory(used=24 * GIB, available=40 * GIB, total=48 * GIB)


def test_version_1_in_a_container_whose_path_is_the_hosts(tmp_path: Path) -> None:
    lay(tmp_path, {
        "proc/self/cgroup": "7:cpu,memory:/docker/0123\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{8 * GIB}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{3 * GIB}\n",
        "sys/fs/cgroup/memory/memory.stat": f"cache 1\ntotal_inactive_file {GIB}\n",
    })  # fmt: skip
    assert host_memory(tmp_path) == HostMemory(used=2 * GIB, available=6 * GIB, total=8 * GIB)


def test_memory_of_this_machine_can_be_read() -> None:
    memory = host_memory()
    assert memory.used > 0
    assert memory.available > 0
