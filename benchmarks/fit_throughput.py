"""Training rows a second: the estimator's loop over a materialised set, against a hand-written loop over tensors.

The peer is what one would write by hand: `DistributedDataParallel` over Gloo, all rows as tensors in memory, a random
permutation every epoch, `index_select` for each batch. Same model (784-512-512-10), optimizer, batch and processes.
Both are run in turn, several times; a run's figure is its best epoch but the first, in rows a second of all workers.

    python -m benchmarks.fit_throughput
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import spark_elastic
from benchmarks._harness import Series, parser, report

FEATURES, HIDDEN, CLASSES = 784, 512, 10


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


def by_hand(folder: str, rendezvous: str, workers: int, batch: int, epochs: int) -> list[float]:
    """The peer's loop; returns the seconds of each epoch."""
    import torch
    import torch.distributed as dist

    import spark_elastic.torch as hvd

    hvd.init()  # only to learn the rank
    rank = hvd.rank()
    torch.set_num_threads(max(1, torch.get_num_threads() // workers))
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=workers)
    features = torch.from_numpy(np.load(Path(folder, "features.npy")))
    labels = torch.from_numpy(np.load(Path(folder, "labels.npy")))
    model = torch.nn.parallel.DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loss_fn = torch.nn.CrossEntropyLoss()
    seconds = []
    for epoch in range(epochs):
        dist.barrier()
        start = time.monotonic()
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
        for at in range(0, len(labels), batch):
            mine = order[at : at + batch].chunk(workers)[rank]
            x, y = features.index_select(0, mine), labels.index_select(0, mine)
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()
        seconds.append(time.monotonic() - start)
    dist.barrier()
    dist.destroy_process_group()
    return seconds


def accuracy(output: Any, label: Any) -> Any:
    return (output.argmax(1) == label).float().mean()


def fit(dataset: Any, store: Any, batch: int, epochs: int, prefetch: int, metrics: bool, workers: int) -> list[float]:
    """Ours; returns the seconds of each epoch."""
    import torch

    from spark_elastic.ml.torch.spec import TorchTraining
    from spark_elastic.ml.torch.training import train

    model = net()
    training = TorchTraining(
        dataset=dataset,
        store=store,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        loss=torch.nn.CrossEntropyLoss(),
        metrics={"accuracy": accuracy} if metrics else {},
        batch_size=batch,
        epochs=epochs,
        prefetch=prefetch,
        verbose=0,
    )
    results = spark_elastic.run(train, (training,), num_proc=workers, launcher=spark_elastic.LocalLauncher(), verbose=0)
    return list(results[0].history["seconds"])


def main() -> None:
    arguments = parser(__doc__, repeat=4)
    arguments.add_argument("--rows", type=int, default=60_000)
    arguments.add_argument("--batch", type=int, default=1024, help="rows of a global batch (%(default)s)")
    arguments.add_argument("--epochs", type=int, default=3)
    arguments.add_argument("--workers", type=int, default=2)
    args = arguments.parse_args()
    if args.quick:
        args.repeat, args.rows, args.epochs = 1, 8192, 2
    from spark_elastic.data.pack import pack
    from spark_elastic.data.store import Store

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        generator = np.random.default_rng(0)
        features = generator.standard_normal((args.rows, FEATURES), dtype=np.float32)
        labels = generator.integers(0, CLASSES, args.rows)
        np.save(folder / "features.npy", features)
        np.save(folder / "labels.npy", labels)
        dataset = pack({"features_0": features, "label_0": labels}, folder / "set")
        del features
        ways = {"prefetch 3": (3, False), "prefetch 3, accuracy": (3, True), "no prefetch": (0, False)}
        rates: dict[str, list[float]] = {"by hand": [], **{way: [] for way in ways}}
        for number in range(args.repeat):
            seconds = spark_elastic.run(
                by_hand,
                (name, str(folder / f"rendezvous-{number}"), args.workers, args.batch, args.epochs),
                num_proc=args.workers,
                launcher=spark_elastic.LocalLauncher(),
                verbose=0,
            )[0]
            rates["by hand"].append(args.rows / min(seconds[1:]))
            for way, (prefetch, metrics) in ways.items():
                store = Store.create(folder / f"run-{number}-{prefetch}-{metrics}")
                seconds = fit(dataset, store, args.batch, args.epochs, prefetch, metrics, args.workers)
                rates[way].append(args.rows / min(seconds[1:]))
    ratios = {way: [a / b for a, b in zip(rates[way], rates["by hand"], strict=True)] for way in ways}
    series = [Series(way, values, "rows/s") for way, values in rates.items()]
    series += [Series(f"ratio, {way}", values, "to by hand") for way, values in ratios.items()]
    report(f"fit_throughput_{args.batch}", args, *series, raw=rates)
    print({way: round(statistics.median(values), 3) for way, values in ratios.items()})


if __name__ == "__main__":
    main()
