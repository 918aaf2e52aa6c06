"""LightningModules in workers: a kill, beside one process."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spark_elastic import ElasticTorchEstimator
from spark_elastic.ml.callbacks import Callback
from tests.unit.ml.torch.estimators import weights_of

pytest.importorskip("lightning.pytorch")
from tests.unit.ml.torch.lightning_modules import Measured, trained_by_lightning

pytestmark = pytest.mark.nightly

EPOCHS, BATCH, ROWS, VALIDATION = 3, 20, 96, 32


class DiesOnce(Callback):
    """Kills the worker of rank 1 after this number of steps, once."""

    def __init__(self, marker: Path, step: int) -> None:
        self.marker, self.step = str(marker), step

    def on_batch_end(self, run: Any) -> None:
        if run.rank == 1 and run.step == self.step and not os.path.exists(self.marker):
            Path(self.marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def numbers() -> tuple[torch.Tensor, torch.Tensor]:
    generator = np.random.default_rng(7)
    features = generator.normal(size=(ROWS + VALIDATION, 6)).astype(np.float32)
    return torch.tensor(features), torch.tensor((features @ generator.normal(size=(6, 3))).argmax(1))


@pytest.fixture(scope="module")
def table(spark: Any, numbers: Any) -> Any:
    """x, label, aside; the rows of the numbers, in their order."""
    x, y = numbers
    rows = [(x[at].tolist(), int(y[at]), at >= ROWS) for at in range(len(y))]
    return spark.createDataFrame(rows, "x array<float>, label long, aside boolean").coalesce(1).cache()


@pytest.fixture(scope="module")
def fitted(table: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("lightning")
    estimator = ElasticTorchEstimator.from_lightning(
        Measured(),
        feature_cols=["x"],
        label_cols=["label"],
        validation="aside",
        shuffle=False,
        batch_size=BATCH,
        epochs=EPOCHS,
        callbacks=[DiesOnce(folder / "died", 7)],
        num_proc=2,
        min_num_proc=1,
        store=str(folder),
        verbose=0,
    )
    return estimator.fit(table)


def test_a_fit_with_a_kill_gives_what_lightning_gives_in_one_process(fitted: Any, numbers: Any) -> None:
    (lost,) = [event for event in fitted.events if event["kind"] == "lost"]
    assert (lost["before"], lost["after"]) == (2, 1)
    reference = Measured()
    x, y = numbers
    train, validation = (x[:ROWS], y[:ROWS]), (x[ROWS:], y[ROWS:])
    expected = trained_by_lightning(reference, train, validation, batch_size=BATCH, epochs=EPOCHS)
    names = ["train_loss", "val_loss", "accuracy", "val_accuracy", "val_auc", "place", "val_place", "even", "lr"]
    names += ["val_MulticlassPrecision", "val_MulticlassRecall"]
    for row, wanted in zip(fitted.history, expected, strict=True):
        for name in names:
            assert row[name] == pytest.approx(wanted[name], rel=1e-4), name
    assert weights_of(fitted) == pytest.approx(
        [number for value in reference.state_dict().values() for number in value.reshape(-1).tolist()], abs=1e-5
    )
