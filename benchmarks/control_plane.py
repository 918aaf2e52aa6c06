"""Measure what the driver pays for each worker: assembling, a lost worker, and standing by, for 10 to 3,000 workers.

    python benchmarks/control_plane.py                     # 10 30 100 300 1000 3000
    python benchmarks/control_plane.py 100 1000 --losses 5 --no-exchange

The driver, its rendezvous server and the membership machine are the real ones, in this process. The agents and workers
are simulated in a second one (_simulated_peers.py): they authenticate, send heartbeats, receive worlds and exchange
addresses, on real connections. A loss closes a worker's and its agent's connections; it is over when the last survivor
has the next world and the addresses of all its members. The exponents are fitted by least squares to the logarithms.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _harness import Series, parser, report, table

from spark_elastic.driver.elastic_driver import ElasticDriver
from spark_elastic.driver.launcher import OnEnded
from spark_elastic.driver.output import OutputPrinter
from spark_elastic.membership.reasons import LossCause
from spark_elastic.membership.topology import LaunchId, SlotId
from spark_elastic.settings import ElasticSettings
from spark_elastic.wire.framing import new_key
from spark_elastic.wire.messages import LaunchSpec

SIZES = (10, 30, 100, 300, 1000, 3000)
WORKERS_A_HOST = 8
LIMIT_S = 300.0


class NoLauncher:
    """A launcher whose agents are started by the benchmark. A lost slot is not launched again."""

    def launch(self, slot: SlotId) -> None: ...
    def withdraw(self, slot: SlotId, cause: LossCause) -> None: ...
    def admit(self, slot: SlotId, launch: LaunchId) -> bool:
        return True

    def agent_present(self, slot: SlotId, present: bool) -> None: ...
    def gone(self) -> str | None:
        return None

    def close(self, deadline_s: float) -> None: ...


@dataclass
class Fleet:
    """The process with the simulated peers."""

    process: subprocess.Popen[str]
    events: queue.Queue[dict[str, Any]] = field(default_factory=queue.Queue)

    def __post_init__(self) -> None:
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.put(json.loads(line))

    def tell(self, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def wait_for(self, **wanted: Any) -> dict[str, Any]:
        """Wait for an event that has these values, or these keys where the value is None."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            event = self.events.get(timeout=max(deadline - time.monotonic(), 0.01))
            if all(key in event and value in (None, event[key]) for key, value in wanted.items()):
                return event

    def report(self) -> dict[str, Any]:
        self.tell(report=True)
        return self.wait_for(received=None)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join()


