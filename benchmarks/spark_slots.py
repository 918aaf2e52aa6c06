"""Measure what the driver pays for its slots in Spark: launch, standing by, ends, for 8 to 500 slots.

    python benchmarks/spark_slots.py                       # 8 32 100 250 500
    python benchmarks/spark_slots.py 8 1000 --idle 20

Real: the SparkContext (`local[N]`) with its scheduler, listener bus and status store, `SparkLauncher` with its thread
and its connection to the JVM, one Spark job, task and job group per slot, and the pickled Python task of each slot with
the objects that PySpark makes of it in the JVM. Not real: the task that Spark runs. A Python process for each of 500
slots would measure the machine's memory, so each task waits inside Spark's JVM for a process of `cat` (Spark's
`RDD.pipe`), which ends when this program closes a named pipe. There is no agent, no rendezvous server (control_plane.py
measures that) and no executor: the task threads are in the driver's JVM, and their CPU time is in the JVM's.

Columns: the time from the first `launch` until all tasks run; CPU time of this process and of the JVM meanwhile;
threads that the launcher has added to this process while all slots run; CPU of both
processes while nothing happens; the median time from the end of one task until `on_ended`; and the time in which
`close` ends all slots.
The exponents are fitted by least squares to the logarithms.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
from _harness import Series, parser, report, table
from control_plane import exponent

from spark_elastic.driver.launcher import LaunchEnd
from spark_elastic.driver.spark.launcher import SparkLauncher
from spark_elastic.driver.spark.slot_jobs import SlotJobs
from spark_elastic.membership.states import AgentOutcome
from tests.integration.clusters import Cluster, local

SIZES = (8, 32, 100, 250, 500)
ENDED_ONE_BY_ONE = 8
PAYLOAD = bytes(1000)
"""About the size of a launch spec with a small function."""
LIMIT_S = 180.0


class HeldJobs(SlotJobs):
    """Slot jobs whose tasks run no Python: each waits in the JVM until its named pipe is closed."""

    def __init__(self, sc: Any, folder: Path) -> None:
        super().__init__(sc)
        self._folder = folder
        self.held: list[int] = []
        """The open end of each task's pipe, in the order of submission."""

    def rdd_of(self, task: Callable[[Any], Any]) -> tuple[Any, Any]:
        _, deserializer = super().rdd_of(task)
        path = self._folder / str(len(self.held))
        os.mkfifo(path)
        self.held.append(os.open(path, os.O_RDWR))
        command = self._sc._jvm.java.util.ArrayList()  # type: ignore[union-attr]
        for word in ("cat", str(path)):
            command.add(word)
        return self._source._jrdd.pipe(command), deserializer

    def let_end(self, number: int) -> None:
        (self._folder / str(number)).unlink()  # a `cat` that has not opened it yet must not wait for it
        os.close(self.held[number])
        self.held[number] = -1

    def let_all_end(self) -> None:
        for number, descriptor in enumerate(self.held):
            if descriptor >= 0:
                self.let_end(number)


@dataclass
class Ends:
    """What `on_ended` was called with, and when."""

    at: dict[int, float] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def __call__(self, end: LaunchEnd) -> None:
        with self.changed:
            self.at[end.slot] = time.monotonic()
            self.changed.notify_all()

    def wait_for(self, count: int) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: len(self.at) >= count, LIMIT_S):
                raise TimeoutError(f"{len(self.at)} of {count} slots have ended")


def no_agent(slot: int, launch: int, payload: bytes) -> AgentOutcome:
    raise AssertionError("no task runs Python here")


@contextlib.contextmanager
def launcher_of_held_slots(cluster: Cluster) -> Iterator[tuple[SparkLauncher, HeldJobs, Ends]]:
    ends = Ends()
    with tempfile.TemporaryDirectory(prefix="spark_elastic-slots-") as folder:
        launcher = SparkLauncher(cluster.sc, no_agent, lambda slot: PAYLOAD, ends, description="benchmark")
        jobs = launcher._jobs = HeldJobs(cluster.sc, Path(folder))
        try:
            yield launcher, jobs, ends
        finally:
            launcher.close(LIMIT_S)
            jobs.let_all_end()
            wait_until(lambda: running_tasks(cluster) == 0)


