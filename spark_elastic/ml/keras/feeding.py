"""From a reader's batches to what a Keras model is called with, by way of a `tf.data.Dataset`."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from spark_elastic.data.reader import Batch
from spark_elastic.errors import DataError, InvalidSettingsError
from spark_elastic.ml.keras.compiling import CompileArguments, losses_by_output
from spark_elastic.ml.keras.spec import KerasTraining
from spark_elastic.ml.keras.structure import check_kept, inputs_of, output_names
from spark_elastic.ml.preparation import WEIGHT, numbered
from spark_elastic.ml.training.columns import INPUT, LABEL, Columns, ragged_column_error, split_evenly

Array = npt.NDArray[Any]

FIRST_ROWS = 2
"""From which types and shapes are learned."""


@dataclass(frozen=True, slots=True)
class Part:
    """Rows that go through the model at once. tensors: in the order of `Feeding.names`."""

    tensors: tuple[Any, ...]
    rows: int


@dataclass(frozen=True, slots=True)
class KerasBatch:
    """A worker's share of a global batch, in parts; none if it has no rows of it."""

    parts: list[Part]
    rows: int
    global_rows: int
    start: int
    stop: int


class Feeding:
    """Makes tensors of batches, always of the same types and shapes but for the number of rows.

    names: of the tensors: inputs, labels and the weight. specs: of each, with a free number of rows.

    Raises: DataError: `transformation_fn` or the columns do not give what can be trained on.
    """

    def __init__(self, training: KerasTraining, model: Any, compiled: CompileArguments) -> None:
        self._columns = Columns(training)
        self._model = model
        self._parts = training.accumulation
        self._training = training
        columns = self._columns.of(first_rows(training))
        inputs, labels = (len(numbered(prefix, columns)) for prefix in (INPUT, LABEL))
        self._weighted = WEIGHT in columns
        self._inputs = inputs
        self._outputs = self._outputs_of(labels, compiled)
        self.names = [
            *(f"{INPUT}{at}" for at in range(inputs)),
            *(f"{LABEL}{at}" for at in range(labels)),
            *([WEIGHT] if self._weighted else []),
        ]
        self._dtypes = {name: self._dtype(name, columns[name]) for name in self.names}
        self.specs = [self._spec(name, columns[name]) for name in self.names]
        self._first: Part | None = None
        self._source: Generator[tuple[Array, ...]] | None = None
        self._dataset: Any = None
        """Made once: making one takes as long as many batches do."""

    # --- types and shapes -------------------------------------------------------------------------

    def _dtype(self, name: str, value: Any) -> np.dtype[Any]:
        if not isinstance(value, np.ndarray) or value.dtype == object:
            raise ragged_column_error(name, value)
        if value.dtype != np.float64:
            return np.dtype(value.dtype)
        known = self._known(name)  # 64 bits are what Spark has, and seldom what is meant
        dtype = None if known is None else keras.backend.standardize_dtype(known.dtype)
        return np.dtype(str(dtype if dtype in ("float32", "float64") else keras.config.floatx()))

    def _known(self, name: str) -> Any:
        """What the model says of an input, or of the output that a label belongs to; None: nothing."""
        if name.startswith(INPUT):
            known, at = getattr(self._model, "inputs", None), int(name[len(INPUT) :])
        elif name.startswith(LABEL):
            known, at = getattr(self._model, "outputs", None), int(name[len(LABEL) :])
            places = output_names(self._model)
            if known is not None and self._outputs is not None and places is not None:
                at = places.index(self._outputs[at]) if at < len(self._outputs) else len(known)
        else:
            return None
        return known[at] if known is not None and at < len(known) else None

    def _spec(self, name: str, value: Array) -> Any:
        known = self._known(name)
        shape: list[int | None] = list(value.shape[1:])
        if known is not None and len(known.shape) == value.ndim:
            # where the model takes any length, batches may differ
            shape = [
                None if any_length is None else n for n, any_length in zip(shape, tuple(known.shape)[1:], strict=True)
            ]
        return tf.TensorSpec((None, *shape), tf.as_dtype(self._dtypes[name]), name=name)

    def _outputs_of(self, labels: int, compiled: CompileArguments) -> list[str] | None:
        """The output that each label belongs to; None: there is one, or nothing is known of them."""
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

    # --- tensors ----------------------------------------------------------------------------------

    def structure(self, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
        """(inputs, labels) or (inputs, labels, weights) as `keras.Model.train_step` takes them."""
        inputs = list(tensors[: self._inputs])
        labels = list(tensors[self._inputs : len(tensors) - self._weighted])
        x = inputs_of(self._model, inputs)
        y: Any = labels
        if not labels:
            y = inputs[0]  # as an autoencoder is trained; a train_step of its own need not look
        elif self._outputs is not None:
            names = output_names(self._model)
            whole = names == self._outputs and not isinstance(getattr(self._model, "_outputs_struct", None), dict)
            y = labels if whole else dict(zip(self._outputs, labels, strict=True))
        elif len(labels) == 1:
            struct = getattr(self._model, "_outputs_struct", None)
            y = {next(iter(struct)): labels[0]} if isinstance(struct, dict) and len(struct) == 1 else labels[0]
        return (x, y, tensors[-1]) if self._weighted else (x, y)

    def batches(self, batches: Generator[Batch]) -> Generator[KerasBatch]:
        """Closes `batches` in the end. Raises: what reading or `transformation_fn` raise."""
        facts: deque[tuple[Batch, list[int]]] = deque()
        failure: list[BaseException] = []

        def elements() -> Generator[tuple[Array, ...]]:
            try:
                for batch in batches:
                    parts = self.arrays(batch)
                    rows = [len(part[0]) for part in parts]
                    facts.append((_without_tensors(batch), rows))
                    yield from parts
            except BaseException as error:  # TensorFlow would make one of its own of it
                failure.append(error)
                raise

        with closing(batches), closing(elements()) as source:
            self._source = source
            iterator = iter(self._made())
            try:
                while True:
                    first = next(iterator, None)
                    if first is None:
                        return
                    batch, rows = facts.popleft()
                    tensors = [first, *(next(iterator) for _ in rows[1:])]
                    made = [Part(part, count) for part, count in zip(tensors, rows, strict=True) if count]
                    yield KerasBatch(made, batch.rows, batch.global_rows, batch.start, batch.stop)
            except tf.errors.OpError as error:
                raise failure[0] if failure else error from None
            finally:
                source.close()
                with contextlib.suppress(tf.errors.OpError):
                    next(iterator, None)  # TensorFlow lets go of a generator when it has seen its end

    def _made(self) -> Any:
        if self._dataset is None:

            def source() -> Generator[tuple[Array, ...]]:
                assert self._source is not None
                return self._source

            # Arrays that lie at a multiple of 64 bytes become tensors without a copy.
            dataset = tf.data.Dataset.from_generator(source, output_signature=tuple(self.specs))
            options = tf.data.Options()
            options.autotune.enabled = False  # it would read ahead, in a thread that nobody waits for
            self._dataset = dataset.with_options(options)
        return self._dataset

    def arrays(self, batch: Batch, parts: int | None = None) -> list[tuple[Array, ...]]:
        """The parts of a batch; one without rows if there are none."""
        if not batch.rows:
            return [tuple(_no_rows(spec) for spec in self.specs)]
        columns = self._columns.of(batch)
        whole = tuple(self._array(name, spec, columns) for name, spec in zip(self.names, self.specs, strict=True))
        return [
            tuple(each[start:stop] for each in whole) for start, stop in split_evenly(batch.rows, parts or self._parts)
        ]

    def stand_in(self) -> Part:
        """Return the first row of the training set: for a worker that has to call the model and has no rows."""
        if self._first is None:
            (arrays,) = self.arrays(first_rows(self._training, 1), parts=1)
            self._first = Part(tuple(map(tf.constant, arrays)), 1)
        return self._first

    def _array(self, name: str, spec: Any, columns: Mapping[str, Any]) -> Array:
        value = columns.get(name)
        if not isinstance(value, np.ndarray) or value.dtype == object:
            raise ragged_column_error(name, value)
        fits = spec.shape.is_compatible_with(value.shape)
        if not fits or (value.dtype != self._dtypes[name] and value.dtype != np.float64):
            raise DataError(
                f"{name} is {value.dtype} {list(value.shape[1:])} in this batch and was {spec.dtype.name} "
                f"{[n if n is not None else '?' for n in spec.shape[1:]]} in the first; rows of all batches must be of "
                "one type and shape, but along axes that are None in the model's Input"
            )
        if name.startswith(INPUT):
            check_kept(self._model, int(name[len(INPUT) :]), name, value)
        return np.ascontiguousarray(value, self._dtypes[name])


def _no_rows(spec: Any) -> Array:
    return np.empty([0, *(1 if n is None else n for n in spec.shape[1:])], spec.dtype.as_numpy_dtype)


def first_rows(training: KerasTraining, rows: int = FIRST_ROWS) -> Batch:
    """Of the training set, in the order of its files."""
    with training.dataset.reader(
        "train", batch_size=rows, shuffle=False, prefetch=0, cache_dir=training.cache_dir
    ) as reader:
        return next(iter(reader.epoch(0)))


def _without_tensors(batch: Batch) -> Batch:
    """Its numbers alone: the tensors are on their way, and their memory is to be used again."""
    return Batch({}, batch.rows, batch.global_rows, batch.start, batch.stop)
