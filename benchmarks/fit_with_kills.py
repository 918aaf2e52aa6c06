"""`fit` of an estimator while three executors are killed, beside the same fit undisturbed in the same session.

    python benchmarks/fit_with_kills.py

Two executors of one core each, standalone. `kill -9` of an executor's JVM, then of another once both train again, three
times. The undisturbed fit says what the work is, in slot-seconds: its training time times two. The disturbed one should
take no more than that work over the slots that it had on average, and a second for each kill. Slots are counted in two
ways: executors that are registered with the driver (a new one is, before its worker has imported PyTorch), and workers
that take steps.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import _peer_training
import cloudpickle
import fit as _fit
from _harness import Series, parser, report
from _peer_training import StepFile
from fit import COLUMNS, make_net, table

from tests.integration import clusters
from tests.integration.processes import wait_until

cloudpickle.register_pickle_by_value(_peer_training)  # executors do not have this folder
cloudpickle.register_pickle_by_value(_fit)

KILLS = 3
UNDISTURBED_S = 3.0
"""Between a world of full strength and the next kill."""


class TimedLoss:
    """Cross entropy that writes down when it was called: once a step in each worker."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._file: StepFile | None = None

    def __call__(self, output: Any, label: Any) -> Any:
        import torch

        if self._file is None:
            self._file = StepFile(self._folder)
        self._file.write(0, 0, 0)
        return torch.nn.functional.cross_entropy(output, label)


def start_fit(df: Any, folder: str, epochs: int) -> tuple[threading.Thread, list[Any]]:
    import torch

    from spark_elastic import ElasticTorchEstimator

    net = make_net()
    estimator = ElasticTorchEstimator(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=1e-3),
        loss=TimedLoss(folder),
        feature_cols=COLUMNS,
        label_cols=["label"],
        batch_size=1024,
        epochs=epochs,
        num_proc=2,
        min_num_proc=1,
        verbose=0,
    )
    done: list[Any] = []
    thread = threading.Thread(target=lambda: done.append(estimator.fit(df)))
    thread.start()
    return thread, done


def times(folder: str) -> dict[int, list[float]]:
    """When each worker took its steps, by pid."""
    found = {}
    for path in Path(folder).glob("*.steps"):
        text = path.read_text()
        lines = text[: text.rfind("\n") + 1].splitlines()
        found[int(path.stem)] = [float(line.split()[3]) for line in lines]
    return {pid: at for pid, at in found.items() if at}


class Slots:
    """How many executors are registered, sampled while a fit runs."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self._stop = threading.Event()
        self.samples: list[tuple[float, int]] = []
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        context = self._cluster.sc._jsc.sc()
        while not self._stop.wait(0.05):
            self.samples.append((time.monotonic(), context.getExecutorIds().size()))

    def average(self, start: float, end: float) -> float:
        self._stop.set()
        self._thread.join()
        return statistics.mean(size for at, size in self.samples if start <= at <= end)


def training_workers(folder: str, start: float, end: float) -> float:
    """Workers that take steps, on average: each counts from its first step to its last."""
    return sum(min(at[-1], end) - max(at[0], start) for at in times(folder).values()) / (end - start)


def training(cluster: Any, df: Any, epochs: int, kills: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        slots = Slots(cluster)
        began = time.monotonic()
        thread, done = start_fit(df, folder, epochs)
        killed = []
        for _ in range(kills):
            both = lambda: len([at for at in times(folder).values() if time.monotonic() - at[-1] < 0.5]) == 2  # noqa: E731
            wait_until(both, 120.0, "two workers that train")
            time.sleep(UNDISTURBED_S)
            assert thread.is_alive(), "the training was over before the kills were: take more --epochs"
            executors = cluster.executors()
            victim = sorted(executors, key=int)[0]  # the oldest: each is killed once
            killed.append(time.monotonic())
            os.kill(executors[victim], 9)
        thread.join()
        wall = time.monotonic() - began
        (model,) = done
        steps = times(folder)
        start, end = min(at[0] for at in steps.values()), max(at[-1] for at in steps.values())
        assert not killed or killed[-1] < end
        return {
            "wall_s": wall,
            "training_s": end - start,
            "slots": slots.average(start, end),
            "workers": training_workers(folder, start, end),
            "killed_at_s": [at - start for at in killed],
            "steps_lost": sum(event["steps_lost"] or 0 for event in model.events),
            "loss": model.history["loss"][-1],
        }


def seconds_a_kill(disturbed: Sequence[dict[str, Any]], work: float, count: str) -> list[float]:
    return [(one["training_s"] - work / one[count]) / KILLS for one in disturbed]


def main() -> None:
    arguments = parser(__doc__, repeat=2)
    arguments.add_argument("--rows", type=int, default=200_000)
    arguments.add_argument("--epochs", type=int, default=40)
    args = arguments.parse_args()
    repeat = 1 if args.quick else args.repeat
    plain, disturbed = [], []
    with clusters.standalone(workers=2, cores=1) as cluster:
        df = table(cluster.spark, args.rows, seed=1)
        for _ in range(repeat):
            plain.append(training(cluster, df, args.epochs, 0))
            disturbed.append(training(cluster, df, args.epochs, KILLS))
            print(plain[-1], disturbed[-1], sep="\n", file=sys.stderr)
            cluster.wait_for_executors(2)
    work = statistics.median(2 * one["training_s"] for one in plain)
    report(
        "fit_with_kills",
        args,
        Series("training, undisturbed", [one["training_s"] for one in plain], "s"),
        Series("training, three executors killed", [one["training_s"] for one in disturbed], "s"),
        Series("executors on average", [one["slots"] for one in disturbed], ""),
        Series("workers that train on average", [one["workers"] for one in disturbed], ""),
        Series("a kill costs, beyond its slot", seconds_a_kill(disturbed, work, "slots"), "s", target_max=1.0),
        Series("the same, while a worker starts too", seconds_a_kill(disturbed, work, "workers"), "s", target_max=1.0),
        Series("fit, undisturbed", [one["wall_s"] for one in plain], "s"),
        Series("fit, three executors killed", [one["wall_s"] for one in disturbed], "s"),
        Series("steps lost", [float(one["steps_lost"]) for one in disturbed], "steps", target_max=0.0),
        raw={"undisturbed": plain, "disturbed": disturbed},
    )


if __name__ == "__main__":
    main()