def measure(cluster: Cluster, size: int, idle_s: float) -> dict[str, Any]:
    me, jvm = psutil.Process(), psutil.Process(cluster.driver_jvm)
    threads = threading.active_count()
    with launcher_of_held_slots(cluster) as (launcher, jobs, ends):
        mine, of_the_jvm, began = cpu_s(me), cpu_s(jvm), time.monotonic()
        for slot in range(size):
            launcher.launch(slot)
        wait_until(lambda: running_tasks(cluster) == size)
        launched_s, mine, of_the_jvm = time.monotonic() - began, cpu_s(me) - mine, cpu_s(jvm) - of_the_jvm
        added = threading.active_count() - threads
        time.sleep(1.0)
        idle = [cpu_s(me), cpu_s(jvm)]
        time.sleep(idle_s)
        idle = [cpu_s(me) - idle[0], cpu_s(jvm) - idle[1]]
        noticed = [let_one_end(jobs, ends, number) for number in range(min(ENDED_ONE_BY_ONE, size // 2))]
        began = time.monotonic()
        launcher.close(LIMIT_S)
        closed_s = time.monotonic() - began
        ends.wait_for(size)
    return {
        "size": size,
        "launch_s": launched_s,
        "launch_cpu_s": mine,
        "launch_jvm_cpu_s": of_the_jvm,
        "threads": added,
        "idle_cpu_share": idle[0] / idle_s,
        "idle_jvm_cpu_share": idle[1] / idle_s,
        "noticed_s": noticed,
        "close_s": closed_s,
    }


def let_one_end(jobs: HeldJobs, ends: Ends, number: int) -> float:
    """End one task, and return the seconds until its end was reported. Slots are submitted in order."""
    began = time.monotonic()
    jobs.let_end(number)
    ends.wait_for(number + 1)
    return ends.at[number] - began


def running_tasks(cluster: Cluster) -> int:
    counts = cluster.sc._jsc.sc().taskScheduler().runningTasksByExecutors().values().mkString(" ")
    return sum(map(int, counts.split()))


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError("the tasks did not start or end in time")
        time.sleep(0.02)


def main() -> None:
    arguments = parser(__doc__, repeat=1)
    arguments.add_argument("sizes", nargs="*", type=int, default=SIZES, metavar="N")
    arguments.add_argument("--idle", type=float, default=10.0, metavar="SECONDS")
    args = arguments.parse_args()
    sizes = (4, 16) if args.quick else args.sizes
    idle_s = 2.0 if args.quick else args.idle
    with local(max(sizes)) as cluster:
        measure(cluster, min(sizes), 0.1)  # Spark and its JVM warm up
        runs = [measure(cluster, size, idle_s) for size in sizes for _ in range(args.repeat)]
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "slots": lambda run: f"{run['size']}",
        "launch s": lambda run: f"{run['launch_s']:.2f}",
        "CPU s": lambda run: f"{run['launch_cpu_s']:.2f}",
        "JVM CPU s": lambda run: f"{run['launch_jvm_cpu_s']:.2f}",
        "threads": lambda run: f"{run['threads']}",
        "idle CPU": lambda run: f"{run['idle_cpu_share']:.2%}",
        "idle JVM CPU": lambda run: f"{run['idle_jvm_cpu_share']:.2%}",
        "end noticed ms": lambda run: f"{statistics.median(run['noticed_s']) * 1e3:.0f}",
        "close s": lambda run: f"{run['close_s']:.2f}",
    }
    print(table(list(columns), [[show(run) for show in columns.values()] for run in runs]))
    fitted = {}
    if len(set(sizes)) > 1:
        for key in ("launch_s", "launch_cpu_s", "launch_jvm_cpu_s", "close_s"):
            fitted[key] = exponent([(run["size"], run[key]) for run in runs])
        print(", ".join(f"{name}: N^{value:.2f}" for name, value in fitted.items()))
    series = [
        Series(f"{what}, {size} slots", [scale * run[key] for run in runs if run["size"] == size], unit)
        for what, key, scale, unit in (
            ("launch", "launch_s", 1.0, "s"),
            ("CPU of the launch", "launch_cpu_s", 1e3, "ms"),
            ("idle CPU", "idle_cpu_share", 100.0, "%"),
            ("threads", "threads", 1.0, "threads"),
            ("close", "close_s", 1.0, "s"),
        )
        for size in dict.fromkeys(sizes)
    ]
    report("spark-slots", args, *series, raw={"runs": runs, "exponents": fitted})


if __name__ == "__main__":
    main()
