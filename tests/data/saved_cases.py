"""What `make_saved` does and the tests of saved data do again: trainings that are gone on with, and ways to look."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import spark_elastic.torch as hvd
from spark_elastic import LocalLauncher
from spark_elastic.data.dataset import Dataset
from spark_elastic.ml.callbacks import EarlyStopping
from tests.data import own_torch

EPOCHS, ENDS_AT = 4, 16
"""Of 96 rows in batches of 16: six steps an epoch, so it ends in the third."""

# --- trainings --------------------------------------------------------------------------------------


def of_all_runs() -> dict[str, Any]:
    return {
        "batch_size": 16,
        "epochs": EPOCHS,
        "seed": 5,
        "num_proc": 1,
        "run_options": {"launcher": LocalLauncher()},
        "verbose": 0,
    }


def of_torch() -> dict[str, Any]:
    """Settings whose descriptions do not depend on the version of Python, as the code of functions does."""
    torch.manual_seed(3)
    return {
        "model": nn.Sequential(nn.Linear(6, 8), hvd.SyncBatchNorm(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3)),
        "optimizer": functools.partial(torch.optim.Adam, lr=0.02),
        "loss": nn.CrossEntropyLoss(label_smoothing=0.1),
        "lr_scheduler": functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.8),
        "metrics": {"median": own_torch.Median()},
        "data_options": {"order": "lanes"},
        **of_all_runs(),
    }


def of_keras() -> dict[str, Any]:
    import keras

    import spark_elastic.keras as khvd

    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, kernel_initializer=glorot(3)),
            khvd.SyncBatchNormalization(),
            layers.Activation("tanh"),
            layers.Dense(3, kernel_initializer=glorot(4)),
        ]
    )
    return {
        "model": model,
        "optimizer": keras.optimizers.Adam(0.02),
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "metrics": ["accuracy"],
        **of_all_runs(),
    }


def callbacks_of_torch(log: Path, raises_at: int | None = None, pause_s: float = 0.0) -> list[Any]:
    return [EarlyStopping("val_loss", patience=9, restore_best=True), own_torch.Steps(str(log), raises_at, pause_s)]


def callbacks_of_keras(log: Path, raises_at: int | None = None, pause_s: float = 0.0) -> list[Any]:
    import keras

    return [
        EarlyStopping("val_loss", patience=9, restore_best=True),
        keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=1, factor=0.5, min_delta=10.0),
        keras.callbacks.EarlyStopping(monitor="val_loss", patience=9, restore_best_weights=True),
        own_torch.Steps(str(log), raises_at, pause_s),
    ]


LASTING: dict[str, Any] = {"checkpoint_seconds": 1e-6, "keep_checkpoints": 1, "checkpoint_best_of": "val_loss"}
"""Of the runs that were interrupted."""


def glorot(seed: int) -> Any:
    import keras

    return keras.initializers.GlorotUniform(seed=seed)


# --- loops of one's own -----------------------------------------------------------------------------


def few_rows() -> Any:
    return (np.arange(32, dtype=np.float32).reshape(8, 4) % 5) / 5


def step(net: Any, optimizer: Any) -> float:
    """A step of a loop of one's own. Returns: the loss before it."""
    net.train()
    optimizer.zero_grad()
    loss = net(torch.from_numpy(few_rows())).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


# --- looking ----------------------------------------------------------------------------------------


def plain_settings(stage: Any) -> dict[str, Any]:
    """The settings that were made, of those that JSON can hold, without credentials."""
    made = {param.name: stage.getOrDefault(param) for param in stage.params if stage.isSet(param)}
    return {name: value for name, value in made.items() if name != "storage_options" and _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(each) for key, each in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def added_columns(rows: Any, names: list[str]) -> dict[str, list[Any]]:
    """Columns of a DataFrame as plain values, in the order of its ids."""
    found = rows.orderBy("id").select(names).collect()
    return {name: [plain(row[name]) for row in found] for name in names}


INPUTS = {
    "estimators/torch": (4,),
    "estimators/torch_own": (2, 0),
    "estimators/torch_notebook": (4,),
    "estimators/keras": (2, 0),
    "estimators/keras_compiled": (3,),
    "estimators/keras_own": (4,),
    "estimators/keras_warmup": (4,),
}
"""The saved estimators, and how many numbers each input of their models takes; 0: a word."""


def says(name: str, model: Any) -> list[Any]:
    """The outputs of an estimator's model for a few rows, as plain values."""
    rows = np.arange(6)
    given = [
        ((rows[:, None] + np.arange(width)) / 8).astype(np.float32) if width else rows % 5 for width in INPUTS[name]
    ]
    if isinstance(model, nn.Module):
        with torch.no_grad():
            outputs = model.eval()(*map(torch.from_numpy, given))
    else:
        outputs = model([each if each.ndim > 1 else each[:, None] for each in given] if len(given) > 1 else given[0])
    return [each.numpy().tolist() for each in (outputs if isinstance(outputs, (list, tuple)) else [outputs])]


def tensors(dataset: Dataset, split: str) -> dict[str, list[Any]]:
    """All rows of a set in the order of its files, as plain values."""
    reader = dataset.reader(split, batch_size=64, shuffle=False)
    try:
        (batch,) = reader.epoch(0)
        return {name: [plain(value) for value in values] for name, values in batch.tensors.items()}
    finally:
        reader.close()


def in_order(dataset: Dataset, order: str) -> list[list[int]]:
    """The ids of two epochs, as they are shuffled: a checkpoint counts rows in this order."""
    reader = dataset.reader(batch_size=5, order=order, seed=9)
    try:
        return [[int(row) for batch in reader.epoch(epoch) for row in batch["id"]] for epoch in range(2)]
    finally:
        reader.close()


def plain(value: Any) -> Any:
    """Of arrays and vectors: lists."""
    if isinstance(value, bytes):
        return list(value)
    if hasattr(value, "toArray"):
        return value.toArray().tolist()
    return value.tolist() if hasattr(value, "tolist") else value
