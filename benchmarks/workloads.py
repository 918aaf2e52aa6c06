"""Four workloads from a DataFrame to a trained model: rows a second and core, and where the rest of the time goes.

- table: 40 numbers and 5 ids with embeddings, a wide MLP; 2 M rows.
- images: 32 x 32 x 3 bytes, a small residual network; 60,000 rows.
- tokens: 8 to 64 tokens, a small transformer; 200,000 rows.
- logistic: 10 numbers, logistic regression; 50 M rows. So little is computed that everything else shows.

`--scale 1` has these numbers of rows; the default has a share of them that ends in minutes. Each workload is trained
three times, with one thread a process:

- by `ElasticTorchEstimator.fit` in two workers: rows are written, read and shuffled.
- by hand with TorchDistributor and DistributedDataParallel, two processes: Spark writes Parquet, each process reads it
  once to tensors in memory, and takes its part of a permutation by `index_select`. Nothing reads faster, as long as
  all rows fit into the memory of every process.
- by one process, and by two at a time, with the same tensors and no reduction: what the model alone costs.

The rates are those of the epochs after the first one. `lost` is what the estimator lacks to two separate processes, in
parts of its epoch: reading (the training waits for the next batch), collating (records to tensors), and everything else
beyond the model's own step, which is the reduction, the waiting for the other worker, and the bookkeeping of steps. The
processor time of a row, in all threads of a process, tells what a way costs on a machine with other things to do, too.

    python benchmarks/workloads.py [--only images tokens] [--scale 0.1] [--repeat 5]
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._harness import Series, parser, report
from benchmarks._workloads import WORKLOADS, Workload
from spark_elastic.ml.callbacks import Callback

WORKERS = 2


# --- ours -----------------------------------------------------------------------------------------


class Parts(Callback):
    """Measures, in each worker, the seconds of the training's thread in reading and collating, epoch by epoch.

    It wraps methods of the product, and writes a line for each epoch to a file in `folder`.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._reading = self._collating = 0.0

    def on_fit_begin(self, run: Any) -> None:
        from spark_elastic.ml.torch.engine import TorchEngine
        from spark_elastic.ml.torch.objective import BatchMaker

        feed, parts = TorchEngine.feed, BatchMaker.parts

        def timed_feed(engine: Any, batches: Any) -> Iterator[Any]:
            fed = feed(engine, batches)
            try:
                while True:
                    start = time.perf_counter()
                    batch = next(fed, None)
                    self._reading += time.perf_counter() - start
                    if batch is None:
                        return
                    yield batch
            finally:
                fed.close()

        def timed_parts(maker: Any, *args: Any) -> Any:
            start = time.perf_counter()
            made = parts(maker, *args)
            self._collating += time.perf_counter() - start
            return made

        TorchEngine.feed, BatchMaker.parts = timed_feed, timed_parts  # type: ignore[method-assign,assignment]

    def on_epoch_begin(self, run: Any) -> None:
        self._reading = self._collating = 0.0
        self._began = time.process_time()

    def on_epoch_end(self, run: Any, logs: Any) -> None:
        processor = time.process_time() - self._began
        line = {"reading": self._reading, "collating": self._collating, "processor": processor}
        with Path(self._folder, f"{os.getpid()}.parts").open("a") as file:
            file.write(json.dumps(line) + "\n")


def by_estimator(df: Any, workload: Workload, folder: str) -> dict[str, Any]:
    import torch

    from spark_elastic import ElasticTorchEstimator

    parts = Path(folder, "parts")
    parts.mkdir()
    net = workload.seeded_net()
    estimator = ElasticTorchEstimator(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9),
        loss=workload.loss_function(),
        batch_size=workload.batch,
        epochs=workload.epochs,
        num_proc=WORKERS,
        num_threads=1,
        callbacks=[Parts(str(parts))],
        verbose=0,
        **workload.settings,
    )
    began = time.monotonic()
    model = estimator.fit(df)
    wall = time.monotonic() - began
    lines = [[json.loads(line) for line in path.read_text().splitlines()] for path in parts.glob("*.parts")]
    if len(lines) != WORKERS:
        raise RuntimeError(f"{len(lines)} of {WORKERS} workers have told their times")
    return {
        "wall": wall,
        **model.fit_seconds,
        "epochs": list(model.history["seconds"])[1:],
        **{
            part: statistics.mean(line[part] for worker in lines for line in worker[1:])
            for part in ("reading", "collating", "processor")
        },
    }


