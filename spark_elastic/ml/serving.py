"""What runs on the executors in `transform`: batches of columns in, the same with the model's outputs appended out.

A Python worker process loads a model once, however many tasks of however many jobs it serves.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from spark_elastic.data.columns import Tensor
from spark_elastic.errors import DataError
from spark_elastic.ml.features import HANDLE_INVALID, FeatureReader
from spark_elastic.ml.outputs import AddedColumn, arrow_array

if TYPE_CHECKING:
    import pyarrow as pa

Array = npt.NDArray[Any]
KEPT = 2
"""Models that a Python worker keeps loaded: the one in use, and one before it."""


class Predictor(Protocol):
    """A loaded model. inputs: by name, [rows, ...]. Returns: each output of the model, [rows, ...]."""

    def __call__(self, inputs: Mapping[str, Any]) -> list[Array]: ...


class SavedPredictor(Protocol):
    """A model on its way to the executors."""

    def load(self) -> Predictor: ...


@dataclass(frozen=True)
class Serving:
    """One `transform`. model: a Spark broadcast of the pickled SavedPredictor; key: what it is cached under; names: of
    the columns, in their order, if they come (and go) under others; handle_invalid: "error", "skip" or "keep" rows that
    have no value to compute with, or no prediction because the model's output is NaN."""

    key: str
    model: Any
    inputs: tuple[Tensor, ...]
    added: tuple[AddedColumn, ...]
    batch_size: int
    inference_fn: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None
    names: tuple[str, ...] = ()
    handle_invalid: str = "error"

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """What mapInArrow runs for each partition."""
        import pyarrow as pa

        read = FeatureReader(self.inputs)
        for plain in batches:
            batch = pa.RecordBatch.from_arrays(plain.columns, self.names or plain.schema.names)
            valid = np.arange(batch.num_rows)
            if self.handle_invalid != "error" and batch.num_rows:
                valid = np.flatnonzero(~read.missing(batch))
            given = batch if len(valid) == batch.num_rows else batch.take(pa.array(valid))
            if len(valid):
                values, undecided = self._values(_loaded(self.key, self.model), read(given), len(valid))
                if undecided.any():
                    self._refuse_undecided(undecided)
                    valid, values = valid[~undecided], [each[~undecided] for each in values]
            else:
                values = [np.empty((0, *column.shape.shape), column.shape.dtype) for column in self.added]
            arrays = [arrow_array(column, each) for column, each in zip(self.added, values, strict=True)]
            if len(valid) < batch.num_rows and self.handle_invalid == "keep":
                places = np.full(batch.num_rows, -1)
                places[valid] = np.arange(len(valid))
                taken = pa.array(places, mask=places < 0)
                arrays = [each.take(taken) for each in arrays]
            elif len(valid) < batch.num_rows:
                plain = plain.take(pa.array(valid))
            nullable = self.handle_invalid == "keep"
            fields = [pa.field(c.name, a.type, nullable=nullable) for c, a in zip(self.added, arrays, strict=True)]
            yield pa.RecordBatch.from_arrays([*plain.columns, *arrays], schema=pa.schema([*plain.schema, *fields]))

    def _refuse_undecided(self, undecided: npt.NDArray[np.bool_]) -> None:
        if self.handle_invalid == "error":
            raise DataError(
                f"the model's first output is NaN for {int(undecided.sum())} of {len(undecided)} rows whose features "
                "are numbers, and no prediction can be made of it. Look at the model's weights and at rows of "
                f"unusual size. {HANDLE_INVALID}",
                rows=int(undecided.sum()),
            )

    def _values(
        self, predict: Predictor, features: dict[str, Any], rows: int
    ) -> tuple[list[Array], npt.NDArray[np.bool_]]:
        """The values of each added column for the rows of one Arrow batch; and which rows have none, see `_part`."""
        parts, undecided = [], []
        for start in range(0, rows, self.batch_size):
            part = {name: value[start : start + self.batch_size] for name, value in features.items()}
            values, wrong = self._part(predict, part, min(self.batch_size, rows - start))
            parts.append(values)
            undecided.append(wrong)
        whole = [np.concatenate(each) if len(each) > 1 else each[0] for each in zip(*parts, strict=True)]
        return whole, np.concatenate(undecided)

    def _part(self, predict: Predictor, inputs: dict[str, Any], rows: int) -> tuple[list[Array], npt.NDArray[np.bool_]]:
        """And the rows of which no class can be told: their first output is NaN, of which argmax would make one."""
        if self.inference_fn is not None:
            inputs = dict(self.inference_fn(inputs))
        outputs = predict(inputs)
        for index, output in enumerate(outputs):
            if output.shape[:1] != (rows,):
                raise DataError(
                    f"output {index} of the model has shape {list(output.shape)} for {rows} rows; the first axis of "
                    "each output must be the rows"
                )
        undecided: npt.NDArray[np.bool_] = np.zeros(rows, bool)
        if outputs[0].dtype.kind == "f" and any(c.made != "raw" and c.rule != "value" for c in self.added):
            undecided |= np.isnan(outputs[0]).reshape(rows, -1).any(axis=1)
        return [column.values(outputs) for column in self.added], undecided


_lock = threading.Lock()
_models: OrderedDict[str, Predictor] = OrderedDict()


def _loaded(key: str, broadcast: Any) -> Predictor:
    with _lock:
        if key not in _models:
            import cloudpickle

            saved: SavedPredictor = cloudpickle.loads(broadcast.value)
            _models[key] = saved.load()
            while len(_models) > KEPT:
                _models.popitem(last=False)
        _models.move_to_end(key)
        return _models[key]
