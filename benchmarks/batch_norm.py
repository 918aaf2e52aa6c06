"""What synchronised batch normalisation costs: step times with and without it, two processes on loopback.

Both train the same models in the same two processes, in short blocks that take turns, with `DistributedOptimizer`.

    python benchmarks/batch_norm.py [--rounds 30] [--steps 5]

Prints a table and writes benchmarks/results/batch_norm.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from _fixed_world import FixedLink
from _harness import Series, parser, report
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import spark_elastic.torch as hvd
from spark_elastic.wire import worker_link

ADDRESS = "127.0.0.1"
BATCH = 32


def convolutions() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((3, 16), (16, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 2 * 2, 10))


def perceptron() -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in ((3072, 512), (512, 512)):
        layers += [nn.Linear(before, after), nn.BatchNorm1d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(512, 10))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "4 convolutions with BatchNorm2d, 32 x 32": convolutions,
    "3072-512-512-10 with BatchNorm1d": perceptron,
}


def stepper(model: nn.Module) -> Callable[[int], None]:
    plain = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters())
    x, y = torch.randn(BATCH, 3, 32, 32), torch.randint(0, 10, (BATCH,))

    def run(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    return run


def measure(make: Callable[[], nn.Module], rounds: int, steps: int) -> dict[str, list[float]]:
    runs = {"": stepper(make()), ", synchronised": stepper(hvd.SyncBatchNorm.convert_sync_batchnorm(make()))}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run(steps)
    for number in range(rounds):
        for name in list(runs) if number % 2 else reversed(list(runs)):
            hvd.barrier()
            start = time.perf_counter()
            runs[name](steps)
            times[name].append((time.perf_counter() - start) / steps * 1e3)
    return times


def worker(rank: int, port: int, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore(ADDRESS, port, 2, is_master=rank == 0, timeout=timedelta(seconds=60))
    worker_link.install(FixedLink(store, rank, [ADDRESS] * 2))
    hvd.init()
    times = {name: measure(make, args.rounds, args.steps) for name, make in MODELS.items()}
    hvd.barrier()
    hvd.shutdown()
    if rank == 0:
        print(json.dumps(times))


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--rounds", type=int, default=30)
    made.add_argument("--steps", type=int, default=5)
    made.add_argument("--worker", type=int, nargs=2, metavar=("RANK", "PORT"), help=argparse.SUPPRESS)
    args = made.parse_args()
    if args.quick:
        args.rounds = 4
    if args.worker:
        worker(*args.worker, args)
        return
    with contextlib.closing(socket.socket()) as probe:
        probe.bind((ADDRESS, 0))
        port = probe.getsockname()[1]
    command = [sys.executable, sys.argv[0], "--rounds", str(args.rounds), "--steps", str(args.steps)]
    processes = [
        subprocess.Popen([*command, "--worker", str(rank), str(port)], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        said = [process.communicate()[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    times = json.loads(said[0])
    series, raw = [], {}
    for model, by_kind in times.items():
        series += [Series(model + kind, values, "ms a step") for kind, values in by_kind.items()]
        raw |= {model + kind: values for kind, values in by_kind.items()}
        plain, synchronised = by_kind.values()
        raw[f"{model}: median ratio"] = statistics.median(b / a for a, b in zip(plain, synchronised, strict=True))
        print(f"{model}: synchronised takes {raw[f'{model}: median ratio']:.2f} of the time", file=sys.stderr)
    del args.worker
    report("batch_norm", args, *series, raw=raw)


if __name__ == "__main__":
    main()
