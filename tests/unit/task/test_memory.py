from __future__ import annotations

from pathlib import Path

import pytest

from spark_elastic.task.memory_kills import MemoryKills, describe_kills, memory_kills


def system(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    for name, text in {"proc/self/cgroup": cgroup, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("cgroup", "file"),
    [
        ("0::/app/executor\n", "sys/fs/cgroup/app/executor/memory.events"),
        ("0::/\n", "sys/fs/cgroup/memory.events"),
        ("0::/seen/from/outside\n", "sys/fs/cgroup/memory.events"),
        ("3:cpu,cpuacct:/x\n9:memory:/docker/abc\n", "sys/fs/cgroup/memory/docker/abc/memory.oom_control"),
        ("9:memory:/docker/abc\n", "sys/fs/cgroup/memory/memory.oom_control"),
    ],
)
def test_kills_for_memory_are_read_from_the_control_group(tmp_path: Path, cgroup: str, file: str) -> None:
    root = system(
        tmp_path, cgroup, {file: "low 0\noom 9\noom_kill 4\n", "proc/vmstat": "nr_free_pages 1\noom_kill 7\n"}
    )
    assert memory_kills(root) == MemoryKills(4, 7)


def test_system_without_counters_is_not_an_error(tmp_path: Path) -> None:
    assert memory_kills(tmp_path) == MemoryKills(None, None)
    assert describe_kills(MemoryKills(None, None), MemoryKills(3, 3), tmp_path) == ""


def test_kills_are_described_with_the_memory_limit(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/memory.events": "oom_kill 5\n",
        "sys/fs/cgroup/memory.max": "2147483648\n",
        "proc/meminfo": "MemTotal: 8388608 kB\nMemAvailable: 1048576 kB\n",
    }
    root = system(tmp_path, "0::/\n", files)
    assert describe_kills(MemoryKills(4, 4), memory_kills(root), root) == (
        "The kernel killed 1 process of its container (control group) for lack of memory while it ran "
        "(limit 2.0 GiB, 1.0 GiB available on the machine now)"
    )
    assert "2 processes on its machine" in describe_kills(MemoryKills(5, 4), MemoryKills(5, 6), root)
    assert describe_kills(MemoryKills(5, 4), MemoryKills(5, 4), root) == ""
