"""An estimator that trains in this process, as a world of one."""

from __future__ import annotations

from typing import Any

import keras

from spark_elastic import ElasticKerasEstimator, LocalLauncher
from spark_elastic.ml.keras.fit import KerasFit
from spark_elastic.ml.keras.spec import KerasTraining
from tests.unit.ml.here import Here


class HereEstimator(Here, ElasticKerasEstimator):
    training: KerasTraining
    fit_run = KerasFit


def make_net(width: int = 8) -> Any:
    """Make a model from 6 numbers to 3 classes."""
    layers = keras.layers
    first, last = (keras.initializers.GlorotUniform(seed=seed) for seed in (3, 4))
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(width, activation="tanh", kernel_initializer=first),
            layers.Dense(3, kernel_initializer=last),
        ]
    )


def settings(**changes: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "model": changes.get("model") or make_net(),
        "optimizer": keras.optimizers.SGD(0.1),
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
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


def weights_of(model: Any) -> list[float]:
    return [float(number) for value in model.keras_model.get_weights() for number in value.reshape(-1)]
