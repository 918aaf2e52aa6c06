"""Gradients in 16 bits: how the loss goes down beside float32, and what a step takes over a slow network.

The first part trains a small net on scikit-learn's handwritten digits, with four members on as many hosts and the same
seed for each compression. Reported for each: the loss of all training rows and the errors of held-out rows at the end,
over float32's; and the largest distance of its loss from float32's after any epoch. Differences between seeds are far
larger than those between compressions, so every seed is compared with itself.

The second part is the step time of a 784-3072-2048-512-10 MLP (9.8 M parameters) between two hosts whose links carry
`--mbit` a second, in blocks that take turns.

    python benchmarks/compression.py [--repeat 5] [--mbit 1000]

Hosts are network namespaces; needs the rights to make them.
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _fixed_world import join_fixed_world, run_in_fixed_world

import spark_elastic.torch as hvd
from benchmarks._harness import Series, parser, report

COMPRESSIONS = ("none", "fp16", "bf16")
MEMBERS = 4
EPOCHS = 30
BATCH = 64
HELD_OUT = 360
LARGE = (784, 3072, 2048, 512, 10)
STEPS = 3
"""Steps in a block."""


def net(sizes: tuple[int, ...], seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def optimizer_of(model: nn.Module, compression: str, lr: float) -> Any:
    inner = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return hvd.DistributedOptimizer(inner, compression=getattr(hvd.Compression, compression))


def digits(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    return torch.tensor(x, dtype=torch.float32)[order] / 16, torch.tensor(y)[order]


def trained(compression: str, seed: int) -> tuple[list[float], float]:
    """Return the loss after each epoch, and the share of held-out rows in per cent that are taken for another digit."""
    x, y = digits(seed)
    train_x, train_y = x[HELD_OUT:], y[HELD_OUT:]
    model = net((64, 256, 128, 10), seed)
    optimizer = optimizer_of(model, compression, lr=0.05)
    each = BATCH // hvd.size()
    losses = []
    for epoch in range(EPOCHS):
        order = torch.randperm(len(train_x), generator=torch.Generator().manual_seed(1000 * seed + epoch))
        for batch in order.split(BATCH)[: len(order) // BATCH]:
            mine = batch[hvd.rank() * each : (hvd.rank() + 1) * each]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(train_x[mine]), train_y[mine]).backward()
            optimizer.step()
        with torch.no_grad():
            losses.append(float(nn.functional.cross_entropy(model(train_x), train_y)))
    with torch.no_grad():
        wrong = model(x[:HELD_OUT]).argmax(1) != y[:HELD_OUT]
    return losses, 100 * float(wrong.double().mean())


def loss_curves(args: argparse.Namespace) -> None:
    curves = {name: [trained(name, seed) for seed in range(args.repeat)] for name in COMPRESSIONS}
    if hvd.rank():
        return
    series = []
    for name in COMPRESSIONS:
        pairs = list(zip(curves[name], curves["none"], strict=True))
        if name == "none":
            series.append(Series("none: loss at the end", [losses[-1] for losses, _ in curves[name]], "nats"))
            series.append(Series("none: wrong of held-out rows", [wrong for _, wrong in curves[name]], "%"))
            continue
        ratios = [mine[-1] / other[-1] for (mine, _), (other, _) in pairs]
        apart = [max(abs(a - b) for a, b in zip(mine, other, strict=True)) for (mine, _), (other, _) in pairs]
        series.append(Series(f"{name}: loss at the end, of float32's", ratios, "x"))
        series.append(Series(f"{name}: largest distance of the losses", apart, "nats"))
        series.append(Series(f"{name}: wrong, less float32's", [a - b for (_, a), (_, b) in pairs], "points"))
    raw = {name: [losses for losses, _ in each] for name, each in curves.items()}
    del args.part, args.worker
    report("compression_loss", args, *series, raw={"losses": raw})


def step_times(args: argparse.Namespace) -> None:
    x, y = torch.randn(BATCH, LARGE[0]), torch.randint(0, 10, (BATCH,))
    runs = {}
    for name in COMPRESSIONS:
        model = net(LARGE, 0)
        runs[name] = model, optimizer_of(model, name, lr=0.01)
    times: dict[str, list[float]] = {name: [] for name in COMPRESSIONS}
    for block in range(1 + 2 * args.repeat):
        for name in COMPRESSIONS if block % 2 else reversed(COMPRESSIONS):
            model, optimizer = runs[name]
            hvd.barrier()
            start = time.perf_counter()
            for _ in range(STEPS):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
            if block:
                times[name].append((time.perf_counter() - start) / STEPS * 1e3)
    if hvd.rank() == 0:
        plain = times["none"]
        series = [Series(f"{name}: step", each, "ms") for name, each in times.items()]
        series += [
            Series(f"{name}: of float32's", [a / b for a, b in zip(each, plain, strict=True)], "x")
            for name, each in times.items()
            if name != "none"
        ]
        del args.part, args.worker
        report("compression_time", args, *series)


def main() -> None:
    arguments = parser(__doc__, repeat=5)
    arguments.add_argument("--mbit", type=int, default=1000, help="bandwidth of the second part's links (%(default)s)")
    arguments.add_argument("--part", choices=["loss", "time"], help=argparse.SUPPRESS)
    arguments.add_argument("--worker", nargs=4, metavar=("RANK", "MASTER", "PORT", "ADDRESSES"), help=argparse.SUPPRESS)
    args = arguments.parse_args()
    if args.quick:
        args.repeat = 1
    if args.worker:
        torch.set_num_threads(1)
        join_fixed_world(args.worker)
        hvd.init()
        (loss_curves if args.part == "loss" else step_times)(args)
        hvd.barrier()
        hvd.shutdown()
        return
    given = list(sys.argv)
    for part, members, mbit in (("loss", MEMBERS, None), ("time", 2, args.mbit)):
        sys.argv = [*given, "--part", part]
        if code := run_in_fixed_world(members, members, mbit):
            sys.exit(code)


if __name__ == "__main__":
    main()
