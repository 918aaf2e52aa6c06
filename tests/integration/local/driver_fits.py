"""Fits on the local launcher for tests of callbacks on the driver: workers that can be killed, and what was called."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import torch
from torch import nn

from spark_elastic import DriverCallback, ElasticTorchEstimator, LocalLauncher
from spark_elastic.jobs.driver_callbacks import DriverResult, DriverRun
from spark_elastic.ml.callbacks import Callback
from tests.integration.processes import KEPT, is_running, wait_until
from tests.unit.ml.torch.estimators import make_net


class Pids(Callback):
    """Writes the pid of rank 0 to a file at the begin of each epoch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_epoch_begin(self, run: Any) -> None:
        if run.rank == 0:
            (self.folder / "new").write_text(str(os.getpid()))
            (self.folder / "new").replace(self.folder / "rank0")


class Watch(DriverCallback):
    """Keeps what it is called with, and cannot be pickled."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.runs: list[DriverRun] = []
        self.rows: list[Any] = []
        self.changes: list[Any] = []
        self.results: list[DriverResult] = []
        self.threads: set[str] = set()

    def on_fit_start(self, run: DriverRun) -> Any:
        self.runs.append(run)

    def on_epoch_end(self, row: Any) -> Any:
        self.threads.add(threading.current_thread().name)
        self.rows.append(row)

    def on_membership_change(self, change: Any) -> Any:
        self.changes.append(change)

    def on_fit_end(self, result: DriverResult) -> None:
        self.results.append(result)


class Killing(Watch):
    """Kills rank 0 while it waits for the decision about an epoch."""

    def __init__(self, folder: Path, epochs: tuple[int, ...], stop_at: int = -1) -> None:
        super().__init__()
        self.folder, self.epochs, self.stop_at = folder, epochs, stop_at

    def on_epoch_end(self, row: Any) -> Any:
        super().on_epoch_end(row)
        if row["epoch"] in self.epochs:
            pid = int((self.folder / "rank0").read_text())
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: not is_running(pid), 20, "death")
        return "enough" if row["epoch"] == self.stop_at else None


class At(DriverCallback):
    """Calls a function at the end of an epoch."""

    def __init__(self, epoch: int, call: Any) -> None:
        self.epoch, self.call = epoch, call

    def on_epoch_end(self, row: Any) -> None:
        if row["epoch"] == self.epoch:
            self.call()


def estimator(*callbacks: Any, **changes: Any) -> ElasticTorchEstimator:
    net = make_net()
    return ElasticTorchEstimator(
        loss=nn.CrossEntropyLoss(),
        batch_size=16,
        **{
            "model": net,
            "optimizer": torch.optim.SGD(net.parameters(), lr=0.1),
            "epochs": 4,
            "num_proc": 2,
            "min_num_proc": 1,
            "run_options": {"launcher": LocalLauncher(), "cooldown_range": (0.05, 1.0), **KEPT},
            "verbose": 0,
            "callbacks": [*callbacks],
            **changes,
        },
    )