# --- by hand --------------------------------------------------------------------------------------


def train_by_hand(name: str, rows: str, rank: int, size: int, out: str) -> None:
    """Train on tensors in memory, by `DistributedDataParallel` if there are several ranks; write the epochs' times."""
    import pyarrow.parquet as pq
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    workload = WORKLOADS[name]
    found = pq.read_table(rows)
    *inputs, labels = workload.tensors(found)
    del found
    net: Any = workload.seeded_net()
    if size > 1:
        net = torch.nn.parallel.DistributedDataParallel(net)
    loss_function = workload.loss_function()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    part = workload.batch // WORKERS
    count = len(labels) if size > 1 else len(labels) // WORKERS  # alone: as many steps of as many rows
    seconds = []
    for epoch in range(workload.epochs):
        if size > 1:
            dist.barrier()
        began, used = time.monotonic(), time.process_time()
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))[:count]
        for start in range(0, count, part * size):
            mine = order[start : start + part * size].chunk(size)[rank]
            batch = [each.index_select(0, mine) for each in inputs]
            optimizer.zero_grad()
            loss_function(net(*batch), labels.index_select(0, mine)).backward()
            optimizer.step()
        seconds.append((time.monotonic() - began, time.process_time() - used))
    Path(out, f"{rank}.json").write_text(json.dumps(seconds))


def ranked(name: str, rows: str, out: str) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    train_by_hand(name, rows, dist.get_rank(), dist.get_world_size(), out)
    dist.destroy_process_group()


def epochs_in(folder: Path, count: int) -> tuple[list[float], float]:
    """Return the seconds of each epoch after the first, of the slowest process, and the mean processor time."""
    found = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    if len(found) != count:
        raise RuntimeError(f"{len(found)} of {count} processes have ended their training")
    later = list(zip(*found, strict=True))[1:]
    processor = statistics.mean(used for epoch in later for _, used in epoch)
    return [max(wall for wall, _ in epoch) for epoch in later], processor


def by_distributor(name: str, rows: str, folder: str) -> tuple[list[float], float]:
    from pyspark.ml.torch.distributor import TorchDistributor

    out = Path(folder, "distributor")
    out.mkdir()
    distributor = TorchDistributor(num_processes=WORKERS, local_mode=True, use_gpu=False)
    distributor.run(str(Path(__file__).resolve()), "--ranked", name, rows, str(out))
    return epochs_in(out, WORKERS)


