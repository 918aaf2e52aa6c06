"""Fits of the estimators that write a diary, and the weights that they must end with.

The gradient of their loss does not depend on the weights: each row changes them by fixed numbers once an epoch. So the
final weights show whether a row was left out or used twice in any epoch, whatever happened to the workers.
"""

from __future__ import annotations

import hashlib
import threading
import time
from pathlib import Path
from typing import Any, Literal

import numpy as np

from spark_elastic.collective.process import process
from spark_elastic.ml.callbacks import Callback, Logs, Run
from tests.integration.spark.training import STEP_S, Notes

Framework = Literal["torch", "keras"]
ROWS, BATCH, FEATURES = 250, 25, 8
LEARNING_RATE = 0.125
MOST_EPOCHS = 1_000_000
TOLERANCE: dict[Framework, float] = {"torch": 1e-9, "keras": 3e-7}
"""Largest error of a weight, relative to the largest weight. Sums of float64 depend on their order, and so on the
workers; Keras computes losses in float32. In the first 10,000 epochs, one row too many changes a weight by more."""


class FitDiary(Callback):
    """Writes each applied step into a folder, and ends the fit after the epoch in which the file `finish` appears."""

    def __init__(self, folder: str, pause_s: float = STEP_S) -> None:
        self._folder, self._pause_s = folder, pause_s
        self._note: Notes | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_note": None}

    def on_fit_begin(self, run: Run) -> None:
        self._write("up")

    def on_batch_begin(self, run: Run) -> None:
        time.sleep(self._pause_s)

    def on_batch_end(self, run: Run) -> None:
        world = process.assignment.world if process.assignment is not None else None
        after = hashlib.sha1(weights_of(run.model).tobytes()).hexdigest()[:12]
        place = {"round": world.round if world is not None else 0, "rank": run.rank, "size": run.size}
        self._write("applied", step=run.step, epoch=run.epoch, after=after, **place)

    def on_epoch_end(self, run: Run, logs: Logs) -> None:
        if Path(self._folder, "finish").exists():
            run.stop("the file `finish` is there")

    def _write(self, what: str, **more: Any) -> None:
        if self._note is None:
            self._note = Notes(self._folder)
        self._note(what, **more)


def weights_of(model: Any) -> np.ndarray:
    """Return the weights of a model of either framework, [FEATURES]."""
    if hasattr(model, "get_weights"):
        return np.asarray(model.get_weights()[0]).ravel()
    return model.weight.detach().numpy().ravel()


def _numbers() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.integers(-4, 5, (ROWS, FEATURES)), rng.integers(1, 4, ROWS)


def rows(spark: Any) -> Any:
    """Return a DataFrame of ROWS rows of whole numbers: x, an array of FEATURES, and y."""
    listed = [([float(one) for one in x], float(y)) for x, y in zip(*_numbers(), strict=True)]
    return spark.createDataFrame(listed, "x array<double>, y double").repartition(2)


def expected_weights(epochs: int) -> np.ndarray:
    """Return the weights after a number of epochs that use every row once, in any order, [FEATURES]."""
    x, y = _numbers()
    return -LEARNING_RATE * epochs * (x * y[:, None]).sum(axis=0) / BATCH


def torch_loss(output: Any, label: Any) -> Any:
    return (output.reshape(-1) * label.reshape(-1)).mean()


def keras_loss(label: Any, output: Any) -> Any:
    import keras

    flat = [keras.ops.cast(keras.ops.reshape(each, (-1,)), "float64") for each in (label, output)]
    return flat[0] * flat[1]


def estimator(framework: Framework, folder: Path, **settings: Any) -> Any:
    """Return an estimator whose fit goes on until `folder/finish` is there. Its checkpoints are below `folder` too."""
    common: dict[str, Any] = {
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "input_dtypes": ["float64"],
        "batch_size": BATCH,
        "epochs": MOST_EPOCHS,
        "prediction": "value",
        "callbacks": [FitDiary(str(folder))],
        "store": str(folder / "store"),
        "checkpoint_dir": str(folder / "runs"),
        "checkpoint_interval": 5,
        "verbose": 0,
        **settings,
    }
    if framework == "torch":
        import torch

        from spark_elastic import ElasticTorchEstimator

        net = torch.nn.Linear(FEATURES, 1, bias=False, dtype=torch.float64)
        torch.nn.init.zeros_(net.weight)
        optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE)
        return ElasticTorchEstimator(model=net, optimizer=optimizer, loss=torch_loss, **common)
    import keras

    from spark_elastic import ElasticKerasEstimator

    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", dtype="float64")
    model = keras.Sequential([keras.Input((FEATURES,), dtype="float64"), layer])
    return ElasticKerasEstimator(model=model, optimizer=keras.optimizers.SGD(LEARNING_RATE), loss=keras_loss, **common)


class Fit:
    """Run a fit on its own thread, with the methods of `ElasticJob` that a storm calls."""

    def __init__(self, framework: Framework, spark: Any, folder: Path, **settings: Any) -> None:
        self.model: Any = None
        self._tolerance = TOLERANCE[framework]
        self._folder, self._error = folder, None
        self._estimator, self._rows = estimator(framework, folder, **settings), rows(spark)
        self._thread = threading.Thread(target=self._fit, name=f"fit with {framework}")
        self._thread.start()

    def _fit(self) -> None:
        try:
            self.model = self._estimator.fit(self._rows)
        except BaseException as error:  # `result` raises it
            self._error = error

    def done(self) -> bool:
        return not self._thread.is_alive()

    def status(self) -> str:
        return "the fit runs" if self._thread.is_alive() else f"the fit has ended: {self._error or 'with a model'}"

    def result(self, timeout_s: float) -> Any:
        """Return the fitted model, or raise what `fit` has raised; TimeoutError if the fit has not ended by then."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"the fit has not ended within {timeout_s:g} s")
        if self._error is not None:
            raise self._error
        return self.model

    def cancel(self) -> None:
        """End the fit after its epoch, and wait up to 60 s for that."""
        (self._folder / "finish").touch()
        self._thread.join(60)

    def problems(self) -> list[str]:
        """Return what is wrong with the fitted model, in words."""
        epochs = len(self.model.history)
        found = weights_of(getattr(self.model, "module", None) or self.model.keras_model)
        expected = expected_weights(epochs)
        off = np.abs(found - expected).max() / np.abs(expected).max()
        return [] if off <= self._tolerance else [f"after {epochs} epochs the weights are {found} and not {expected}"]
