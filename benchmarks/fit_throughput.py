"""Training rows a second: the estimator's loop over a materialised set, against a hand-written loop over tensors.

The peer is what one would write by hand: `DistributedDataParallel` over Gloo, all rows as tensors in memory, a random
permutation every epoch, `index_select` for each batch. Same model (784-512-512-10), optimizer, batch, and the same
processes: epochs of the one and of the other take turns, so that whatever else the machine does hits both alike.
Reported are rows a second of all workers, the ratios within each turn, and the seconds of processor that a row takes in
all threads of all workers: they tell what the loop itself costs on a machine that has other things to do.

    python benchmarks/fit_throughput.py
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _harness import Series, parser, report

import spark_elastic
from spark_elastic.data.dataset import Dataset, pack
from spark_elastic.data.store import Store
from spark_elastic.ml.callbacks import Callback

FEATURES, HIDDEN, CLASSES = 784, 512, 10
BY_HAND = "by hand"
WAYS: dict[str, dict[str, Any]] = {
    "prefetch": {},
    "prefetch, accuracy": {"metrics": True},
    "no prefetch": {"prefetch": 0},
}
Times = tuple[float, float]
"""Seconds by the clock, and of processor."""


def now() -> Times:
    return time.monotonic(), time.process_time()


def since(start: Times) -> Times:
    end = now()
    return end[0] - start[0], end[1] - start[1]


def net() -> Any:
    import torch

    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(FEATURES, HIDDEN),
        torch.nn.ReLU(),
        torch.nn.Linear(HIDDEN, HIDDEN),
        torch.nn.ReLU(),
        torch.nn.Linear(HIDDEN, CLASSES),
    )


def accuracy(output: Any, label: Any) -> Any:
    return (output.argmax(1) == label).float().mean()


class Stopwatch(Callback):
    """What each epoch took in this worker."""

    def __init__(self) -> None:
        self.epochs: list[Times] = []

    def on_epoch_begin(self, run: Any) -> None:
        self._start = now()

    def on_epoch_end(self, run: Any, logs: Any) -> None:
        self.epochs.append(since(self._start))


class ByHand:
    """The peer."""

    def __init__(self, dataset: Dataset, rendezvous: str, batch: int) -> None:
        import torch
        import torch.distributed as dist

        import spark_elastic.torch as hvd

        self.rank, self.size, self.batch = hvd.rank(), hvd.size(), batch
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=self.rank, world_size=self.size)
        rows = next(iter(dataset.reader("train", batch_size=dataset.rows("train"), shuffle=False, prefetch=0).epoch(0)))
        self.features = torch.from_numpy(np.ascontiguousarray(rows["features_0"]))
        self.labels = torch.from_numpy(np.ascontiguousarray(rows["label_0"]))
        self.model = torch.nn.parallel.DistributedDataParallel(net())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.loss = torch.nn.CrossEntropyLoss()

    def epoch(self, number: int) -> Times:
        import torch

        start = now()
        order = torch.randperm(len(self.labels), generator=torch.Generator().manual_seed(number))
        for at in range(0, len(self.labels), self.batch):
            mine = order[at : at + self.batch].chunk(self.size)[self.rank]
            x, y = self.features.index_select(0, mine), self.labels.index_select(0, mine)
            self.optimizer.zero_grad()
            self.loss(self.model(x), y).backward()
            self.optimizer.step()
        return since(start)


def turns(dataset: Dataset, folder: str, batch: int, repeat: int) -> dict[str, list[Times]]:
    """In each worker: an epoch by hand, then one of each of our ways, and again."""
    import torch
    import torch.distributed as dist

    import spark_elastic.torch as hvd
    from spark_elastic.ml.torch.spec import TorchTraining
    from spark_elastic.ml.torch.training import train

    hvd.init()
    torch.set_num_threads(max(1, torch.get_num_threads() // hvd.local_size()))
    by_hand = ByHand(dataset, f"{folder}/rendezvous", batch)
    by_hand.epoch(-1)
    measured: dict[str, list[Times]] = {BY_HAND: [], **{way: [] for way in WAYS}}
    for number in range(repeat):
        dist.barrier()
        measured[BY_HAND].append(by_hand.epoch(number))
        for way, options in WAYS.items():
            model, stopwatch = net(), Stopwatch()
            training = TorchTraining(
                dataset=dataset,
                store=Store.create(f"{folder}/run"),
                model=model,
                optimizer=torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
                loss=torch.nn.CrossEntropyLoss(),
                batch_size=batch,
                epochs=2,  # the first makes buffers and files
                callbacks=[stopwatch],
                num_threads=torch.get_num_threads(),
                verbose=0,
            )
            more = {**options, "metrics": {"accuracy": accuracy}} if options.get("metrics") else options
            train(replace(training, **more))
            measured[way].append(stopwatch.epochs[-1])
    dist.destroy_process_group()
    return measured


def main() -> None:
    options = parser(__doc__, repeat=10)
    options.add_argument("--rows", type=int, default=20_480)
    options.add_argument("--batch", type=int, default=1024, help="rows of a global batch (%(default)s)")
    options.add_argument("--workers", type=int, default=2)
    args = options.parse_args()
    if args.quick:
        args.repeat, args.rows = 2, 8192
    with tempfile.TemporaryDirectory() as folder:
        generator = np.random.default_rng(0)
        features = generator.standard_normal((args.rows, FEATURES), dtype=np.float32)
        labels = generator.integers(0, CLASSES, args.rows)
        dataset = pack({"features_0": features, "label_0": labels}, Path(folder, "set"))
        del features
        workers = spark_elastic.run(
            turns,
            (dataset, folder, args.batch, args.repeat),
            num_proc=args.workers,
            launcher=spark_elastic.LocalLauncher(),
            verbose=0,
        )
    rates: dict[str, list[float]] = {}
    used: dict[str, list[float]] = {}
    for way in workers[0]:
        by_turn = list(zip(*(worker[way] for worker in workers), strict=True))
        rates[way] = [args.rows / max(wall for wall, _ in turn) for turn in by_turn]
        used[way] = [sum(processor for _, processor in turn) / args.rows * 1e6 for turn in by_turn]
    series = [Series(way, values, "rows/s") for way, values in rates.items()]
    series += [Series(f"{way}, processor", values, "µs/row") for way, values in used.items()]
    for way in WAYS:
        ratios = [ours / theirs for ours, theirs in zip(rates[way], rates[BY_HAND], strict=True)]
        series.append(Series(f"{way} / by hand", ratios, "ratio"))
        spent = [ours / theirs for ours, theirs in zip(used[way], used[BY_HAND], strict=True)]
        series.append(Series(f"{way} / by hand, processor", spent, "ratio"))
    report(f"fit_throughput_{args.batch}", args, *series, raw=json.loads(json.dumps(workers)))


if __name__ == "__main__":
    main()
