"""A real small job in a process of its own, for `fuzz.py` to attack: what it uses and says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).with_name("fuzz_job.py")


@dataclass(frozen=True)
class Usage:
    """The resources of the driver's process at one moment."""

    resident_mib: float
    peak_mib: float
    threads: int
    descriptors: int
    cpu_s: float


class AttackedJob:
    """The driver's process, from the outside."""

    def __init__(self, process: subprocess.Popen[str], address: tuple[str, int], key: bytes) -> None:
        self._process = process
        self.address = address
        self.key = key

    def ask(self, word: str = "state") -> dict[str, Any]:
        """Return the state of the job; `end` ends it first, and adds what its workers returned."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def usage(self) -> Usage:
        folder = Path(f"/proc/{self._process.pid}")
        status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
        ticks = (folder / "stat").read_text().rpartition(")")[2].split()[11:13]
        return Usage(
            resident_mib=int(status["VmRSS"].split()[0]) / 1024,
            peak_mib=int(status["VmHWM"].split()[0]) / 1024,
            threads=int(status["Threads"]),
            descriptors=len(os.listdir(folder / "fd")),
            cpu_s=sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK"),
        )

    def settled(self, before: Usage, timeout_s: float = 20.0) -> Usage:
        """Return the usage once there are no more threads and descriptors than before, or after the timeout."""
        until = time.monotonic() + timeout_s
        while True:
            now = self.usage()
            grown = now.threads > before.threads or now.descriptors > before.descriptors
            if not grown or time.monotonic() > until:
                return now
            time.sleep(0.2)


@contextmanager
def attacked_job(descriptors: int) -> Iterator[AttackedJob]:
    """Run the job with this limit of open descriptors; what it prints is kept out of the terminal."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder, open(f"{folder}/log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, str(PROGRAM), f"{folder}/end", str(descriptors)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"the job did not start: {Path(folder, 'log').read_text()[-2000:]}")
            found = json.loads(line)
            yield AttackedJob(process, tuple(found["address"]), bytes.fromhex(found["key"]))
        finally:
            process.kill()
            process.communicate()


def difference(before: Usage, after: Usage) -> dict[str, float]:
    """Return what the process uses more than before."""
    earlier = asdict(before)
    return {name: round(value - earlier[name], 3) for name, value in asdict(after).items()}
