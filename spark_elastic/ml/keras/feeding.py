"""Turn the batches of a reader into the tensors that a Keras model is called with."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from spark_elastic.data.reader import Batch
from spark_elastic.errors import DataError, InvalidSettingsError
from spark_elastic.ml.keras.compiling import CompileArguments, check_kept, inputs_of, losses_by_output, output_names
from spark_elastic.ml.preparation import INPUT, LABEL, WEIGHT, Columns, numbered, ragged_column_error, split_evenly
from spark_elastic.ml.training.engine import first_rows
from spark_elastic.ml.training.spec import Training

Array = npt.NDArray[Any]

FIRST_ROWS = 2  # the number of rows from which types and shapes are read


class BatchFeeder:
    """A converter of batches to tensors, whose types and shapes are always the same except for the number of rows.

    `names` are those of inputs, labels and sample weight; `specs` has a `tf.TensorSpec` for each.
    """

    def __init__(self, training: Training, model: Any, compiled: CompileArguments) -> None:
        self._columns = Columns(training)
        self._model = model
        self._training = training
        columns = self._columns.convert(first_rows(training, FIRST_ROWS))
        self._inputs, labels = (len(numbered(prefix, columns)) for prefix in (INPUT, LABEL))
        self._weighted = WEIGHT in columns
        self._outputs = self._outputs_of(labels, compiled)
        self.names = [f"{prefix}{at}" for prefix, n in ((INPUT, self._inputs), (LABEL, labels)) for at in range(n)]
        self.names += [WEIGHT] if self._weighted else []
        self._dtypes = {name: self._dtype(name, columns[name]) for name in self.names}
        self.specs = [self._spec(name, columns[name]) for name in self.names]

    def _dtype(self, name: str, value: Any) -> np.dtype[Any]:
        if not isinstance(value, np.ndarray) or value.dtype == object:
            raise ragged_column_error(name, value)
        if value.dtype != np.float64:
            return np.dtype(value.dtype)
        known = self._known(name)  # Spark stores all numbers as float64; few models want that
        dtype = None if known is None else keras.backend.standardize_dtype(known.dtype)
        return np.dtype(str(dtype if dtype in ("float32", "float64") else keras.config.floatx()))

    def _known(self, name: str) -> Any:
        """Return the model's symbolic input, or the symbolic output of a label; None if the model declares none."""
        if name.startswith(INPUT):
            known, at = getattr(self._model, "inputs", None), int(name[len(INPUT) :])
        elif name.startswith(LABEL):
            known, at = getattr(self._model, "outputs", None), int(name[len(LABEL) :])
            names = output_names(self._model)
            if known is not None and self._outputs is not None and names is not None:
                at = names.index(self._outputs[at]) if at < len(self._outputs) else len(known)
        else:
            return None
        return known[at] if known is not None and at < len(known) else None

    def _spec(self, name: str, value: Array) -> Any:
        known = self._known(name)
        shape: list[int | None] = list(value.shape[1:])
        if known is not None and len(known.shape) == value.ndim:
            # an axis that is None in the model may differ between batches
            shape = [n if fixed is not None else None for n, fixed in zip(shape, tuple(known.shape)[1:], strict=True)]
        return tf.TensorSpec((None, *shape), tf.as_dtype(self._dtypes[name]), name=name)

    def _outputs_of(self, labels: int, compiled: CompileArguments) -> list[str] | None:
        """Return the name of each label's output; None if there is one output, or the model declares none."""
        names = output_names(self._model)
        if names is None or labels < 1 or len(names) < 2:
            return None
        with_loss = [name for name, _ in losses_by_output(compiled.loss, names) if name is not None]
        if not with_loss:
            with_loss = names[:labels]
        if len(with_loss) != labels:
            raise InvalidSettingsError(
                f"{labels} labels for the outputs {', '.join(with_loss)}, which have losses; there must be one for each"
            )
        return with_loss

    def structure(self, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return (inputs, labels) or (inputs, labels, weights), the argument of `keras.Model.train_step`."""
        inputs = list(tensors[: self._inputs])
        labels = list(tensors[self._inputs : len(tensors) - self._weighted])
        x = inputs_of(self._model, inputs)
        y: Any = labels
        if not labels:
            y = inputs[0]  # the label of an autoencoder; a user's train_step may ignore it
        elif self._outputs is not None:
            names = output_names(self._model)
            whole = names == self._outputs and not isinstance(getattr(self._model, "_outputs_struct", None), dict)
            y = labels if whole else dict(zip(self._outputs, labels, strict=True))
        elif len(labels) == 1:
            struct = getattr(self._model, "_outputs_struct", None)
            y = {next(iter(struct)): labels[0]} if isinstance(struct, dict) and len(struct) == 1 else labels[0]
        return (x, y, tensors[-1]) if self._weighted else (x, y)

    def parts(self, batch: Batch) -> list[tuple[Any, ...]]:
        """Return a batch as tensors, in parts of accumulation; [] if this worker has no rows of it."""
        return [tuple(map(tf.constant, part)) for part in self.arrays(batch)]

    def arrays(self, batch: Batch, parts: int | None = None) -> list[tuple[Array, ...]]:
        """Return a batch as arrays in the order of `names`, in at most `parts` parts, or those of accumulation."""
        if not batch.rows:
            return []
        columns = self._columns.convert(batch)
        whole = tuple(self._array(name, spec, columns) for name, spec in zip(self.names, self.specs, strict=True))
        edges = split_evenly(batch.rows, parts or self._training.accumulation_steps)
        return [tuple(each[start:stop] for each in whole) for start, stop in edges]

    @functools.cached_property
    def first_row(self) -> tuple[Any, ...]:
        """The first row of the training dataset, for a worker without rows that must call the model all the same."""
        return self.parts(first_rows(self._training, 1))[0]

    def _array(self, name: str, spec: Any, columns: Mapping[str, Any]) -> Array:
        value = columns.get(name)
        if not isinstance(value, np.ndarray) or value.dtype == object:
            raise ragged_column_error(name, value)
        fits = spec.shape.is_compatible_with(value.shape)
        if not fits or (value.dtype != self._dtypes[name] and value.dtype != np.float64):
            raise DataError(
                f"{name} is {value.dtype} {list(value.shape[1:])} in this batch and was {spec.dtype.name} "
                f"{[n if n is not None else '?' for n in spec.shape[1:]]} in the first; rows of all batches must be of "
                "one type and shape, except along axes that are None in the model's Input"
            )
        if name.startswith(INPUT):
            check_kept(self._model, int(name[len(INPUT) :]), name, value)
        return np.ascontiguousarray(value, self._dtypes[name])
