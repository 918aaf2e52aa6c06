"""Models that are not built yet: a copy of one with the weights that it gets for the columns of a set."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from spark_elastic.data.layout import Kind, TensorField
from spark_elastic.errors import InvalidSettingsError, NotPicklableError
from spark_elastic.ml.keras import archives
from spark_elastic.ml.keras.custom_objects import custom_objects_of, not_described, own_names
from spark_elastic.ml.keras.structure import inputs_of


def built_for(
    model: Any, inputs: Sequence[TensorField], seed: int, custom_objects: Mapping[str, Any] | None = None
) -> Any:
    """A copy of `model`, which stays unbuilt, called with rows of zeros. The same weights for the same seed.

    Raises:
        InvalidSettingsError: it cannot be called with such rows, or their shape is not known.
        NotPicklableError: it cannot be copied.
    """
    if (kind := not_described(model)) is not None:
        raise NotPicklableError(
            f"{kind}.get_config() leaves out arguments of {kind}.__init__; it has to return all of them"
        )
    for field in inputs:
        if field.kind not in (Kind.DENSE, Kind.SPARSE):
            raise InvalidSettingsError(
                f"the model is not built, and rows of {field.name} ({'+'.join(field.columns)}) have no shape: build it "
                "first, by calling it on an array"
            )
    config = archives.architecture(model)
    objects = custom_objects_of(model, own_names(model, config), custom_objects)
    with _seeded(seed):
        copied = keras.saving.deserialize_keras_object(config, custom_objects=objects, safe_mode=False)
        rows = [np.zeros((1, *field.shape), field.dtype) for field in inputs]
        try:
            copied(inputs_of(copied, rows))
        except Exception as error:
            shapes = ", ".join(f"{field.name} {field.dtype} {[1, *field.shape]}" for field in inputs)
            raise InvalidSettingsError(
                f"the model is not built, and cannot be for rows of these columns ({shapes}): {error}"
            ) from error
    return copied


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Initializers without a seed of their own draw one from Python's generator."""
    before = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(before)
