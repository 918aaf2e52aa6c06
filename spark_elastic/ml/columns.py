"""Columns of an Arrow batch as the tensors that a model was trained on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from spark_elastic.data.layout import Kind, TensorField
from spark_elastic.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

Array = npt.NDArray[Any]


def tensor(batch: pa.RecordBatch, field: TensorField) -> Any:
    """The tensor of a field: an array [rows, *field.shape], or a list with an entry a row for variable lengths.

    Raises: DataError: nulls, or arrays of another length than in training; with the column's name and the numbers.
    """
    columns = [_without_nulls(batch, name) for name in field.columns]
    if field.kind in (Kind.BYTES, Kind.STRING):
        return columns[0].to_pylist()
    if field.kind is Kind.ARRAY:
        return [np.asarray(each, field.dtype) for each in columns[0].to_pylist()]
    parts = [_flat(column, name) for column, name in zip(columns, field.columns, strict=True)]
    rows, expected = batch.num_rows, int(np.prod(field.shape))
    found = sum(part.shape[1] for part in parts)
    if found != expected:
        held = ", ".join(f"{name!r} has {part.shape[1]}" for name, part in zip(field.columns, parts, strict=True))
        raise DataError(
            f"the model takes {expected} values a row for {field.name} (shape {list(field.shape)}), and there are "
            f"{found}: {held}"
        )
    if len(parts) == 1:
        return parts[0].astype(field.dtype, copy=False).reshape(rows, *field.shape)
    joined = np.empty((rows, expected), field.dtype)
    np.concatenate(parts, axis=1, out=joined, casting="unsafe")
    return joined.reshape(rows, *field.shape)


def _without_nulls(batch: pa.RecordBatch, name: str) -> Any:
    column = batch.column(batch.schema.get_field_index(name))
    if column.null_count:
        raise DataError(
            f"column {name!r} is null in {column.null_count} of {batch.num_rows} rows; fill the nulls "
            f"(df.fillna) or drop the rows (df.dropna) first"
        )
    return column


def _flat(column: Any, name: str) -> Array:
    """The values, [rows, values a row]."""
    import pyarrow as pa

    kind, rows = column.type, len(column)
    if pa.types.is_struct(kind):
        return _vectors(column, name)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        offsets = np.asarray(column.offsets)
        lengths = np.diff(offsets)
        if rows and (lengths != lengths[0]).any():
            other = int(np.flatnonzero(lengths != lengths[0])[0])
            raise DataError(
                f"the arrays of column {name!r} differ in length: {lengths[0]} values in one row, {lengths[other]} "
                "in another; the model needs equal ones"
            )
        values = column.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
        if values.null_count:
            raise DataError(f"there are {values.null_count} nulls within the arrays of column {name!r}; fill them")
        return _scalars(values, name).reshape(rows, -1 if rows else 0)
    return _scalars(column, name).reshape(rows, 1)


def _scalars(column: Any, name: str) -> Array:
    import pyarrow as pa

    kind = column.type
    if pa.types.is_decimal(kind):
        column = column.cast(pa.float64())
    elif pa.types.is_boolean(kind):
        column = column.cast(pa.uint8())
    elif pa.types.is_date32(kind):
        column = column.cast(pa.int32())
    elif pa.types.is_timestamp(kind):
        column = column.cast(pa.int64())
    elif not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        raise DataError(f"column {name!r} is {kind}, which the model cannot take; cast it to a number")
    return np.asarray(column.to_numpy(zero_copy_only=False))


def _vectors(column: Any, name: str) -> Array:
    """Spark ML's vectors, dense or sparse, as VectorUDT stores them."""
    names = [column.type.field(i).name for i in range(column.type.num_fields)]
    if names != ["type", "size", "indices", "values"]:
        raise DataError(f"column {name!r} is a struct of {', '.join(names)}; take its parts apart with df.select")
    kinds, sizes, indices, values = column.flatten()
    rows = len(column)
    ends = np.asarray(values.offsets)
    counts = np.diff(ends)
    flat = np.asarray(values.values)[ends[0] : ends[-1]]
    dense = np.asarray(kinds) == 1
    lengths = np.where(dense, counts, np.asarray(sizes.fill_null(0)))
    if rows and (lengths != lengths[0]).any():
        other = int(np.flatnonzero(lengths != lengths[0])[0])
        raise DataError(f"the vectors of column {name!r} differ in size: {lengths[0]} and {lengths[other]}")
    size = int(lengths[0]) if rows else 0
    if dense.all():
        return flat.reshape(rows, size)
    out = np.zeros((rows, size))
    row_of = np.repeat(np.arange(rows), counts)
    within = np.arange(len(flat)) - np.repeat(ends[:-1] - ends[0], counts)
    where = indices.offsets
    index = np.asarray(indices.values)[int(where[0].as_py()) : int(where[-1].as_py())]
    is_sparse = ~dense[row_of]
    within[is_sparse] = index
    out[row_of, within] = flat
    return out
