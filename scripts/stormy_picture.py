"""Makes docs/images/stormy_run.png: a real training whose workers are killed again and again, and drawn.

Four workers in Spark's local mode learn to read handwritten digits. Every few seconds this program kills one of them
with SIGKILL, once two at a time; each place starts a new worker, which joins as soon as it is ready. README says how
many were lost and how many have joined: mend that when a new picture says otherwise (`tests/unit/test_pages.py`).

    python scripts/stormy_picture.py [docs/images/stormy_run.png]
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from pyspark.sql import SparkSession
from torch import nn

from spark_elastic import ElasticTorchEstimator
from spark_elastic.ml.callbacks import Callback

WORKERS, EPOCHS, BATCH = 4, 24, 64
STEP_S = 0.06
"""Added to each step, for the weight of a larger model."""
KILLS = [(6.0, 1), (8.0, 2), (22.0, 1)]
"""Seconds since the last, and how many workers."""


class Steady(Callback):
    """Takes its time, and leaves word of where it runs."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def on_batch_end(self, run) -> None:
        word = Path(self._folder, str(os.getpid()))
        if not word.exists():
            word.touch()
        time.sleep(STEP_S)


def storm(folder: str, over: threading.Event) -> None:
    chance = random.Random(7)
    while not any(Path(folder).iterdir()):
        if over.wait(0.1):
            return
    for pause_s, count in KILLS:
        if over.wait(pause_s):
            return
        alive = [pid for pid in (int(path.name) for path in Path(folder).iterdir()) if Path(f"/proc/{pid}").exists()]
        for pid in chance.sample(sorted(alive), min(count, len(alive) - 1)):
            print(f">>> kill -9 {pid}")
            os.kill(pid, signal.SIGKILL)


def main() -> None:
    from sklearn.datasets import load_digits

    target = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images/stormy_run.png")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master(f"local[{WORKERS}]").appName("spark_elastic in a storm")
    spark = builder.config("spark.ui.enabled", "false").getOrCreate()
    images, labels = load_digits(return_X_y=True)
    rows = [([float(pixel) / 16 for pixel in image], int(label)) for image, label in zip(images, labels, strict=True)]
    digits = spark.createDataFrame(rows, ["image", "digit"])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))
    over = threading.Event()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "pids").mkdir()
        estimator = ElasticTorchEstimator(
            model=net,
            optimizer=torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
            loss=nn.CrossEntropyLoss(),
            metrics={"accuracy": lambda output, label: (output.argmax(dim=1) == label).float()},
            feature_cols=["image"],
            label_cols=["digit"],
            validation=0.2,
            batch_size=BATCH,
            epochs=EPOCHS,
            num_proc=WORKERS,
            min_num_proc=1,
            callbacks=[Steady(f"{folder}/pids")],
        )
        killer = threading.Thread(target=storm, args=(f"{folder}/pids", over))
        killer.start()
        try:
            model = estimator.fit(digits)
        finally:
            over.set()
            killer.join()
    for event in model.events:
        print(f"{event['seconds']:6.1f} s  {event['text']}")
    target.parent.mkdir(parents=True, exist_ok=True)
    model.plot(target)
    print(f"{target}: {target.stat().st_size / 1000:.0f} kB")
    spark.stop()


if __name__ == "__main__":
    main()
