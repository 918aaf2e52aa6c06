"""Time of one all-reduce over 2 to 8 hosts, and of Gloo's own all-reduce among the same processes, in turns.

    python benchmarks/hosts.py                           # hosts are loopback addresses, one worker each
    python benchmarks/hosts.py --hosts 8 --sizes 65536

"ours" is the path that a reduction takes in a job: below a threshold an exchange between all hosts, above it Gloo's
ring. "Gloo" is `torch.distributed.all_reduce` in a group of its own, as any program would call it. A round times a few
calls of each, in alternating order; its time is that of the slowest host. The ratio is the median over rounds of
neighbouring times. Both are timed without comparing the hosts' calls first, as with the buckets of an optimizer.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from _fixed_world import FixedLink
from _harness import Series, parser, report

import spark_elastic.torch as hvd
from spark_elastic.collective.process import process
from spark_elastic.wire import worker_link

SIZES = (4, 1 << 10, 16 << 10, 64 << 10, 128 << 10, 1 << 20, 25_000_000)
TARGET = (8, 64 << 10)
"""The number of hosts and the bytes for which the ratio has a target."""
LARGE_BYTES = 4 << 20
WARM_UP_ROUNDS = 2
LIMIT_S = 240.0
"""The time limit for the processes of one number of hosts."""


def addresses(hosts: int) -> list[str]:
    return [f"127.0.0.{number + 1}" for number in range(hosts)]


def milliseconds(call: Callable[[torch.Tensor], object], tensor: torch.Tensor, repeats: int) -> float:
    """Return the time of one call, on the slowest host."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        call(tensor)
    mine = torch.tensor([(time.perf_counter() - start) / repeats * 1e3], dtype=torch.float64)
    dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    return float(mine.item())


def compare(nbytes: int, rounds: int) -> dict[str, list[float]]:
    """Return the times of each round, ours and Gloo's; every process calls this, and all get the same."""
    tensor = torch.ones(nbytes // 4)
    group = process.group()
    assert group is not None

    def ours(values: torch.Tensor) -> None:
        group.wait(group.allreduce(values, hvd.Sum.gloo))

    calls = {"ours": ours, "gloo": dist.all_reduce}
    for call in calls.values():
        mine = tensor.clone()
        call(mine)
        assert bool((mine == hvd.size()).all()), "a wrong sum"
    repeats = max(1, min(10, LARGE_BYTES // nbytes))
    if nbytes > LARGE_BYTES:
        rounds = max(2, rounds // 4)
    tensor.zero_()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(WARM_UP_ROUNDS + rounds):
        for name in calls if number % 2 else reversed(calls):
            took = milliseconds(calls[name], tensor, repeats)
            if number >= WARM_UP_ROUNDS:
                times[name].append(took)
    return times


def worker(rank: int, port: int, hosts: int, args: argparse.Namespace) -> None:
    """Take part in the comparison as one host; rank 0 writes the times to `args.times`."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=120))
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=addresses(hosts)[rank])]
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("own", store), rank=rank, world_size=hosts, pg_options=options
    )
    worker_link.install(FixedLink(store, rank, addresses(hosts)))
    hvd.init()
    found = {nbytes: compare(nbytes, args.repeat) for nbytes in args.sizes}
    if rank == 0:
        Path(args.times).write_text(json.dumps(found))
    dist.barrier()
    hvd.shutdown()
    dist.destroy_process_group()


def measure(hosts: int, args: argparse.Namespace) -> dict[int, dict[str, list[float]]]:
    """Run one process for each host; return the times by size.

    Raises:
        RuntimeError: a process failed, or they did not end within `LIMIT_S`.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        times = Path(folder) / "times.json"
        options = ["--repeat", str(args.repeat), "--times", str(times), "--sizes", *map(str, args.sizes)]
        processes = []
        for rank in range(hosts):
            role = ["--worker", str(rank), str(store.port), str(hosts)]
            started = subprocess.Popen([sys.executable, __file__, *options, *role])
            stack.callback(started.wait)
            stack.callback(started.kill)
            processes.append(started)
        until = time.monotonic() + LIMIT_S
        while any(each.poll() is None for each in processes):
            if time.monotonic() > until or any(each.poll() for each in processes):
                raise RuntimeError(f"{hosts} hosts: a process failed or was too slow; see its output above")
            time.sleep(0.05)
        return {int(nbytes): found for nbytes, found in json.loads(times.read_text()).items()}


def main() -> None:
    arguments = parser(__doc__, repeat=12)
    arguments.add_argument("--hosts", type=int, nargs="+", default=[2, 3, 4, 6, 8])
    arguments.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), metavar="BYTES")
    arguments.add_argument("--worker", type=int, nargs=3, metavar=("RANK", "PORT", "HOSTS"), help=argparse.SUPPRESS)
    arguments.add_argument("--times", help=argparse.SUPPRESS)
    args = arguments.parse_args()
    if min(args.hosts) < 2 or min(args.sizes) < 4:
        arguments.error("--hosts needs numbers from 2 on, as one host has nobody to reduce with; --sizes 4 or more")
    args.repeat = 3 if args.quick else args.repeat
    if args.worker:
        rank, port, hosts = args.worker
        worker(rank, port, hosts, args)
        return
    series: list[Series] = []
    raw: dict[str, dict[int, dict[str, list[float]]]] = {}
    for hosts in args.hosts:
        print(f"{hosts} hosts, load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
        found = measure(hosts, args)
        raw[str(hosts)] = found
        for nbytes, times in found.items():
            ratios = [ours / gloo for ours, gloo in zip(times["ours"], times["gloo"], strict=True)]
            name = f"{hosts} hosts, {nbytes} bytes"
            series += [Series(f"{name}: {who}", times[key], "ms") for who, key in (("ours", "ours"), ("Gloo", "gloo"))]
            target = 1.0 if (hosts, nbytes) == TARGET else None
            series.append(Series(f"{name}: ours / Gloo", ratios, "x", target_p50=target))
            print(f"  {nbytes:>10} bytes: {statistics.median(ratios):.2f} of Gloo's time", file=sys.stderr, flush=True)
    report("hosts", args, *series, raw=raw)


if __name__ == "__main__":
    main()