@contextlib.contextmanager
def fleet(key: bytes, address: tuple[str, int], exchange: bool) -> Iterator[Fleet]:
    script = Path(__file__).with_name("_simulated_peers.py")
    process = subprocess.Popen([sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    made = Fleet(process)
    try:
        made.tell(key=key.hex(), address=address, workers_a_host=WORKERS_A_HOST, exchange=exchange)
        yield made
    finally:
        made.close()


def measure(size: int, losses: int, exchange: bool, idle_s: float) -> dict[str, Any]:
    """Assemble that many workers, let some of them die one after the other, and stand by."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
    key = new_key()
    spec = LaunchSpec("bench", (listening.getsockname(),), key, b"", 60.0, "bench")
    settings = ElasticSettings(num_proc=size, min_num_proc=1, max_num_proc=size, start_grace_s=LIMIT_S)
    driver = ElasticDriver(spec, settings, _no_launcher, listening, printer=OutputPrinter(), verbose=0)
    job = threading.Thread(target=_run, args=(driver,), name="driver")
    rss = _rss_mb()
    with fleet(key, listening.getsockname(), exchange) as peers:
        job.start()
        try:
            cpu, began = time.process_time(), time.monotonic()
            peers.tell(start=list(range(size)))
            ready = peers.wait_for(entered=size)
            assembled = {"s": ready["at"] - began, "cpu_s": time.process_time() - cpu}
            memory = _rss_mb() - rss
            lost = random.Random(size).sample(range(size), losses)
            changes = [_lose(peers, slot, size - number - 1) for number, slot in enumerate(lost)]
            time.sleep(1.0)
            idle = _idle(peers, idle_s)
            refused = peers.report()["refused"]
        finally:
            driver.cancel("measured")
            job.join()
    return {
        "size": size,
        "assemble_s": assembled["s"],
        "assemble_cpu_s": assembled["cpu_s"],
        "refused": refused,
        "memory_mb": memory,
        "losses": changes,
        **idle,
    }


def _no_launcher(on_ended: OnEnded) -> NoLauncher:
    return NoLauncher()


def _run(driver: ElasticDriver) -> None:
    with contextlib.suppress(Exception):
        driver.run()


def _lose(peers: Fleet, slot: int, left: int) -> dict[str, float]:
    time.sleep(0.3)
    before = peers.report()
    cpu = time.process_time()
    peers.tell(kill=slot)
    killed = peers.wait_for(killed=slot)
    done = peers.wait_for(entered=left)
    spent = time.process_time() - cpu
    after = peers.report()
    return {
        "s": done["at"] - killed["at"],
        "driver_cpu_s": spent,
        "bytes": after["received"] - before["received"],
        "peers_cpu_s": after["cpu_s"] - before["cpu_s"],
    }


def _idle(peers: Fleet, seconds: float) -> dict[str, float]:
    cpu = time.process_time()
    time.sleep(seconds)
    return {"idle_cpu_share": (time.process_time() - cpu) / seconds}


def _rss_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def exponent(points: list[tuple[float, float]]) -> float:
    """Fit y = c * x**e; returns e."""
    logs = [(math.log(x), math.log(y)) for x, y in points if y > 0]
    mean_x, mean_y = (statistics.fmean(axis) for axis in zip(*logs, strict=True))
    return sum((x - mean_x) * (y - mean_y) for x, y in logs) / sum((x - mean_x) ** 2 for x, _ in logs)


def main() -> None:
    arguments = parser(__doc__, repeat=1)
    arguments.add_argument("sizes", nargs="*", type=int, default=SIZES, metavar="N")
    arguments.add_argument("--losses", type=int, default=5)
    arguments.add_argument("--idle", type=float, default=10.0, metavar="SECONDS")
    arguments.add_argument("--no-exchange", action="store_true", help="without the exchange of addresses")
    args = arguments.parse_args()
    sizes = (10, 30) if args.quick else args.sizes
    runs = [measure(size, args.losses, not args.no_exchange, 2.0 if args.quick else args.idle) for size in sizes]
    median = {
        run["size"]: {key: statistics.median(loss[key] for loss in run["losses"]) for key in run["losses"][0]}
        for run in runs
    }
    rows = [
        [
            run["size"],
            f"{run['assemble_s']:.2f}",
            f"{run['assemble_cpu_s']:.2f}",
            f"{median[run['size']]['driver_cpu_s'] * 1e3:.1f}",
            f"{median[run['size']]['s'] * 1e3:.0f}",
            f"{median[run['size']]['bytes'] / 2**20:.2f}",
            f"{run['memory_mb']:.0f}",
            f"{run['idle_cpu_share']:.1%}",
        ]
        for run in runs
    ]
    head = ["workers", "assemble s", "CPU s", "loss: CPU ms", "loss: ms", "loss: MB sent", "memory MB", "idle CPU"]
    print(table(head, rows))
    fitted = {}
    if len(runs) > 1:
        fitted = {
            "loss_cpu": exponent([(size, each["driver_cpu_s"]) for size, each in median.items()]),
            "assemble": exponent([(run["size"], run["assemble_s"]) for run in runs]),
        }
        print(", ".join(f"{name}: N^{value:.2f}" for name, value in fitted.items()))
    series = [
        Series(f"CPU of a loss, {run['size']}", [loss["driver_cpu_s"] * 1e3 for loss in run["losses"]], "ms")
        for run in runs
    ]
    report("control-plane", args, *series, raw={"runs": runs, "exponents": fitted})


if __name__ == "__main__":
    main()
