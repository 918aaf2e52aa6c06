"""A small training in float64, to be done in any world, and callbacks that end a worker at a chosen moment."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import spark_elastic.torch as hvd
from spark_elastic.data.dataset import Dataset
from spark_elastic.data.pack import pack
from spark_elastic.data.store import Store
from spark_elastic.ml.callbacks import Callback
from spark_elastic.ml.torch.spec import MODEL_FILE, CheckpointPlan, TorchTraining
from spark_elastic.ml.torch.training import train

ROWS, VALIDATION_ROWS, BATCH, EPOCHS = 203, 77, 16, 3
STEPS = EPOCHS * 13
"""203 rows make 12 batches of 16 and one of 11, which three workers share unevenly."""


def make_set(folder: Path, *, weights: bool = False, float32: bool = False) -> Dataset:
    generator = np.random.default_rng(7)
    kind = np.float32 if float32 else np.float64
    truth = generator.normal(size=(6, 3))

    def rows(count: int) -> dict[str, Any]:
        features = generator.normal(size=(count, 6)).astype(kind)
        columns: dict[str, Any] = {"features_0": features, "label_0": (features @ truth).argmax(1)}
        if weights:
            columns["sample_weight"] = generator.uniform(0.1, 2.0, size=count).astype(kind)
        return columns

    return pack(rows(ROWS), folder, validation=rows(VALIDATION_ROWS), shards=3)


def make_net(*, dropout: float = 0.0, norm: bool = False) -> torch.nn.Sequential:
    torch.manual_seed(3)
    layers: list[torch.nn.Module] = [torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)]
    if norm:
        layers.insert(1, torch.nn.BatchNorm1d(8))
    if dropout:
        layers.insert(-1, torch.nn.Dropout(dropout))
    return torch.nn.Sequential(*layers).double()


def accuracy(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) == label).double().mean()


def label_sum(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """A value for each row: tells which rows were seen."""
    return label.double()


def make_training(data: Path, folder: Path, **changes: Any) -> TorchTraining:
    net = changes.pop("model", None) or make_net()
    settings: dict[str, Any] = {
        "model": net,
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
        "loss": torch.nn.CrossEntropyLoss(),
        "metrics": {"accuracy": accuracy, "label_sum": label_sum},
        "batch_size": BATCH,
        "epochs": EPOCHS,
        "checkpoints": CheckpointPlan(every_epochs=1),
        "verbose": 0,
        **changes,
    }
    return TorchTraining(dataset=Dataset.open(data), store=Store.create(folder), **settings)


def outcome(training: TorchTraining) -> dict[str, Any]:
    """Do it, and say what came of it in plain values."""
    result = train(training)
    return {
        "history": [{k: v for k, v in row.items() if k != "seconds"} for row in result.history],
        "steps": result.steps,
        "stopped": result.stopped,
        "restored": result.restored,
        "size": hvd.size(),
    }


def alone(training: TorchTraining) -> dict[str, Any]:
    """In this process, a world of one."""
    try:
        return outcome(training)
    finally:
        hvd.shutdown()


def weights(folder: Path) -> list[float]:
    state = torch.load(folder / MODEL_FILE, weights_only=True)
    return [number for tensor in state.values() for number in tensor.double().reshape(-1).tolist()]


class At(Callback):
    """Does something at the `count`-th time that `event` happens, in this process."""

    def __init__(self, event: str, count: int, action: Callable[[], None]) -> None:
        setattr(self, event, _at(count, action))


class StoreThat:
    """A store that does something before or after it writes a file whose name ends so."""

    def __init__(self, store: Any, ending: str, action: Callable[[], None], *, half: bool = False) -> None:
        self._store, self._ending, self._action, self._half = store, ending, action, half

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def sub(self, path: str) -> StoreThat:
        return StoreThat(self._store.sub(path), self._ending, self._action, half=self._half)

    def write_bytes(self, path: str, data: bytes, **options: Any) -> Any:
        if path.endswith(self._ending):
            if self._half:  # as on storage that does not write in one piece
                target = self._store.local_path(path)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(data[: len(data) // 2])
            else:
                self._store.write_bytes(path, data, **options)
            self._action()
        return self._store.write_bytes(path, data, **options)


def in_worker(data: Path, folder: Path, plans: Mapping[int, tuple[Any, ...]], changes: Mapping[str, Any]) -> Any:
    """For a `KitDriver`. plans: worker -> what ends it: ("on_batch_end", 7), ("forward", 3), ("store", "model.pt")."""
    from tests.unit.torch.kit import die, link

    options = dict(changes)
    if "make_model" in options:
        net = make_net(**options.pop("make_model"))
        options |= {"model": net, "optimizer": torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)}
    training = make_training(data, folder, **options)
    for worker, (kind, *rest) in plans.items():
        action = die if worker == link().worker else lambda: None
        if kind.startswith("on_"):  # all workers have the same callbacks
            training = replace(training, callbacks=[*training.callbacks, At(kind, rest[0], action)])
        elif kind == "forward":
            training.model.register_forward_hook(_at(rest[0], action))
        elif kind == "backward":
            next(iter(training.model.parameters())).register_hook(_at(rest[0], action))
        elif kind == "store":
            training = replace(training, store=StoreThat(training.store, rest[0], action, half=rest[1]))
    return outcome(training)


def _at(count: int, action: Callable[[], None]) -> Callable[..., None]:
    """Calls the action at the `count`-th time that it is called itself."""
    calls = itertools.count(1)

    def called(*_: Any) -> None:
        if next(calls) == count:
            action()

    return called
