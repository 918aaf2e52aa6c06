"""The columns that `transform` adds: made of the model's outputs, as Arrow arrays of the types that Spark uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from spark_elastic.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

Array = npt.NDArray[Any]
_FEW = 32  # classes
BY_CLASS = ("argmax", "argmax_probability")  # rules for outputs with one value per class: a logit, or a probability


@dataclass(frozen=True, slots=True)
class OutputShape:
    """The dtype ("<f4") and the shape of one row of a model's output. The lengths of the axes may differ later."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AddedColumn:
    """A column that `transform` adds.

    Attributes:
        made: "raw": the output number `output`, unchanged; "prediction", "probability" or "raw_prediction": made of
            output 0 by `rule`.
    """

    name: str
    made: str
    output: int
    rule: str
    shape: OutputShape
    as_vector: bool = False  # store a Spark ML vector

    def values(self, outputs: Sequence[Array]) -> Array:
        """Return the column's values, [rows, ...], given all outputs of the model, each [rows, ...]."""
        output = outputs[self.output]
        if self.made == "raw":
            if output.ndim - 1 != len(self.shape.shape):
                raise DataError(
                    f"output {self.output} of the model has shape {list(output.shape)} here; when it was fitted, a row "
                    f"had shape {list(self.shape.shape)}"
                )
            return output
        return _MADE[self.made](output, self.rule)

    def plain(self) -> AddedColumn:
        """Return the same column with arrays in place of vectors."""
        return replace(self, as_vector=False)


def prediction(output: Array, rule: str) -> Array:
    """Return the predictions, float64 [rows], of an output [rows], [rows, 1] or, for `BY_CLASS`, [rows, classes]."""
    if rule in BY_CLASS:
        return np.asarray(output.argmax(axis=1), np.float64)
    flat = output.reshape(len(output))
    if rule == "value":
        return flat.astype(np.float64)
    if rule == "sign":
        return np.where(flat > 0, 1.0, -1.0)
    threshold = 0.0 if rule == "binary_logit" else 0.5
    return (flat > threshold).astype(np.float64)


def probability(output: Array, rule: str) -> Array:
    """Return the probability of each class, float64 [rows, classes]."""
    values = output.astype(np.float64)
    if rule == "argmax_probability":
        return values
    if rule == "argmax":
        # numpy reduces a short last axis slowly, row by row
        axis, raised = (0, values.T.copy()) if values.shape[1] < _FEW else (1, values.copy())
        raised -= raised.max(axis=axis, keepdims=True)
        np.exp(raised, out=raised)
        raised /= raised.sum(axis=axis, keepdims=True)
        return np.ascontiguousarray(raised if axis else raised.T)
    flat = values.reshape(len(values))
    # the sigmoid, in a form that overflows for no logit
    positive = np.exp(-np.logaddexp(0.0, -flat)) if rule == "binary_logit" else flat
    return np.stack([1 - positive, positive], axis=1)


def raw_prediction(output: Array, rule: str) -> Array:
    """Return the score of each class, [rows, classes]: the larger, the more likely the class is."""
    if rule != "binary_logit":
        return output.astype(np.float64, copy=False) if rule in BY_CLASS else probability(output, rule)
    flat = output.astype(np.float64).reshape(len(output))
    return np.stack([-flat, flat], axis=1)


_MADE = {"prediction": prediction, "probability": probability, "raw_prediction": raw_prediction}


def suits(rule: str, shape: tuple[int, ...]) -> bool:
    """Return whether this rule can make a prediction of an output whose rows have this shape."""
    return len(shape) == 1 if rule in BY_CLASS else shape in ((), (1,))


def spark_type(column: AddedColumn) -> Any:
    from pyspark.ml.linalg import VectorUDT
    from pyspark.sql import types

    if column.as_vector:
        return VectorUDT()
    if column.made == "prediction":
        return types.DoubleType()
    dtype, depth = np.dtype(column.shape.dtype), len(column.shape.shape)
    if dtype.kind == "f":
        made = types.DoubleType() if depth == 0 or dtype.itemsize == 8 else types.FloatType()
    elif dtype.kind == "b":
        made = types.BooleanType()
    else:
        made = types.IntegerType() if np.can_cast(dtype, np.int32) else types.LongType()
    for _ in range(depth):
        made = types.ArrayType(made)
    return made


def arrow_array(column: AddedColumn, values: Array) -> pa.Array:
    """Return a column's values in exactly the Arrow type that Spark uses for `spark_type`."""
    import pyarrow as pa

    if column.as_vector:
        return _vectors(values.astype(np.float64, copy=False))
    if values.ndim == 1 and values.dtype.kind == "f":
        return pa.array(values.astype(np.float64, copy=False))
    if values.dtype.str[1:] == "f2":
        values = values.astype(np.float32)
    elif values.dtype.kind in "iu":
        values = values.astype(np.int32 if np.can_cast(values.dtype, np.int32) else np.int64, copy=False)
    made = pa.array(np.ascontiguousarray(values).reshape(-1))
    for axis in range(values.ndim - 1, 0, -1):
        size, count = values.shape[axis], int(np.prod(values.shape[:axis]))
        made = pa.ListArray.from_arrays(pa.array(np.arange(count + 1) * size, pa.int32()), made)
    return made


def _vectors(values: Array) -> pa.Array:
    """Return values [rows, size] as dense vectors in the struct of VectorUDT."""
    import pyarrow as pa

    rows, size = values.shape
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    offsets = pa.array(np.arange(rows + 1) * size, pa.int32())
    # Spark compares the types exactly, so the values in the lists must be declared as never null.
    numbers, indices = (pa.list_(pa.field("element", kind, nullable=False)) for kind in (pa.float64(), pa.int32()))
    parts = {
        pa.field("type", pa.int8(), nullable=False): pa.array(np.ones(rows, np.int8)),
        pa.field("size", pa.int32()): pa.nulls(rows, pa.int32()),
        pa.field("indices", indices): pa.nulls(rows, indices),
        pa.field("values", numbers): pa.ListArray.from_arrays(offsets, flat, type=numbers),
    }
    return pa.StructArray.from_arrays(list(parts.values()), fields=list(parts))
