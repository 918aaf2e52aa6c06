"""What runs on the executors in `transform`: batches of columns in, the same with the model's outputs appended out.

A Python worker process loads a model once, however many tasks of however many jobs it serves.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from spark_elastic.data.layout import TensorField
from spark_elastic.errors import DataError
from spark_elastic.ml.columns import tensor
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
    """One `transform`. model: a Spark broadcast of the pickled SavedPredictor; key: what it is cached under."""

    key: str
    model: Any
    inputs: tuple[TensorField, ...]
    added: tuple[AddedColumn, ...]
    batch_size: int
    inference_fn: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """What mapInArrow runs for each partition."""
        import pyarrow as pa

        for batch in batches:
            if batch.num_rows == 0:
                parts: list[Sequence[Array]] = [[np.empty((0, *c.shape.shape), c.shape.dtype) for c in self.added]]
            else:
                predict = _loaded(self.key, self.model)
                starts = range(0, batch.num_rows, self.batch_size)
                parts = [self._part(predict, batch.slice(start, self.batch_size)) for start in starts]
            arrays = [arrow_array(c, np.concatenate(each)) for c, each in zip(self.added, zip(*parts), strict=True)]  # noqa: B905
            fields = [pa.field(c.name, each.type, nullable=False) for c, each in zip(self.added, arrays, strict=True)]
            yield pa.RecordBatch.from_arrays([*batch.columns, *arrays], schema=pa.schema([*batch.schema, *fields]))

    def _part(self, predict: Predictor, batch: pa.RecordBatch) -> list[Array]:
        inputs: dict[str, Any] = {field.name: tensor(batch, field) for field in self.inputs}
        if self.inference_fn is not None:
            inputs = dict(self.inference_fn(inputs))
        outputs = predict(inputs)
        for index, output in enumerate(outputs):
            if output.shape[:1] != (batch.num_rows,):
                raise DataError(
                    f"output {index} of the model has shape {list(output.shape)} for {batch.num_rows} rows; the first "
                    "axis of each output must be the rows"
                )
        return [column.values(outputs) for column in self.added]


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