def alone(name: str, rows: str, folder: str, count: int) -> tuple[list[float], float]:
    """Train in `count` processes at a time that know nothing of one another."""
    out = Path(folder, f"alone-{count}")
    out.mkdir()
    command = [sys.executable, __file__, "--alone", name, rows, str(out)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [subprocess.Popen([*command, str(number)], env=env) for number in range(count)]
    codes = [process.wait() for process in processes]
    if any(codes):
        raise RuntimeError(f"processes have ended with {codes}")
    return epochs_in(out, count)


# --- all of it ------------------------------------------------------------------------------------


def measured(spark: Any, name: str, scale: float) -> tuple[list[Series], dict[str, Any]]:
    workload = WORKLOADS[name]
    rows = max(4 * workload.batch, int(workload.rows * scale) // workload.batch * workload.batch)
    folder = tempfile.mkdtemp(prefix="spark_elastic-workloads-")
    df = workload.make_rows(spark, rows).cache()
    try:
        df.count()
        began = time.monotonic()
        df.write.parquet(f"{folder}/rows")
        written = time.monotonic() - began
        ours = by_estimator(df, workload, folder)
        df.unpersist(blocking=True)
        theirs, used_by_hand = by_distributor(name, f"{folder}/rows", folder)
        (one, _), (two, used) = (alone(name, f"{folder}/rows", folder, count) for count in (1, WORKERS))
    finally:
        df.unpersist()
        shutil.rmtree(folder, ignore_errors=True)
    share = rows / WORKERS  # rows of a process in an epoch, in all ways
    mine, peer, single, pair = (statistics.median(each) for each in (ours["epochs"], theirs, one, two))
    rest = mine - pair - ours["reading"] - ours["collating"]
    series = [
        Series(f"{name}: estimator", [share / each for each in ours["epochs"]], "rows/s/core"),
        Series(f"{name}: DDP by hand", [share / each for each in theirs], "rows/s/core"),
        Series(f"{name}: in memory, one process", [share / each for each in one], "rows/s/core"),
        Series(f"{name}: in memory, two at a time", [share / each for each in two], "rows/s/core"),
        Series(f"{name}: estimator / one process", [single / mine], "ratio"),
        Series(f"{name}: estimator / two at a time", [pair / mine], "ratio"),
        Series(f"{name}: two at a time / one process", [single / pair], "ratio"),
        Series(f"{name}: DDP by hand / one process", [single / peer], "ratio"),
        Series(f"{name}: estimator / DDP by hand", [peer / mine], "ratio"),
        Series(f"{name}: estimator, processor", [1e6 * ours["processor"] / share], "µs/row"),
        Series(f"{name}: DDP by hand, processor", [1e6 * used_by_hand / share], "µs/row"),
        Series(f"{name}: in memory, two at a time, processor", [1e6 * used / share], "µs/row"),
        Series(f"{name}: lost in reading", [100 * ours["reading"] / mine], "%"),
        Series(f"{name}: lost in collating", [100 * ours["collating"] / mine], "%"),
        Series(f"{name}: lost in reduction and the rest of a step", [100 * rest / mine], "%"),
        Series(f"{name}: fit writes the rows", [rows / ours["write"]], "rows/s"),
        Series(f"{name}: Spark writes Parquet", [rows / written], "rows/s"),
    ]
    raw = {"rows": rows, "estimator": ours, "DDP by hand": theirs, "one process": one, "two at a time": two}
    return series, raw


def main() -> None:
    arguments = parser(__doc__, repeat=1)
    arguments.add_argument("--only", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    arguments.add_argument("--scale", type=float, metavar="F", help="share of the rows (default: by workload)")
    arguments.add_argument("--ranked", nargs=3, help=argparse.SUPPRESS)
    arguments.add_argument("--alone", nargs=4, help=argparse.SUPPRESS)
    args = arguments.parse_args()
    if args.ranked:
        ranked(*args.ranked)
        return
    if args.alone:
        name, rows, out, number = args.alone
        train_by_hand(name, rows, 0, 1, out)
        Path(out, "0.json").rename(Path(out, f"process-{number}.json"))
        return
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    from pyspark.sql import SparkSession

    logging.getLogger("TorchDistributor").setLevel(logging.ERROR)
    builder = SparkSession.builder.master(f"local[{WORKERS}]").config("spark.driver.memory", "6g")
    spark = builder.config("spark.ui.enabled", "false").config("spark.ui.showConsoleProgress", "false").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    figures: dict[str, Series] = {}
    raw: dict[str, list[Any]] = {name: [] for name in args.only}
    try:
        for name in args.only * args.repeat:
            scale = args.scale or WORKLOADS[name].scale * (0.1 if args.quick else 1)
            found, of_run = measured(spark, name, scale)
            raw[name].append(of_run)
            for each in found:
                before = figures[each.name].values if each.name in figures else []
                figures[each.name] = replace(each, values=[*before, *each.values])
            print({each.name: round(statistics.median(each.values), 3) for each in found}, file=sys.stderr, flush=True)
    finally:
        spark.stop()
    report("workloads", args, *figures.values(), raw=raw)


if __name__ == "__main__":
    main()
