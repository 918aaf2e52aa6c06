"""Measure how long training pauses when a worker is killed, is stopped or joins, and whether a step is lost.

    python benchmarks/recovery.py                        # SIGKILL of workers, 3 -> 2 and 2 -> 1, plain processes
    python benchmarks/recovery.py --on standalone --fault executor
    python benchmarks/recovery.py --fault stop           # SIGSTOP, seen by the missing heartbeats
    python benchmarks/recovery.py --on namespaces --fault link
    python benchmarks/recovery.py --framework keras      # SIGKILL in the middle of model.fit
    python benchmarks/recovery.py --sizes 4 32 --hosts 8 # the workers are on eight addresses of this machine

Every number comes from what the workers wrote down at their own optimizer steps. "kill → next step" runs from just
before the signal is sent to the next optimizer step of the *last* survivor. "join" is the longest gap between two
steps that a running worker had when the replacement came in.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import _training
import cloudpickle
from _harness import Series, parser, report
from _training import StepLog, is_alive, train, train_keras

import spark_elastic
from spark_elastic.membership.timeline import WorldStarted
from tests.integration import clusters
from tests.integration.processes import children, wait_until

HEARTBEAT_TIMEOUT_S = 2.0

cloudpickle.register_pickle_by_value(_training)  # executors do not have this folder


@dataclass
class Figures:
    """In milliseconds, except where it says otherwise."""

    to_next_step: dict[str, list[float]] = field(default_factory=dict)
    from_worker_death: list[float] = field(default_factory=list)
    worker_outlives_jvm: list[float] = field(default_factory=list)
    join_pause: list[float] = field(default_factory=list)
    full_strength_s: list[float] = field(default_factory=list)
    executor_start_s: list[float] = field(default_factory=list)
    import_s: list[float] = field(default_factory=list)
    lost_steps: int = 0
    false_evictions: int = 0


@contextlib.contextmanager
def running_job(on: str, framework: str, folder: str, size: int, hidden: int, hosts: int) -> Iterator[tuple[Any, Any]]:
    """A job of `size` workers and its Spark cluster (None: they are plain processes, on `hosts` loopback addresses)."""
    common = {
        "num_proc": size,
        "min_num_proc": 1,
        "heartbeat_timeout": HEARTBEAT_TIMEOUT_S,
        "cooldown_range": (0.01, 0.02),
        "verbose": 0,
    }
    arguments = (folder, hidden)
    function = train_keras if framework == "keras" else train
    if on == "processes":
        launcher = spark_elastic.LocalLauncher(hosts=[f"127.0.0.{1 + host}" for host in range(hosts)])
        job = spark_elastic.run_async(function, arguments, launcher=launcher, **common)
        try:
            yield job, None
        finally:
            job.cancel()
        return
    starts = {
        "local": lambda: clusters.local(size),
        "local-cluster": lambda: clusters.local_cluster(size, 1),
        "standalone": lambda: clusters.standalone(workers=size, cores=1),
        "namespaces": lambda: clusters.namespaced(workers=size, cores=1),
    }
    with starts[on]() as cluster:
        job = spark_elastic.run_async(function, arguments, spark=cluster.spark, **common)
        try:
            yield job, cluster
        finally:
            job.cancel()


def strike(fault: str, victim: int, cluster: Any) -> Callable[[], None]:
    """Do it to the worker with this pid; returns what undoes it."""
    if fault == "worker":
        os.kill(victim, signal.SIGKILL)
    elif fault == "stop":
        os.kill(victim, signal.SIGSTOP)
    else:
        jvm = next(jvm for jvm in cluster.executors().values() if victim in children(jvm))
        if fault == "executor":
            os.kill(jvm, signal.SIGKILL)
        else:
            words = Path(f"/proc/{jvm}/cmdline").read_text().split("\0")
            host = words[words.index("--hostname") + 1]
            cluster.link_down(host)
            return lambda: cluster.link_up(host)
    return lambda: None


def one_fault(log: StepLog, fault: str, size: int, cluster: Any, figures: Figures, rng: random.Random) -> None:
    """Strike one of `size` workers, wait for the survivors' next steps, then for the replacement."""
    known = _executor_ids(cluster) if fault == "executor" else set()
    members = log.wait_for_world(size, _newest_round(log) - 1)
    round = _newest_round(log)
    time.sleep(rng.uniform(0.05, 0.15))  # anywhere in a step
    victim = rng.choice(sorted(members))
    survivors = [pid for pid in members if pid != victim]
    start = time.monotonic()
    undo = strike(fault, victim, cluster)
    died = start
    if fault == "executor":
        while is_alive(victim):
            time.sleep(0.0005)
        died = time.monotonic()
        figures.worker_outlives_jvm.append((died - start) * 1000)
    firsts = log.wait(
        lambda read: (f := [read.first_step(pid, round + 1) for pid in survivors]) and all(f) and f,
        60,
        "the survivors' next step",
    )
    last = max(step.at for step in firsts)
    figures.to_next_step.setdefault(f"{size} -> {size - 1}", []).append((last - start) * 1000)
    if fault == "executor":
        figures.from_worker_death.append(max(last - died, 0.0) * 1000)
    undo()
    if fault == "executor":
        wait_until(lambda: _executor_ids(cluster) - known, 180.0, "the new executor")
        figures.executor_start_s.append(time.monotonic() - start)
    log.wait_for_world(size, round + 1, 180.0)
    joined = _newest_round(log)
    figures.full_strength_s.append(max(step.at for step in log.newest().values() if step.round == joined) - start)
    for pid in survivors:
        before, after = log.last_step_before(pid, joined), log.first_step(pid, joined)
        if before is not None and after is not None:
            figures.join_pause.append((after.at - before.at) * 1000)


