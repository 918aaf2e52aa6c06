"""Step time of DistributedOptimizer against plain DistributedDataParallel over Gloo, two processes on loopback.

Both train the same model in the same two processes, in short blocks that take turns, so that whatever else the machine
does hits both alike. Reported are medians over blocks and the median of the ratios of neighbouring blocks.

    python benchmarks/step_time.py [--rounds 50] [--steps 10]

Prints a table and writes benchmarks/results/step_time.json.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import spark_elastic.torch as hvd
from spark_elastic import worker_link
from spark_elastic.core.topology import Member, Place, World
from spark_elastic.worker_link import Assignment

ADDRESS = "127.0.0.1"
RESULTS = Path(__file__).parent / "results" / "step_time.json"
MODELS = {
    "784-512-512-10": (784, 512, 512, 10),
    "784-128-10": (784, 128, 10),
}
BATCH = 64


class StoreLink:
    """The least that the frontend needs of a job: a fixed world, and a key-value store."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self.worker = rank + 1
        self._store = store
        members = tuple(
            Member(r + 1, Place(ADDRESS, str(r), r), r, local_rank=r, local_size=size, cross_rank=0, cross_size=1)
            for r in range(size)
        )
        self._assignment = Assignment(
            World(1, members, root=0, progress=None, sync=True), self.worker, {r + 1: ADDRESS for r in range(size)}
        )

    def join_at_init(self) -> Assignment:
        return self._assignment

    def join(self, round: int, progress: int | None) -> Assignment:
        raise RuntimeError("this world does not change")

    def report_progress(self, progress: int) -> None: ...

    def entered_loop(self) -> None: ...

    def blocked(self, waiting: bool) -> None:
        pass

    def updates_seen(self) -> int:
        return 0

    def cut_round(self) -> int:
        return 0

    def on_cut(self, callback: Callable[[int, str], None] | None) -> None: ...

    def derive_key(self, purpose: str) -> bytes:
        return hashlib.sha256(purpose.encode()).digest()

    def kv_set(self, round: int, key: str, value: bytes) -> None:
        self._store.set(f"{round}/{key}", value.hex())

    def kv_get(self, round: int, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        if any(key.startswith("join/") for key in keys):
            threading.Event().wait()  # nobody calls hvd.join() here
        return [bytes.fromhex(self._store.get(f"{round}/{key}").decode()) for key in keys]


def build(sizes: Sequence[int]) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def stepper(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[int], None]:
    features = next(p for p in model.parameters()).shape[1]
    x, y = torch.randn(BATCH, features), torch.randint(0, 10, (BATCH,))

    def run(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    return run


def contenders(sizes: Sequence[int]) -> dict[str, Callable[[int], None]]:
    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    plain, ours, committing, theirs = (build(sizes) for _ in range(4))
    optimizer = hvd.DistributedOptimizer(sgd(ours), named_parameters=ours.named_parameters())
    second = hvd.DistributedOptimizer(sgd(committing), named_parameters=committing.named_parameters())
    state = hvd.elastic.TorchState(committing, second, batch=0)
    state._in_loop = True  # as under hvd.elastic.run
    one = stepper(committing, second)

    def with_commit(steps: int) -> None:
        for _ in range(steps):
            one(1)
            state.batch += 1
            state.commit()

    ddp = DistributedDataParallel(theirs)
    return {
        "no reduction": stepper(plain, sgd(plain)),
        "ddp": stepper(ddp, sgd(ddp)),
        "spark_elastic": stepper(ours, optimizer),
        "spark_elastic, commit every step": with_commit,
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
    worker_link.install(StoreLink(dist.PrefixStore("ours", store), rank, 2))
    hvd.init()
    models = {name: measure(contenders(sizes), args.rounds, args.steps) for name, sizes in MODELS.items()}
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
    parser.add_argument("--worker", type=int, nargs=2, metavar=("RANK", "PORT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(*args.worker, args)
        return
    with contextlib.closing(__import__("socket").socket()) as probe:
        probe.bind((ADDRESS, 0))
        port = probe.getsockname()[1]
    command = [sys.executable, sys.argv[0], "--rounds", str(args.rounds), "--steps", str(args.steps)]
    processes = [subprocess.Popen([*command, "--worker", str(rank), str(port)]) for rank in range(2)]
    try:
        codes = [process.wait() for process in processes]
    finally:
        for process in processes:
            process.kill()
    sys.exit(max(codes))


if __name__ == "__main__":
    main()
