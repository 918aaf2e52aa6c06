"""Whether a process was killed by the kernel for lack of memory.

Such a process ends by SIGKILL like any other killed process. The counters of its control group and of the machine tell
the difference.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class MemoryKills:
    """Numbers of processes killed for lack of memory so far; None if the system does not show the counter."""

    in_group: int | None
    """In this process's control group, such as a container or a Spark executor."""
    on_machine: int | None

    def since(self, before: MemoryKills) -> tuple[int, bool]:
        """Return how many were killed since `before`, and True if they belonged to this control group."""
        counters = (self.in_group, before.in_group), (self.on_machine, before.on_machine)
        in_group, on_machine = (0 if now is None or then is None else max(0, now - then) for now, then in counters)
        return (in_group, True) if in_group else (on_machine, False)


def memory_kills(root: Path = ROOT) -> MemoryKills:
    """Read the counters; takes tens of microseconds. `root` is the folder that holds /proc and /sys."""
    group = _group(root)
    counters = {**_numbers(group / "memory.oom_control"), **_numbers(group / "memory.events")}
    return MemoryKills(counters.get("oom_kill"), _numbers(root / "proc/vmstat").get("oom_kill"))


def describe_kills(before: MemoryKills, now: MemoryKills, root: Path = ROOT) -> str:
    """Return how many processes were killed for lack of memory, and the limits, in words; "" if none was killed."""
    kills, in_group = now.since(before)
    if not kills:
        return ""
    processes = "1 process" if kills == 1 else f"{kills} processes"
    where = "of its container (control group)" if in_group else "on its machine"
    return f"The kernel killed {processes} {where} for lack of memory while it ran{_limits(root)}"


def _limits(root: Path) -> str:
    parts = []
    for name in ("memory.max", "memory.limit_in_bytes"):  # of version 2 and 1
        with contextlib.suppress(OSError, ValueError):  # "max"
            if (limit := int((_group(root) / name).read_text())) < 2**60:
                parts.append(f"limit {limit / _GIB:.1f} GiB")
                break
    free = _numbers(root / "proc/meminfo").get("MemAvailable:")
    if free is not None:
        parts.append(f"{free * 1024 / _GIB:.1f} GiB available on the machine now")
    return f" ({', '.join(parts)})" if parts else ""


def _group(root: Path) -> Path:
    """Return the folder of this process's control group: of version 2, or of version 1's memory controller."""
    groups = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return groups
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        mount = groups / ("memory" if controllers else "")
        for folder in (mount / path.lstrip("/"), mount):  # in a container, its own group is at the mount itself
            if (folder / "memory.events").exists() or (folder / "memory.oom_control").exists():
                return folder
    return groups


def _numbers(path: Path) -> dict[str, int]:
    try:
        words = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdigit()}
