"""Step time with virtual workers against a plain reduction: the price of the same bits for any number of workers.

Two processes on loopback train the same model on a global batch of 128 rows, in short blocks that take turns.
"trajectory" is a `DistributedOptimizer` (Keras: a `DistributedGradientTape` in a `tf.function`); "exact" are virtual
workers, with 2, 4 and 8 shards of a batch.

    python benchmarks/exact.py [--framework keras] [--rounds 30] [--steps 10]

Prints a table and writes benchmarks/results/exact.json, or exact-keras.json. Two other things to do with a framework:

    python benchmarks/exact.py --framework keras --schedules 100     # of kills and arrivals; compares every bit
    python benchmarks/exact.py --framework keras --picture docs/images/exact.png     # of a quiet and a stormy run

The first writes benchmarks/results/exact-schedules-keras.json, and stops at the first difference. The same for
trainings of the estimators:

    pytest -m soak -s tests/unit/ml/torch/test_exact.py tests/unit/ml/keras/test_exact.py
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _fixed_world import FixedLink
from step_time import ADDRESS, MODELS, build, measure
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import spark_elastic.torch as hvd
from spark_elastic.wire import worker_link

RESULTS = Path(__file__).parent / "results"
MEASURED = ("784-512-512-10", "784-3072-2048-512-10")
ROWS = 128
SHARDS = (2, 4, 8)
SIZE = 2


def rows_of(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(ROWS, next(model.parameters()).shape[1]), torch.randint(0, 10, (ROWS,))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def trajectory(name: str) -> Callable[[int], None]:
    model = build(MODELS[name])
    x, y = (each.chunk(SIZE)[hvd.rank()] for each in rows_of(model))
    optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters(), op=hvd.Sum)

    def run(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y, reduction="sum") / ROWS
            numbers = torch.tensor([loss.item()], dtype=torch.float64)
            optimizer.attach_scalars(numbers)
            loss.backward()
            optimizer.step()

    return run


def exact(name: str, shards: int) -> Callable[[int], None]:
    model = build(MODELS[name])
    x, y = rows_of(model)
    optimizer = sgd(model)
    workers = hvd.elastic.virtual_workers(shards, model, optimizer, sums=["loss"])

    def run(steps: int) -> None:
        for step in range(steps):
            for shard in workers.shards(ROWS, step):
                loss = nn.functional.cross_entropy(model(x[shard.rows]), y[shard.rows], reduction="sum") / ROWS
                loss.backward()
                shard.add("loss", loss)
            optimizer.step()

    return run


def runs_of(name: str, framework: str) -> dict[str, Callable[[int], None]]:
    if framework == "torch":
        return {"trajectory": trajectory(name), **{f"exact, {each} shards": exact(name, each) for each in SHARDS}}
    import _exact_keras as of_keras

    sizes = MODELS[name]
    runs = {f"exact, {each} shards": of_keras.exact(sizes, ROWS, each) for each in SHARDS}
    return {"trajectory": of_keras.trajectory(sizes, ROWS, SIZE), **runs}


def worker(rank: int, port: int, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    if args.framework == "keras":
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
    store = dist.TCPStore(ADDRESS, port, SIZE, is_master=rank == 0, timeout=timedelta(seconds=60))
    worker_link.install(FixedLink(dist.PrefixStore("ours", store), rank, [ADDRESS] * SIZE))
    hvd.init()
    models = {}
    for name in args.models:
        models[name] = measure(runs_of(name, args.framework), args.rounds, args.steps)
    hvd.barrier()
    if rank == 0:
        report({name: summary(times) for name, times in models.items()}, args)
    hvd.barrier()
    hvd.shutdown()


def summary(times: dict[str, list[float]]) -> dict[str, Any]:
    base = times["trajectory"]
    return {
        name: {
            "median_ms": round(statistics.median(values), 4),
            "quartiles_ms": [round(each, 4) for each in statistics.quantiles(values, n=4)],
            "ratio_to_trajectory": round(statistics.median(a / b for a, b in zip(values, base, strict=True)), 4),
        }
        for name, values in times.items()
    }


def report(models: dict[str, Any], args: argparse.Namespace) -> None:
    out = {
        "what": f"ms a step, {SIZE} processes on loopback, 1 thread each, global batch {ROWS}, SGD with momentum",
        args.framework: version(args.framework),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "load": os.getloadavg(),
        "rounds": args.rounds,
        "steps_a_block": args.steps,
        "models": models,
    }
    write(out, args.results or RESULTS / ("exact.json" if args.framework == "torch" else "exact-keras.json"))
    for model, rows in models.items():
        print(f"\n{model}")
        print(f"  {'':24}{'median ms':>10}{'quartiles':>20}{'to trajectory':>15}")
        for name, row in rows.items():
            low, _, high = row["quartiles_ms"]
            ratio = row["ratio_to_trajectory"]
            print(f"  {name:24}{row['median_ms']:10.3f}{f'{low:.3f} - {high:.3f}':>20}{ratio:15.3f}")


def write(out: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(out, indent=2) + "\n")


def version(framework: str) -> str:
    if framework == "torch":
        return str(torch.__version__)
    import keras
    import tensorflow as tf

    return f"{keras.__version__} on TensorFlow {tf.__version__}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", choices=["torch", "keras"], default="torch")
    parser.add_argument("--schedules", type=int, metavar="N", help="train through N schedules of kills and arrivals")
    parser.add_argument("--first", type=int, default=100, help="the first schedule")
    parser.add_argument("--picture", type=Path, metavar="PNG", help="draw a quiet and a stormy run")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MEASURED))
    parser.add_argument("--results", type=Path, help="the JSON to write")
    parser.add_argument("--worker", type=int, nargs=2, metavar=("RANK", "PORT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(*args.worker, args)
        return
    if args.picture:
        import _exact_storms as pictured

        found = pictured.quiet_and_stormy(args.framework)
        pictured.draw(found, args.picture)
        print(f"{args.picture}: {found['hash_of_quiet']} (quiet), {found['hash_of_stormy']} (stormy)")
        return
    if args.schedules:
        import _exact_storms as many

        out = {"what": f"schedules of kills and arrivals over a loop with virtual workers, {args.framework}"}
        out |= {args.framework: version(args.framework), **many.storms(args.framework, args.first, args.schedules)}
        write(out, args.results or RESULTS / f"exact-schedules-{args.framework}.json")
        return
    with __import__("socket").socket() as probe:
        probe.bind((ADDRESS, 0))
        port = probe.getsockname()[1]
    command = [sys.executable, sys.argv[0], "--rounds", str(args.rounds), "--steps", str(args.steps)]
    command += ["--framework", args.framework, "--models", *args.models]
    command += ["--results", str(args.results)] if args.results else []
    processes = [subprocess.Popen([*command, "--worker", str(rank), str(port)]) for rank in range(SIZE)]
    try:
        codes = [process.wait() for process in processes]
    finally:
        for process in processes:
            process.kill()
    sys.exit(max(codes))


if __name__ == "__main__":
    main()