def _executor_ids(cluster: Any) -> set[str]:
    """The executors that have registered with the driver."""
    ids = cluster.sc._jsc.sc().getExecutorIds()
    return {str(ids.apply(index)) for index in range(ids.size())}


def _seconds_to_import() -> float:
    """What a worker imports before it can join, in a process of its own, beside whatever else runs now."""
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch, torch._dynamo, spark_elastic.torch"], check=True)
    return time.monotonic() - start


def _newest_round(log: StepLog) -> int:
    log.read()
    return max((step.round for step in log.newest().values()), default=0)


def main() -> None:
    arguments = parser(__doc__, repeat=50)
    arguments.add_argument(
        "--on", choices=["processes", "local", "local-cluster", "standalone", "namespaces"], default="processes"
    )
    arguments.add_argument("--fault", choices=["worker", "executor", "stop", "link"], default="worker")
    arguments.add_argument("--framework", choices=["torch", "keras"], default="torch")
    arguments.add_argument("--sizes", type=int, nargs="+", default=[3, 2])
    arguments.add_argument("--hidden", type=int, default=128, help="128: 102 k parameters, 0.8 MB with momentum")
    arguments.add_argument("--hosts", type=int, default=1, help="loopback addresses of plain processes (%(default)s)")
    args = arguments.parse_args()
    repeat = 3 if args.quick else args.repeat
    rng = random.Random(7)
    figures = Figures()
    rounds = 0
    for size in args.sizes:
        with (
            tempfile.TemporaryDirectory() as folder,
            running_job(args.on, args.framework, folder, size, args.hidden, args.hosts) as (job, cluster),
        ):
            log = StepLog(Path(folder), job)
            log.wait_for_world(size, 0, 180.0)
            for number in range(repeat):
                one_fault(log, args.fault, size, cluster, figures, rng)
                if args.fault == "executor":
                    figures.import_s.append(_seconds_to_import())
                print(f"\r{size}: {number + 1}/{repeat}", end="", file=sys.stderr, flush=True)
            log.read()
            figures.lost_steps += log.lost_steps()
            rounds = sum(isinstance(record, WorldStarted) for record in job.timeline())
            figures.false_evictions += rounds - 1 - 2 * repeat
    silent = (None, None, HEARTBEAT_TIMEOUT_S * 1000 + 500)
    limits = {"worker": (150.0, 500.0, None), "executor": (None, None, None), "stop": silent, "link": silent}
    p50, p99, most = limits[args.fault]
    if args.framework == "keras" and args.fault == "worker":
        p50, p99 = 80.0, None
    series = [
        Series(f"{args.fault} -> next step, {kind}", values, "ms", target_p50=p50, target_p99=p99, target_max=most)
        for kind, values in figures.to_next_step.items()
    ]
    if figures.from_worker_death:
        series.append(Series("JVM's death -> worker's death", figures.worker_outlives_jvm, "ms", target_max=300.0))
        series.append(Series("worker's death -> next step", figures.from_worker_death, "ms", target_p50=100.0))
    join = 60.0 if args.framework == "keras" else 100.0
    series.append(Series("newcomer joins: pause", figures.join_pause, "ms", target_p50=join))
    series.append(Series("fault -> full strength", figures.full_strength_s, "s"))
    if figures.executor_start_s:
        parts = zip(figures.full_strength_s, figures.executor_start_s, figures.import_s, strict=True)
        beyond = [whole - executor - imported for whole, executor, imported in parts]
        series.append(Series("of it: until the new executor registers", figures.executor_start_s, "s"))
        series.append(Series("import torch beside the training", figures.import_s, "s"))
        series.append(Series("full strength, beyond these two", beyond, "s", target_max=2.0))
    series.append(Series("applied steps lost", [float(figures.lost_steps)], "steps", target_max=0.0))
    series.append(Series("worlds that no fault explains", [float(figures.false_evictions)], "worlds", target_max=0.0))
    name = f"recovery-{args.fault}-{args.on}" + ("-keras" if args.framework == "keras" else "")
    if args.sizes != [3, 2]:
        name += "-" + "-".join(map(str, args.sizes))
    if args.hosts > 1:
        name += f"-on-{args.hosts}-hosts"
    report(name, args, *series, raw=dict(vars(figures)))
    print(f"median pause at a join: {statistics.median(figures.join_pause):.1f} ms")


if __name__ == "__main__":
    main()
