"""The settings of one training of a Keras model. Can be imported without TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spark_elastic.ml.keras.model_function import KerasFunction
from spark_elastic.ml.keras.pickling import KerasPickle
from spark_elastic.ml.training.spec import Training

MODEL_FILE = "model.weights.npz"
"""The file in the run's store with the weights of the trained model, for `serialization.fill`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KerasTraining(Training):
    """One training of a Keras model; `Training` describes the settings that every framework has."""

    model: KerasPickle | KerasFunction  # `load` returns a built `keras.Model`, not compiled
    compiled: KerasPickle  # `CompileArguments`. Labels belong to the outputs that have a loss, in their order
    optimizer_values: Sequence[Any] | None = None  # of its variables, in their order, if it has done steps already
    callbacks: KerasPickle | None = None  # a list of this package's callbacks and of `keras.callbacks.Callback`
    config: Mapping[str, Any] = field(default_factory=dict)  # global settings of Keras by name, such as "floatx"
