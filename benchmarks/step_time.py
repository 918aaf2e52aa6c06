"""Step time of DistributedOptimizer against plain DistributedDataParallel over Gloo, two processes on loopback.

Both train the same model in the same two processes, in short blocks that take turns, so that whatever else the machine
does hits both alike. Reported are medians over blocks and the median of the ratios of neighbouring blocks.

    python benchmarks/step_time.py [--rounds 50] [--steps 10]

Prints a table and writes benchmarks/results/step_time.json.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _fixed_world import FixedLink, without_shared_memory
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import spark_elastic.torch as hvd
from spark_elastic.wire import worker_link

ADDRESS = "127.0.0.1"
RESULTS = Path(__file__).parent / "results" / "step_time.json"
MODELS = {
    "784-512-512-10": (784, 512, 512, 10),
    "784-128-10": (784, 128, 10),
    "784-3072-2048-512-10": (784, 3072, 2048, 512, 10),
}
BATCH = 64


def build(sizes: Sequence[int]) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def stepper(model: nn.Module, optimizer: torch.optim.Optimizer, clip: bool = False) -> Callable[[int], None]:
    features = next(p for p in model.parameters()).shape[1]
    x, y = torch.randn(BATCH, features), torch.randint(0, 10, (BATCH,))

    def run(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    return run


def through_gloo(run: Callable[[int], None]) -> Callable[[int], None]:
    def without(steps: int) -> None:
        with without_shared_memory():
            run(steps)

    return without


def contenders(sizes: Sequence[int]) -> dict[str, Callable[[int], None]]:
    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    plain, ours, theirs = (build(sizes) for _ in range(3))
    optimizer = hvd.DistributedOptimizer(sgd(ours), named_parameters=ours.named_parameters())  # several announce steps
    state = hvd.elastic.TorchState(ours, optimizer, batch=0)
    state._counter.in_loop = True  # as under hvd.elastic.run
    one = stepper(ours, optimizer)

    def marking(mark: Callable[[], None]) -> Callable[[int], None]:
        def run(steps: int) -> None:
            for _ in range(steps):
                one(1)
                state.batch += 1
                mark()

        return run

    ddp = DistributedDataParallel(theirs)
    its = sgd(ddp)
    return {
        "no reduction": stepper(plain, sgd(plain)),
        "ddp": stepper(ddp, its),
        "ddp, clipped": stepper(ddp, its, clip=True),
        "spark_elastic": one,
        "spark_elastic, clipped": stepper(ours, optimizer, clip=True),
        "spark_elastic, Gloo": through_gloo(one),
        "spark_elastic, check every step": marking(state.check_host_updates),
        "spark_elastic, commit every step": marking(state.commit),
    }


def measure(runs: dict[str, Callable[[int], None]], rounds: int, steps: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run(steps)
    order = list(runs)
    for number in range(rounds):
        for name in order if number % 2 else reversed(order):
            hvd.barrier()
            start = time.perf_counter()
            runs[name](steps)
            times[name].append((time.perf_counter() - start) / steps * 1e3)
    return times


def summary(times: dict[str, list[float]]) -> dict[str, Any]:
    ddp = times["ddp"]
    return {
        name: {
            "median_ms": round(statistics.median(values), 4),
            "quartiles_ms": [round(q, 4) for q in statistics.quantiles(values, n=4)],
            "ratio_to_ddp": round(statistics.median(a / b for a, b in zip(values, ddp, strict=True)), 4),
        }
        for name, values in times.items()
    }


def worker(rank: int, port: int, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore(ADDRESS, port, 2, is_master=rank == 0, timeout=timedelta(seconds=60))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.PrefixStore("ddp", store), rank=rank, world_size=2)
    worker_link.install(FixedLink(dist.PrefixStore("ours", store), rank, [ADDRESS] * 2))
    hvd.init()
    models = {}
    for name in args.models:
        gc.collect()  # with an optimizer of the last model, each reduction would be announced
        models[name] = measure(contenders(MODELS[name]), args.rounds, args.steps)
    hvd.barrier()
    hvd.shutdown()
    dist.destroy_process_group()
    if rank == 0:
        report({name: summary(times) for name, times in models.items()}, args)


def report(models: dict[str, Any], args: argparse.Namespace) -> None:
    out = {
        "what": "ms a step, 2 processes on loopback, 1 thread each, batch 64, SGD with momentum",
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "load": os.getloadavg(),
        "rounds": args.rounds,
        "steps_a_block": args.steps,
        "models": models,
    }
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(out, indent=2) + "\n")
    for model, rows in models.items():
        print(f"\n{model}")
        print(f"  {'':34}{'median ms':>10}{'quartiles':>20}{'to DDP':>9}")
        for name, row in rows.items():
            low, _, high = row["quartiles_ms"]
            print(f"  {name:34}{row['median_ms']:10.3f}{f'{low:.3f} - {high:.3f}':>20}{row['ratio_to_ddp']:9.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--worker", type=int, nargs=2, metavar=("RANK", "PORT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(*args.worker, args)
        return
    with contextlib.closing(__import__("socket").socket()) as probe:
        probe.bind((ADDRESS, 0))
        port = probe.getsockname()[1]
    command = [sys.executable, sys.argv[0], "--rounds", str(args.rounds), "--steps", str(args.steps)]
    command += ["--models", *args.models]
    processes = [subprocess.Popen([*command, "--worker", str(rank), str(port)]) for rank in range(2)]
    try:
        codes = [process.wait() for process in processes]
    finally:
        for process in processes:
            process.kill()
    sys.exit(max(codes))


if __name__ == "__main__":
    main()
