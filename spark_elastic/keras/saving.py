"""Load saved models for distributed training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import keras

from spark_elastic.collective.reduction import Compression
from spark_elastic.keras.optimizer import DistributedOptimizer


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = Compression.none,
    **distributed: Any,
) -> Any:
    """Load a model with `keras.saving.load_model` and make its optimizer a `DistributedOptimizer`, with its state.

    Args:
        filepath: a file that `model.save` wrote, with any optimizer, distributed or not.
        custom_optimizers: the classes of optimizers that do not belong to Keras.
        custom_objects: other classes and functions that the model needs, by name.
        compression: argument of `DistributedOptimizer`.
        **distributed: further arguments of `DistributedOptimizer`.
    """
    known = {kind.__name__: kind for kind in custom_optimizers or ()}
    known.update(custom_objects or {})
    model = keras.saving.load_model(filepath, custom_objects=known or None)
    if getattr(model, "optimizer", None) is not None:
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression, **distributed)
    return model
