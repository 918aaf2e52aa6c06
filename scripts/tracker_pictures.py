"""Makes docs/images/mlflow_*.png and tensorboard_*.png: a training with killed workers, as the trackers show it.

Three workers, plain processes of this machine, learn to read handwritten digits. At the end of some epochs one of them
is killed with SIGKILL; its place starts a new one. A real MLflow server and a real TensorBoard show the result, and a
headless Chromium takes the pictures.

    python scripts/tracker_pictures.py [docs/images]
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn

from spark_elastic import DriverCallback, ElasticTorchEstimator, LocalLauncher, MLflowCallback, TensorBoardCallback
from spark_elastic.data.dataset import pack
from spark_elastic.ml.callbacks import Callback

WORKERS, EPOCHS, STEP_S = 3, 24, 0.05
KILLS_AT = (4, 11, 17)
"""Epochs."""


class Steady(Callback):
    """Takes its time, and leaves word of where it runs."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def on_batch_end(self, run: Any) -> None:
        Path(self._folder, str(os.getpid())).touch()
        time.sleep(STEP_S)


class Storm(DriverCallback):
    """Kills a worker at the end of some epochs."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._chance = random.Random(7)

    def on_epoch_end(self, row: Any) -> None:
        alive = [int(path.name) for path in Path(self._folder).iterdir() if Path("/proc", path.name).exists()]
        if row["epoch"] in KILLS_AT and len(alive) > 1:
            os.kill(self._chance.choice(sorted(alive)), signal.SIGKILL)


@contextlib.contextmanager
def serving(folder: Path, *command: str) -> Iterator[str]:
    """Run a web server with `--port`; yields its address once it answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with (folder / "server.log").open("ab") as log:
        command = (sys.executable, "-m", *command, "--host", "127.0.0.1", "--port", str(port))
        server = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, start_new_session=True)
    try:
        for _ in range(600):
            time.sleep(0.2)
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5):
                break
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(20)


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Any]:
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    quiet = ("background-networking", "component-update", "sync", "gpu", "quic")
    for flag in ("--headless", "--no-sandbox", "--no-first-run", *(f"--disable-{name}" for name in quiet)):
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={folder}/browser")
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService("/usr/bin/chromedriver"))
    try:
        yield driver
    finally:
        driver.quit()


def picture(driver: Any, url: str, target: Path, words: str, size: tuple[int, int], crop: tuple[int, int, int]) -> None:
    """Save the page, once it shows these words. `crop`: left, top and right edge, in pixels."""
    driver.set_window_size(*size)
    driver.get(url)
    for _ in range(120):
        time.sleep(0.5)
        if words in driver.execute_script("return document.documentElement.innerText + window.location"):
            break
    time.sleep(6)  # charts are drawn with an animation
    driver.execute_script(
        "const style = document.createElement('style'); style.textContent = '.modebar { display: none !important }';"
        "document.head.append(style)"
    )
    time.sleep(1)
    whole = Image.open(io.BytesIO(driver.get_screenshot_as_png())).convert("RGB")
    whole.crop((*crop, whole.height)).quantize(128).save(target, optimize=True)
    print(f"{target}: {target.stat().st_size / 1000:.0f} kB")


def train(folder: Path) -> str:
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    held_out = np.arange(len(labels)) % 5 == 0
    rows = {"features_0": images[~held_out], "label_0": labels[~held_out]}
    validation = {"features_0": images[held_out], "label_0": labels[held_out]}
    dataset = pack(rows, folder / "rows", validation=validation, shards=3)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))
    (folder / "pids").mkdir()
    tracker = MLflowCallback(run_name="stormy digits")
    ElasticTorchEstimator(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
        loss=nn.CrossEntropyLoss(),
        metrics={"accuracy": lambda output, label: (output.argmax(dim=1) == label).float()},
        batch_size=64,
        epochs=EPOCHS,
        num_proc=WORKERS,
        min_num_proc=1,
        run_options={"launcher": LocalLauncher(), "cooldown_range": (0.5, 2.0)},
        callbacks=[
            Steady(f"{folder}/pids"),
            Storm(f"{folder}/pids"),
            tracker,
            TensorBoardCallback(folder / "logs", run_name="stormy digits"),
        ],
    ).from_dataset_path(dataset)
    return str(tracker.run_id)


def main() -> None:
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images").absolute()
    with tempfile.TemporaryDirectory() as name, browser(Path(name)) as driver:
        folder = Path(name)
        store = ("--backend-store-uri", f"sqlite:///{folder}/runs.db", "--artifacts-destination", f"{folder}/artifacts")
        with serving(folder, "mlflow", "server", *store, "--workers", "1") as address:
            mlflow.set_tracking_uri(address)
            run_id = train(folder)
            run = f"{address}/#/experiments/0/runs/{run_id}"
            charts = f"{run}/model-metrics"
            picture(driver, charts, target / "mlflow_charts.png", "val_loss", (1300, 1540), (198, 0, 960))
            artifacts = f"{run}/artifacts/spark_elastic/plot.png"
            picture(driver, artifacts, target / "mlflow_artifacts.png", "plot.png", (1300, 820), (198, 0, 960))
        with serving(folder, "tensorboard.main", "--logdir", f"{folder}/logs", "--load_fast", "false") as address:
            picture(
                driver,
                f"{address}/#timeseries",
                target / "tensorboard_run.png",
                "timeseries",
                (1300, 1000),
                (0, 0, 1040),
            )
            picture(driver, f"{address}/#text", target / "tensorboard_events.png", "text", (1300, 900), (320, 66, 1285))


if __name__ == "__main__":
    main()
