"""Workers of unequal speed: the throughput of a fit with shares by speed, and with equal ones, in turns.

    python benchmarks/uneven.py [--repeat 3] [--schedules "one slow" noise] [--workers 4] [--row-ms 1.5]

Each worker sleeps in its forward pass, for each row as long as a schedule says at that step, so a few cores are enough.
Throughput is given as a share of that with all workers at full speed, in the first steps of the same fit: from 20 steps
after a change of the speeds to the next one. Prints a table and writes benchmarks/results/uneven.json.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _harness import Series, parser, report

from spark_elastic.data.dataset import Dataset, pack
from spark_elastic.data.store import Store
from spark_elastic.ml.callbacks import Callback
from spark_elastic.ml.torch.spec import TorchTraining
from spark_elastic.ml.torch.train import train
from tests.unit.world_link import tell
from tests.unit.worlds import WorldDriver

ROWS_EACH = 32  # of an equal share
SETTLED = 20
"""The steps within which shares have to follow a change of the speeds."""
SLOW, FAST, END = 80, 160, 240
"""The steps at which workers become slow and fast again, and the last one."""


def one_slow(step: int, rank: int, size: int) -> float:
    return 2.0 if rank == size - 1 and SLOW <= step < FAST else 1.0


def noise(step: int, rank: int, size: int) -> float:
    return random.Random(f"{step} {rank}").uniform(0.8, 1.2)


def slow_host(step: int, rank: int, size: int) -> float:
    return 1.5 if rank >= size // 2 and SLOW <= step < FAST else 1.0


def slow_minute(step: int, rank: int, size: int) -> float:
    """Return the slowness of each worker in turn: for 40 steps each, after full speed."""
    return 2.0 if step >= SLOW and rank == step // 40 % size else 1.0


SCHEDULES: dict[str, Callable[[int, int, int], float]] = {
    "one slow": one_slow,
    "noise": noise,
    "slow host": slow_host,
    "slow minute": slow_minute,
}
"""Functions of step, rank and number of ranks that return how many times as long as usual a row takes."""


class Sleeping(torch.nn.Module):
    """A small model that sleeps by its rows in training."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
        self.row_s = 0.0

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        if self.training:
            time.sleep(self.row_s * len(features))
        return self.layers(features)


class Scheduled(Callback):
    """Sets the speed of each step, and notes when it ends."""

    def __init__(self, schedule: str, row_s: float) -> None:
        self._speed, self._row_s = SCHEDULES[schedule], row_s
        self.ends: list[float] = []

    def on_batch_begin(self, run: Any) -> None:
        run.model.row_s = self._row_s * self._speed(run.step, run.rank, run.size)

    def on_batch_end(self, run: Any) -> None:
        self.ends.append(time.perf_counter())
        if run.step == END:
            run.stop("all steps are measured")
        tell("step", run.step)


def fit(folder: Path, schedule: str, balance: str, workers: int, row_s: float) -> list[float]:
    """Train in a worker; return the seconds of each step."""
    torch.manual_seed(0)
    model, scheduled = Sleeping(), Scheduled(schedule, row_s)
    train(
        TorchTraining(
            dataset=Dataset.open(folder / "set"),
            store=Store.create(folder / f"{schedule}-{balance}"),
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
            loss=torch.nn.CrossEntropyLoss(),
            batch_size=ROWS_EACH * workers,
            callbacks=[scheduled],
            balance=balance,
            num_threads=1,
            verbose=0,
        )
    )
    return np.diff(scheduled.ends).tolist()


def throughput(steps: list[float], first: int, last: int) -> float:
    """Return the speed of steps `first` to `last` as a percentage of that before the first change."""
    return 100 * statistics.median(steps[SETTLED:SLOW]) / statistics.median(steps[first:last])


def main() -> None:
    arguments = parser(__doc__, repeat=3)
    arguments.add_argument("--schedules", nargs="+", choices=list(SCHEDULES), default=list(SCHEDULES))
    arguments.add_argument("--workers", type=int, default=4)
    arguments.add_argument("--row-ms", type=float, default=1.5, help="time of a row at full speed (%(default)s)")
    args = arguments.parse_args()
    measured: dict[str, dict[str, list[list[float]]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder, generator = Path(name), np.random.default_rng(1)
        rows = (END + 1) * ROWS_EACH * args.workers
        features = generator.normal(size=(rows, 16)).astype(np.float32)
        pack({"features_0": features, "label_0": generator.integers(0, 4, rows)}, folder / "set", shards=4)
        for _ in range(1 if args.quick else args.repeat):
            for schedule in args.schedules:
                for balance in ("equal", "auto"):
                    with WorldDriver(start_with=args.workers) as driver:
                        call = (folder, schedule, balance, args.workers, args.row_ms / 1e3)
                        driver.start(fit, *call, count=args.workers)
                        steps = driver.results(args.workers)[0]
                    measured.setdefault(schedule, {}).setdefault(balance, []).append(steps)
    series = []
    for schedule, by_balance in measured.items():
        for balance, runs in by_balance.items():
            title = f"{schedule}, {balance}: "
            if schedule == "noise":
                usual = [1e3 * statistics.median(steps[SETTLED:]) for steps in runs]
                series.append(Series(title + "median step", usual, "ms"))
                continue
            slow = [throughput(steps, SLOW + SETTLED, FAST) for steps in runs]
            series.append(Series(title + "throughput while slow", slow, "%"))
            if schedule != "slow minute":
                back = [throughput(steps, FAST + SETTLED, END) for steps in runs]
                series.append(Series(title + "throughput afterwards", back, "%"))
    report("uneven", args, *series)


if __name__ == "__main__":
    main()
