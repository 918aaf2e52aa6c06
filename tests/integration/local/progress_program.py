"""Trains on this machine, without Spark, and shows it: run by test_progress.py under a terminal, or without one."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import nn

from spark_elastic import ElasticTorchEstimator, LocalLauncher
from spark_elastic.data.dataset import Dataset
from spark_elastic.data.manifest import MANIFEST_NAME, Layout, Manifest, Shard, TensorField
from spark_elastic.data.store import Store
from spark_elastic.ml.callbacks import Callback

ROWS = 1200
FIELDS = [TensorField("features_0", ("f",), "<f4", (3,)), TensorField("label_0", ("l",), "<i8", ())]


class Slow(Callback):
    """So slow that somebody could read along. dies: the file whose absence lets rank 1 die in the second epoch."""

    def __init__(self, step_s: float, dies: str = "", talks: bool = False) -> None:
        self._step_s, self._dies, self._talks = step_s, dies, talks

    def on_batch_end(self, run) -> None:
        time.sleep(self._step_s)
        if self._talks and run.step % 20 == 0:
            print(f"worker says {run.step}", flush=True)
        if self._dies and run.rank == 1 and run.epoch == 1 and not Path(self._dies).exists():
            Path(self._dies).touch()
            os.kill(os.getpid(), signal.SIGKILL)


def written(folder: str):
    """Labels 0 and 1."""
    layout = Layout.of(FIELDS)
    store = Store.create(folder)
    records = np.zeros(ROWS, layout.dtype)
    records["features_0"] = np.random.default_rng(0).normal(size=(ROWS, 3))
    records["label_0"] = records["features_0"].sum(axis=1) > 0
    data = records.tobytes()
    store.write_bytes("0.rows", data)
    manifest = Manifest(layout, {"train": (Shard("0.rows", ROWS, len(data), zlib.crc32(data)),)})
    store.write_bytes(MANIFEST_NAME, manifest.dumps())
    return Dataset(store, manifest)


def fit(dataset, folder: str, callback: Callback, epochs: int, verbose: int = 1, workers: int = 2):
    torch.manual_seed(0)
    return ElasticTorchEstimator(
        model=nn.Linear(3, 2),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        loss=nn.CrossEntropyLoss(),
        metrics={"accuracy": lambda output, label: (output.argmax(dim=1) == label).float()},
        batch_size=20,
        epochs=epochs,
        num_proc=workers,
        min_num_proc=1,
        store=folder,
        verbose=verbose,
        callbacks=[callback],
        run_options={"launcher": LocalLauncher(), "cooldown_range": (30.0, 60.0), "start_timeout": 120.0},
    ).from_dataset_path(dataset)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        dataset = written(f"{folder}/set")
        for part in sys.argv[1:]:
            if part == "quiet":
                fit(dataset, folder, Slow(0.0), epochs=1, verbose=0, workers=1)
            elif part == "kill":
                fit(dataset, folder, Slow(0.02, dies=f"{folder}/died", talks=True), epochs=3)
            elif part == "two":
                threads = [
                    threading.Thread(target=fit, args=(dataset, folder, Slow(0.02, talks=True), 2)) for _ in range(2)
                ]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            print(f"=== end of {part}", flush=True)


if __name__ == "__main__":
    main()
