"""From the call of `run` to the first optimizer step, and from the last step to its return, on a warm SparkContext.

Each repetition makes two calls. With `--keep-workers 60` the second one finds processes that the first has left.

python benchmarks/start.py
python benchmarks/start.py --on local-cluster --keep-workers 60
python benchmarks/start.py --peer            # TorchDistributor in turns with it
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import peer_torch_distributor
from _harness import Series, parser, report
from peer_torch_distributor import first_step_with_torch_distributor
from pyspark import cloudpickle

import spark_elastic
from tests.integration import clusters

cloudpickle.register_pickle_by_value(peer_torch_distributor)  # executors do not have this folder

PARTS = ("to worker process", "python, imports", "function's imports", "init", "model, first step", "end")
"""Consecutive parts of a call: they add up to its wall time. The first is Spark's launch and the agent's start."""
TARGETS_S = {"local-cluster": 2.5, "standalone": 3.0}
SECOND_CALL_S = 1.0


def one_step() -> dict[str, float]:
    """Train for one step, and return when each part was over."""
    import os
    import time

    function = time.time()
    import torch

    import spark_elastic.torch as hvd

    imported = time.time()
    hvd.init()
    placed = time.time()
    model = torch.nn.Sequential(torch.nn.Linear(784, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer)

    @hvd.elastic.run
    def loop(state: Any) -> None:
        torch.nn.functional.cross_entropy(model(torch.randn(64, 784)), torch.randint(0, 10, (64,))).backward()
        optimizer.step()

    loop(state)
    stepped = time.time()
    with open("/proc/self/stat") as stat, open("/proc/uptime") as uptime:
        ticks = int(stat.read().rpartition(")")[2].split()[19])
        process = time.time() - (float(uptime.read().split()[0]) - ticks / os.sysconf("SC_CLK_TCK"))
    return {
        "process": process,
        "function": function,
        "imported": imported,
        "placed": placed,
        "stepped": stepped,
    }


def one_call(spark: Any, keep_s: float | None) -> dict[str, float]:
    """Return the seconds of each part, of the slowest worker in each."""
    settings = {} if keep_s is None else {"keep_workers": keep_s}
    began = time.time()
    marks = spark_elastic.run(one_step, num_proc=2, spark=spark, verbose=0, **settings)
    ended = time.time()
    latest = {name: max(each[name] for each in marks) for name in marks[0]}
    times = [began, *latest.values(), ended]
    parts = {name: after - before for name, before, after in zip(PARTS, times, times[1:], strict=False)}
    return {"first step": latest["stepped"] - began, **parts, "wall": ended - began}


def bare(statement: str) -> float:
    """Return the seconds of a Python that executes a statement and nothing else."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", statement], check=True)
    return time.monotonic() - began


def main() -> None:
    arguments = parser(__doc__, repeat=7)
    arguments.add_argument("--on", choices=["local-cluster", "standalone"], default="standalone")
    arguments.add_argument("--keep-workers", type=float, metavar="SECONDS", help="for how long to keep processes")
    arguments.add_argument("--pause", type=float, default=0.0, metavar="SECONDS", help="between the two calls")
    arguments.add_argument("--peer", action="store_true", help="with TorchDistributor")
    args = arguments.parse_args()
    make = {
        "local-cluster": lambda: clusters.local_cluster(2, 1),
        "standalone": lambda: clusters.standalone(workers=2, cores=1),
    }[args.on]
    with make() as cluster:
        # warm: executors and their Python daemons are up
        cluster.sc.parallelize(range(2), 2).map(lambda x: x).collect()
        first, second, theirs = measure(cluster.spark, args)
    python, torch = [bare("pass") for _ in first], [bare("import torch") for _ in first]
    series = [
        Series("run -> first step", [each["first step"] for each in first], "s", target_p50=TARGETS_S[args.on]),
        *(Series(f"  {name}", [each[name] for each in first], "s") for name in PARTS),
        Series("python start, alone", python, "s"),
        Series("import torch, alone", [a - b for a, b in zip(torch, python, strict=True)], "s"),
        Series(
            "second run -> first step",
            [each["first step"] for each in second],
            "s",
            target_p50=None if args.keep_workers is None else SECOND_CALL_S,
        ),
        *(Series(f"  {name} (second)", [each[name] for each in second], "s") for name in PARTS),
    ]
    if theirs:
        ratios = [ours["first step"] / other for ours, other in zip(first, theirs, strict=True)]
        series.append(Series("TorchDistributor -> first step", theirs, "s"))
        series.append(Series("ratio of neighbours", ratios, "", target_p50=0.5))
    kept = "" if args.keep_workers is None else "-kept"
    report(f"start-{args.on}{kept}", args, *series, raw={"first": first, "second": second, "torch_distributor": theirs})


def measure(spark: Any, args: argparse.Namespace) -> tuple[list[dict[str, float]], list[dict[str, float]], list[float]]:
    """Return the first calls, the second calls and TorchDistributor's of all repetitions."""
    first: list[dict[str, float]] = []
    second: list[dict[str, float]] = []
    theirs: list[float] = []
    for index in range(2 if args.quick else args.repeat):
        if index and args.keep_workers is not None:
            time.sleep(args.keep_workers + 1)  # the first call shall find nothing
        for calls in (first, second):
            calls.append(one_call(spark, args.keep_workers))
            print({name: round(seconds, 2) for name, seconds in calls[-1].items()}, file=sys.stderr)
            time.sleep(args.pause)
        if args.peer:
            theirs.append(first_step_with_torch_distributor(spark, 2))
            print(f"TorchDistributor {theirs[-1]:.2f} s", file=sys.stderr)
    return first, second, theirs


if __name__ == "__main__":
    main()
