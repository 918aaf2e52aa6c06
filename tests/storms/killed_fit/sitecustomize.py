"""Kills a job at one operation on the files of its run: imported at the start of each Python process.

`checkpoint_kills.py` puts this folder on the path and sets `KILLED_FIT`, JSON: `folder`, whose operations are counted;
`who`, "driver" or "worker"; `at`, the number of the operation before which that process kills; `kills`, whom: "both"
(the driver and itself), "driver", or "workers"; `pids`, a folder with files that are named after process ids, in
`driver` and in `worker`; `log`, a file to which each operation's name is added; `cut`, a number in [0, 1): the part of
a file that is left if the process dies as it makes that durable, as after a power cut.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from pathlib import Path
from typing import Any

_FILES = {"open", "os.rename", "os.link", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree"}
_NUMBERS = re.compile(r"[0-9a-f]{32}|\d{2,}(\.\d+)?")


def _install(order: dict[str, Any], who: str) -> None:
    folder, at = os.path.realpath(order["folder"]) + os.sep, order["at"]
    lock, seen, guard = threading.Lock(), [0], threading.local()
    Path(order["pids"], who, str(os.getpid())).touch()
    log = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def below(path: Any, at_folder: int = -1) -> str:
        """Return the path below the folder; "": it is elsewhere."""
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        path = os.fspath(path)
        path = path.decode() if isinstance(path, bytes) else path
        if not os.path.isabs(path):
            path = os.path.join(os.readlink(f"/proc/self/fd/{at_folder}") if at_folder >= 0 else os.getcwd(), path)
        return path.removeprefix(folder) if path.startswith(folder) else ""

    def met(name: str, path: str, durable: int = -1) -> None:
        with lock:
            seen[0] += 1
            kills = seen[0] == at and who == order["who"] and _is_first(order["pids"])
            what = f"{who}: {name} {_NUMBERS.sub('*', path)}"
            os.write(log, f"{'KILLED ' if kills else ''}{what}\n".encode())
            if kills:
                if durable >= 0 and order["kills"] != "driver":
                    os.ftruncate(durable, int(order["cut"] * (os.fstat(durable).st_size + 1)))
                _kill(order["pids"], order["kills"])

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in _FILES or getattr(guard, "on", False):
            return
        guard.on = True
        try:
            name = event.rpartition(".")[2]
            at_folder = arguments[1] if event in ("os.remove", "os.rmdir") and len(arguments) > 1 else -1
            if event == "open":
                mode, flags = arguments[1], arguments[2]
                name = "write" if ((mode or "")[:1] in "wxa" and mode) or (flags or 0) & 3 else "read"
            if path := below(arguments[1] if event in ("os.rename", "os.link") else arguments[0], at_folder):
                met(name, path)
        except (OSError, TypeError, ValueError):
            pass
        finally:
            guard.on = False

    fsync = os.fsync

    def durable(descriptor: int) -> None:
        guard.on = True
        try:
            if path := below(descriptor):
                met("fsync", path, descriptor if os.path.isfile(folder + path) else -1)
        finally:
            guard.on = False
        fsync(descriptor)

    os.fsync = durable  # type: ignore[assignment]
    sys.addaudithook(audit)


def _is_first(folder: str) -> bool:
    """Return True once for all processes: those that come later count their operations from the beginning."""
    try:
        os.mkdir(f"{folder}/killed")
    except FileExistsError:
        return False
    return True


def _kill(folder: str, whom: str) -> None:
    """Kill the driver, all workers, or the driver and this process."""
    role, me = "worker" if whom == "workers" else "driver", os.getpid()
    for pid in [int(name) for name in os.listdir(f"{folder}/{role}")]:
        if pid != me and _role_of(pid) == role:
            os.kill(pid, signal.SIGKILL)
    if whom == "both" or role == _role_of(me):
        os.kill(me, signal.SIGKILL)


def _role_of(pid: int) -> str | None:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return None
    if b"spark_elastic.task.main" in words:
        return "worker"
    return "driver" if any(word.endswith(b"/killed_fit.py") for word in words) else None


if "KILLED_FIT" in os.environ and (_me := _role_of(os.getpid())) is not None:
    _install(json.loads(os.environ["KILLED_FIT"]), _me)
