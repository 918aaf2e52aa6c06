"""Classes and functions of a user's own for Keras. The saved estimators and models beside name them by this module:
neither it nor what is in it may be renamed."""

from __future__ import annotations

from typing import Any

import keras


class Scaled(keras.layers.Layer):
    """Not registered with Keras."""

    def __init__(self, factor: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.factor = factor

    def call(self, x: Any) -> Any:
        return self.factor * x

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "factor": self.factor}


class Offset(keras.losses.Loss):
    """A loss with an argument of its own."""

    def __init__(self, offset: float = 0.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.offset = offset

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return keras.ops.mean(keras.ops.square(y_true - y_pred - self.offset), axis=-1)


def distance(y_true: Any, y_pred: Any) -> Any:
    return keras.ops.mean(keras.ops.abs(y_true - y_pred), axis=-1)


def tenfold(features: dict[str, Any]) -> dict[str, Any]:
    return {**features, "features_0": features["features_0"] * 10}
