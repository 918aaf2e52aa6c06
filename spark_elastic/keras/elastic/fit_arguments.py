"""The arguments of `model.fit` beside an `ElasticDataset`, which Keras does not pass on to it: used, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

# Private: the function with which Keras itself weighs arrays, so that the weights are the same.
from keras.src.trainers.data_adapters.data_adapter_utils import class_weight_to_sample_weights

from spark_elastic.elastic.call_stack import calling_method
from spark_elastic.errors import UsageError

_ENTRIES = ("fit", "evaluate", "predict")
_WITHIN = 10
"""Largest number of calls between `fit` and its dataset."""


def check_arguments(dataset: Any) -> Mapping[int, float] | None:
    """Return the `class_weight` of the `fit` that asks the `ElasticDataset` for its batches; None without one.

    Raises UsageError if the dataset is used for something else than training, or `fit` would ignore an argument.
    """
    entry, given = calling_method(lambda owner: isinstance(owner, keras.Model), _ENTRIES, _WITHIN)
    if not entry:
        return None
    validation = given.get("validation_data")
    beside = validation if isinstance(validation, (tuple, list)) else (validation,)
    kind = type(dataset)
    trained: bool = entry == "fit" and given.get("x") is dataset
    if not trained or any(isinstance(part, kind) for part in beside):
        where = f"model.{entry}" if entry != "fit" else "validation_data of model.fit"
        raise UsageError(
            f"an ElasticDataset cannot be used in {where}: it deals each worker its share of the rows that are left "
            "of the state's epoch of training. Give the arrays, (x, y), or a tf.data.Dataset of them"
        )
    for name in ("y", "sample_weight"):
        if given.get(name) is not None:
            raise UsageError(
                f"model.fit got {name}= beside an ElasticDataset, where Keras ignores it; give it to the dataset: "
                "ElasticDataset(x, y, sample_weight, state=state, ...)"
            )
    size = given.get("batch_size")
    if size is not None and size != dataset.batch_rows:
        raise UsageError(
            f"model.fit got batch_size={size} beside an ElasticDataset whose batch_size is {dataset.batch_rows}; give "
            "it to the dataset alone, and validation_batch_size to fit for the rows of validation_data"
        )
    shuffle = given.get("shuffle", True)
    if shuffle is not True and (shuffle or dataset.shuffle):  # True is the default of `fit`
        raise UsageError(
            f"model.fit got shuffle={shuffle!r} beside an ElasticDataset with shuffle={dataset.shuffle}, where Keras "
            "ignores it; give it to the dataset: ElasticDataset(..., shuffle=False) keeps the order of the rows"
        )
    weights: Mapping[int, float] | None = given.get("class_weight")
    return weights or None


def check_steps(steps: int | None, batches: int) -> None:
    """Raise UsageError if the `steps_per_epoch` of Keras is another number than the dataset's batches of an epoch."""
    if steps not in (None, batches):
        raise UsageError(
            f"steps_per_epoch={steps} (of model.fit, or of KERAS_MAX_STEPS_PER_EPOCH), but an epoch of this "
            f"ElasticDataset has {batches} batches, and ends with the last of them. Leave it out; for shorter epochs, "
            "give the dataset fewer rows"
        )


def with_class_weight(parts: tuple[Any, ...], class_weight: Mapping[int, float]) -> tuple[Any, ...]:
    """Return (x, y, weights) with the weights of the rows' classes; raise UsageError without targets of one output."""
    if len(parts) < 2 or not isinstance(parts[1], np.ndarray):
        raise UsageError(
            "class_weight needs the targets of one output as y of the ElasticDataset; for a model with several "
            "outputs, give ElasticDataset a sample_weight for each"
        )
    weights = np.asarray(class_weight_to_sample_weights(parts[1], class_weight))
    if len(parts) > 2:
        own = parts[2]
        weights = (own * weights.reshape(-1, *[1] * (own.ndim - 1))).astype(weights.dtype)
    return parts[0], parts[1], weights
