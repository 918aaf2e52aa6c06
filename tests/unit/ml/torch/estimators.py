"""An estimator that trains in this process, as a world of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from spark_elastic import ElasticTorchEstimator, LocalLauncher
from spark_elastic.data.dataset import Dataset, pack
from spark_elastic.ml.torch.fit import TorchFit
from spark_elastic.ml.torch.spec import TorchTraining
from tests.unit.ml.here import Here


class HereEstimator(Here, ElasticTorchEstimator):
    training: TorchTraining
    fit_run = TorchFit


def make_set(folder: Path, **more: Any) -> Dataset:
    """96 rows to train on, 32 for validation: features_0 [6] float32, label_0 one of three classes."""
    generator = np.random.default_rng(7)
    truth = generator.normal(size=(6, 3))

    def rows(count: int) -> dict[str, Any]:
        features = generator.normal(size=(count, 6)).astype(np.float32)
        made = {"features_0": features, "label_0": (features @ truth).argmax(1)}
        return {**made, **{name: make(count) for name, make in more.items()}}

    return pack(rows(96), folder, validation=rows(32), shards=2)


def make_net(width: int = 8) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))


def settings(**changes: Any) -> dict[str, Any]:
    net = changes.get("model") or make_net()
    made: dict[str, Any] = {
        "model": net,
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.1) if isinstance(net, nn.Module) else torch.optim.SGD,
        "loss": nn.CrossEntropyLoss(),
        "batch_size": 16,
        "epochs": 2,
        "num_proc": 1,
        "run_options": {"launcher": LocalLauncher()},
        "verbose": 0,
        **changes,
    }
    return {name: value for name, value in made.items() if value is not None}


def estimator(**changes: Any) -> HereEstimator:
    return HereEstimator(**settings(**changes))


def transformers_estimator(model: Any, **changes: Any) -> HereEstimator:
    """Return an estimator of such a model for a dataset of `pack`, whose columns have the names of tensors."""
    common = {"num_proc": 1, "run_options": {"launcher": LocalLauncher()}, "verbose": 0, "batch_size": 16}
    made = HereEstimator.from_transformers(model, **{**common, **changes})
    made.clear(made.feature_cols)
    made.clear(made.label_cols)
    return made


def weights_of(model: Any) -> list[float]:
    return [number for value in model.module.state_dict().values() for number in value.reshape(-1).tolist()]
