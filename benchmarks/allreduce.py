"""Time of one all-reduce by size: through shared memory, and through Gloo alone, in turns in the same processes.

    python benchmarks/allreduce.py [--np 2] [--sizes 4 1048576] [--rounds 20]
    python benchmarks/allreduce.py --hosts 2 --np 4          # two network namespaces, needs the rights to make them

Every member is as late as the last one: a round's time is that of its slowest member. Reported are medians over rounds,
and the median of the ratios of neighbouring rounds. Writes benchmarks/results/allreduce.json.

"memory" is what the members of one host would need if they never waited: all of them at once copy the tensor, in chunks
of 1 MB, and add as many chunks as there are members. A reduction through shared memory cannot be faster, unless it does
without the copy.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _fixed_world import join_fixed_world, run_in_fixed_world, without_shared_memory

import spark_elastic.torch as hvd
from spark_elastic.collective.process import process
from spark_elastic.collective.reduce import CHUNKS_BEFORE_READING, LARGE_CHUNK_BYTES

RESULTS = Path(__file__).parent / "results" / "allreduce.json"
SIZES = (4, 1 << 10, 16 << 10, 128 << 10, 1 << 20, 26_000_000, 105_000_000)


def timed(call: Callable[[], None], repeats: int) -> float:
    """Milliseconds a call, on the slowest member."""
    hvd.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    mine = torch.tensor([(time.perf_counter() - start) / repeats * 1e3], dtype=torch.float64)
    with without_shared_memory():
        return float(hvd.allreduce(mine, op=hvd.Max).item())


def compare(nbytes: int, rounds: int) -> dict[str, list[float]]:
    tensor = torch.zeros(nbytes // 4)
    repeats = max(1, min(50, 2_000_000 // nbytes))

    def reduce() -> None:
        hvd.allreduce_(tensor, op=hvd.Sum)

    def through_gloo() -> None:
        with without_shared_memory():
            reduce()

    chunks = tensor.split(LARGE_CHUNK_BYTES // 4)
    window = min(len(chunks), CHUNKS_BEFORE_READING)
    slots = [[torch.zeros(chunks[0].numel()) for _ in range(window)] for _ in range(hvd.local_size())]

    def in_memory() -> None:
        for number, chunk in enumerate(chunks):
            parts = [member[number % window][: chunk.numel()] for member in slots]
            parts[0].copy_(chunk)
            torch.add(parts[0], parts[1], out=chunk)
            for part in parts[2:]:
                chunk.add_(part)

    runs = {"shared": reduce, "gloo": through_gloo}
    if hvd.local_size() > 1:
        runs["memory"] = in_memory
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        timed(run, repeats)
    for number in range(max(3, rounds if nbytes < 10_000_000 else rounds // 3)):
        for name in runs if number % 2 else reversed(runs):
            times[name].append(timed(runs[name], repeats))
    return times


def worker(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    rank = join_fixed_world(args.worker)
    hvd.init()
    group = process.group()
    shares = group is not None and group.shared_memory is not None
    rows = {nbytes: compare(nbytes, args.rounds) for nbytes in args.sizes}
    hvd.barrier()
    hvd.shutdown()
    if rank == 0:
        report(rows, shares, args)


def report(rows: dict[int, dict[str, list[float]]], shares: bool, args: argparse.Namespace) -> None:
    summary: dict[int, Any] = {}
    print(f"{args.np} processes on {args.hosts} host(s); load {os.getloadavg()[0]:.1f}; shared memory: {shares}")
    print(f"  {'bytes':>12}{'shared ms':>12}{'Gloo ms':>12}{'ratio':>9}{'memory ms':>12}")
    for nbytes, times in rows.items():
        ratio = statistics.median(a / b for a, b in zip(times["shared"], times["gloo"], strict=True))
        shared, gloo = (statistics.median(times[name]) for name in ("shared", "gloo"))
        summary[nbytes] = {"shared_ms": round(shared, 4), "gloo_ms": round(gloo, 4), "ratio": round(ratio, 4)}
        memory = statistics.median(times.get("memory", [float("nan")]))
        if "memory" in times:
            summary[nbytes]["memory_ms"] = round(memory, 4)
        print(f"  {nbytes:12d}{shared:12.3f}{gloo:12.3f}{ratio:9.3f}{memory:12.3f}")
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    known[f"{args.np} processes, {args.hosts} hosts"] = {
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "load": os.getloadavg(),
        "rounds": args.rounds,
        "by_bytes": summary,
    }
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(known, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--np", type=int, default=2)
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--worker", nargs=4, metavar=("RANK", "MASTER", "PORT", "ADDRESSES"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args)
    else:
        sys.exit(run_in_fixed_world(args.np, args.hosts))


if __name__ == "__main__":
    main()
