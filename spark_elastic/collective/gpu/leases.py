"""Leases of GPUs on a host: processes that see several GPUs compute on one each, as long as there are enough.

Where Spark assigns no GPUs, each worker sees all of its host. Local ranks do not tell which GPUs are free: they change
with the world, and a newcomer may get the local rank with which a survivor chose its GPU. So each process locks a file
in the host's temporary directory, which the kernel unlocks when the process ends, however it ends.

These are record locks (`lockf`): a `flock` would also be held by forked children, such as those of a data loader, which
may outlive a worker that was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

log = logging.getLogger("spark_elastic.collective")

MOST_ON_ONE = 64
"""The number of processes that can share a GPU by leases; further ones choose without."""
_held: dict[str, int | None] = {}
"""The locked file's descriptor, open until the process ends, by the name of the GPU; None: nothing could be locked."""


def lease_gpu(count: int, preferred: int) -> tuple[int, str]:
    """Lease one of the `count` GPUs that this process sees, and return its number, and the reason in words.

    It is number `preferred % count` if that is free, else another free one, else one with the fewest other processes. A
    process keeps the GPU that it has leased before.
    """
    names = visible_gpus(count)
    for number, name in enumerate(names):
        if name in _held:
            return number, f"chosen before, of {count} GPUs that this worker sees"
    start = preferred % count
    try:
        folder = _folder()
        for others in range(MOST_ON_ONE):
            for number in [*range(start, count), *range(start)]:
                if _lock(folder, names[number], others):
                    shared = f", with {others} other processes" if others else ""
                    return number, f"leased{shared}, of {count} GPUs that this worker sees"
    except OSError as error:
        log.info("GPUs cannot be leased on this host: %s", error)
    _held[names[start]] = None
    return start, f"by local rank, of {count} GPUs that this worker sees"


def visible_gpus(count: int) -> Sequence[str]:
    """Return the names of the GPUs that this process sees, as CUDA_VISIBLE_DEVICES has them, or their numbers."""
    given = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return given[:count] if len(given) >= count and all(given[:count]) else [str(number) for number in range(count)]


def _folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"spark_elastic-gpus-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.lstat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    return folder


def _lock(folder: Path, name: str, others: int) -> bool:
    """Lock the file of this GPU and number of other processes; return False if a process has locked it."""
    plain = re.sub(r"[^-\w]", "_", name)
    descriptor = os.open(folder / f"{plain}.{others}", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    with contextlib.suppress(BlockingIOError, PermissionError):  # both are answers of a lock that is held
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _held[name] = descriptor
        return True
    os.close(descriptor)
    return False
