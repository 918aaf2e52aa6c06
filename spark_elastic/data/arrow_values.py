"""Arrow columns as numpy arrays, without copies where possible, and the faults that are found in their rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from spark_elastic.data.columns import Column
from spark_elastic.errors import DataError

_MAX_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Fault:
    """A kind of value in one column that cannot be stored. Tasks find faults; the driver raises one error for all."""

    column: str
    rows: int  # the number of rows that have it
    row: int  # the first of these rows, counted within its partition
    found: str  # the value found, in words
    expected: str  # the value expected, in words
    remedy: str = ""
    partition: int = 0  # the partition of the first row
    setting: str = ""  # the argument of `materialize` that the remedy changes
    missing: bool = False  # the value is null, NaN or infinity


class RowsRefused(Exception):
    """A batch cannot be stored; raised by the encoder with all faults of the batch."""

    def __init__(self, *faults: Fault) -> None:
        super().__init__(faults)
        self.faults = faults

    @classmethod
    def at(
        cls, rows: npt.NDArray[Any], first_row: int, column: str, found: str, expected: str, **more: Any
    ) -> RowsRefused:
        """Return the exception for one `Fault`. `rows` are indices into a batch, which may be repeated."""
        distinct = np.unique(rows)
        return cls(Fault(column, len(distinct), first_row + int(distinct[0]), found, expected, **more))


def error_of(faults: Iterable[Fault], rows_seen: int) -> DataError:
    """Return one error for all faults. rows_seen counts the rows that all tasks read until each of them stopped."""
    alike: dict[tuple[str, str], list[Fault]] = defaultdict(list)
    for fault in sorted(faults, key=lambda fault: (fault.partition, fault.row)):
        # The first row's length, which the others should have, differs between partitions; the remedy does not.
        alike[fault.column, fault.remedy or fault.expected].append(fault)
    kinds = [replace(each[0], rows=sum(fault.rows for fault in each)) for each in alike.values()]
    lines = [
        f"column {fault.column!r}: {fault.rows:,} of {rows_seen:,} rows read have {fault.found} (the first is "
        f"row {fault.row:,} of partition {fault.partition}); expected {fault.expected}"
        + (f". {fault.remedy}" if fault.remedy else "")
        for fault in kinds
    ]
    more = f"\n... and {len(lines) - _MAX_SHOWN} more" if len(lines) > _MAX_SHOWN else ""
    return DataError(
        "\n".join(lines[:_MAX_SHOWN]) + more,
        column=kinds[0].column,
        rows=kinds[0].rows,
        found=kinds[0].found,
        expected=kinds[0].expected,
        settings=sorted({fault.setting for fault in kinds if fault.setting}),
    )


@dataclass(frozen=True, slots=True)
class Values:
    """The values of a column for some rows, end to end."""

    flat: npt.NDArray[Any]  # all values, one axis
    # The number of values of each row. None: all rows have `width`, which is not 0.
    lengths: npt.NDArray[np.int64] | None
    width: int = 0  # the number of values of every row, if `lengths` is None
    inner: tuple[int, ...] = ()  # for nested arrays, the shape of each of the `lengths` elements

    def lengths_of(self, rows: int) -> npt.NDArray[np.int64]:
        """Return the number of values of each row; `rows` is the number of rows."""
        return self.lengths if self.lengths is not None else np.full(rows, self.width, np.int64)


@dataclass(frozen=True, slots=True)
class SparseValues:
    """Vectors of one size as compressed sparse rows."""

    counts: npt.NDArray[np.int64]  # the number of stored values of each row
    indices: npt.NDArray[np.int32]  # the index of each stored value, of all rows end to end
    flat: npt.NDArray[Any]  # the stored values of all rows end to end
    size: int


def values_of(column: Column, array: Any, first_row: int) -> Values | SparseValues:
    """Return the values of a column. Raise RowsRefused for nulls, or inner arrays of different lengths."""
    if array.null_count:
        rows, expected = np.flatnonzero(nulls(array)), "a value in every row"
        remedy = "Fill or drop them: df.na.fill, df.na.drop"
        if column.source != "scalar":  # nor does `missing` know its length
            remedy = "Leave them out (missing='skip', df.na.drop), or give them a value with F.coalesce"
        raise RowsRefused.at(rows, first_row, column.name, "null", expected, remedy=remedy, missing=True)
    if column.source == "scalar":
        return Values(_numbers(array), None, 1)
    if column.source == "vector":
        return _vectors(column, array, first_row)
    if column.source == "list":
        return _lists(column, array, column.depth, first_row)
    _, offsets, data = array.buffers()  # of binary or text
    ends = np.frombuffer(offsets, np.int64 if str(array.type).startswith("large_") else np.int32)
    ends = ends[array.offset : array.offset + len(array) + 1]
    return _ragged(np.frombuffer(data or b"", np.uint8)[ends[0] : ends[-1]], np.diff(ends))


def nulls(array: Any) -> npt.NDArray[np.bool_]:
    """Return which elements of an Arrow array are null."""
    found: npt.NDArray[np.bool_] = array.is_null().to_numpy(zero_copy_only=False)
    return found


def missing_rows(array: Any, allow_nan: bool) -> npt.NDArray[np.bool_]:
    """Return which rows have a null, or a non-finite value unless allow_nan; arrays and vectors are searched too."""
    from pyarrow import compute, types

    missing = nulls(array).copy()
    if types.is_struct(array.type):  # a vector: (type, size, indices, values)
        array = array.flatten()[3]
    if types.is_list(array.type) or types.is_large_list(array.type):
        lengths = compute.fill_null(compute.list_value_length(array), 0).to_numpy()
        inner = missing_rows(array.flatten(), allow_nan)
        missing[_owners(lengths)[inner]] = True
    elif types.is_floating(array.type) and not allow_nan:
        missing |= ~np.isfinite(compute.fill_null(array, 0).to_numpy())
    return missing


def filled(array: Any, value: float, allow_nan: bool) -> Any:
    """Return numbers, or arrays or vectors of them, with a value in place of nulls, and of what is not finite.

    With `allow_nan`, NaN and infinity stay. A null in place of a whole array stays, and so do other types.
    """
    import pyarrow as pa
    from pyarrow import compute, types

    kind = array.type
    if types.is_struct(kind):  # a vector: (type, size, indices, values)
        parts = [*array.flatten()[:3], filled(array.flatten()[3], value, allow_nan)]
        return pa.StructArray.from_arrays(parts, fields=list(kind), mask=array.is_null())
    if types.is_list(kind) or types.is_large_list(kind):
        lengths = compute.fill_null(compute.list_value_length(array), 0).to_numpy()
        inner = filled(array.flatten(), value, allow_nan)
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
        made = pa.list_(kind.value_field.with_type(inner.type))
        return pa.ListArray.from_arrays(offsets, inner, type=made, mask=array.is_null())
    if types.is_floating(kind):
        put = pa.scalar(value, kind)
        known = compute.fill_null(array, put)
        return known if allow_nan else compute.if_else(compute.is_finite(known), known, put)
    if not array.null_count or not (types.is_integer(kind) or types.is_boolean(kind)):
        return array
    if value != int(value) or (types.is_boolean(kind) and value not in (0, 1)):  # there is no such value
        return compute.fill_null(array.cast(pa.float64()), pa.scalar(float(value)))
    if types.is_boolean(kind):
        return compute.fill_null(array, pa.scalar(bool(value)))
    return compute.fill_null(array.cast(pa.int64()), pa.scalar(int(value), pa.int64()))


def _ragged(flat: npt.NDArray[Any], lengths: npt.NDArray[Any], inner: tuple[int, ...] = ()) -> Values:
    if len(lengths) and lengths[0] > 0 and (lengths == lengths[0]).all():
        return Values(flat, None, int(lengths[0]), inner)
    return Values(flat, lengths.astype(np.int64), 0, inner)


def _numbers(array: Any) -> npt.NDArray[Any]:
    """Return a primitive Arrow array without nulls. Dates and times become int64."""
    from pyarrow import types

    kind = array.type
    if types.is_date32(kind):
        numbers: npt.NDArray[Any] = array.view("int32").to_numpy()
        return numbers.astype(np.int64)
    if types.is_temporal(kind):
        array = array.view("int64")
    found: npt.NDArray[Any] = array.to_numpy(zero_copy_only=False)  # booleans are bits in Arrow
    return found


def _lists(column: Column, array: Any, depth: int, first_row: int) -> Values:
    offsets = array.offsets.to_numpy()
    lengths = np.diff(offsets)
    child = array.flatten()
    if child.null_count:
        rows, found, expected = _owners(lengths)[nulls(child)], "null within the array", "a value in every element"
        remedy = "Fill them: F.transform(column, lambda x: F.coalesce(x, F.lit(0)))"
        raise RowsRefused.at(rows, first_row, column.name, found, expected, remedy=remedy, missing=True)
    if depth == 1:
        return _ragged(_numbers(child), lengths)
    below = _lists(column, child, depth - 1, 0)
    if below.lengths is not None:
        different = np.flatnonzero(below.lengths != below.lengths[0])
        rows, found = _owners(lengths)[different], f"inner arrays of {int(below.lengths[different[0]])}"
        expected = f"inner arrays of {int(below.lengths[0])} as in the first"
        remedy = "Pad them, or flatten the column"
        raise RowsRefused.at(rows, first_row, column.name, found, expected, remedy=remedy)
    return _ragged(below.flat, lengths, (below.width, *below.inner))


def _owners(lengths: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return the row of each value; `lengths` are the numbers of values of each row."""
    return np.repeat(np.arange(len(lengths)), lengths)


def _vectors(column: Column, array: Any, first_row: int) -> Values | SparseValues:
    """Return the values of structs (type, size, indices, values); dense ones, of type 1, have no size and indices."""
    import pyarrow.compute as pc

    kinds, sizes, indices, values = array.flatten()
    dense = kinds.to_numpy() == 1
    counts = np.diff(values.offsets.to_numpy()).astype(np.int64)
    flat = values.flatten().to_numpy()
    if dense.all():
        return _ragged(flat, counts)
    lengths = np.where(dense, counts, pc.fill_null(sizes, 0).to_numpy())
    if (lengths != lengths[0]).any():  # the encoder reports the row that differs from the first one
        return Values(flat, lengths.astype(np.int64))
    size = int(lengths[0])
    if not dense.any():
        return SparseValues(counts, indices.flatten().to_numpy(), flat, size)
    # Dense and sparse vectors, as a VectorAssembler makes them: a dense row has all indices.
    owner = np.repeat(dense, counts)
    places = np.empty(len(flat), np.int32)
    places[~owner] = indices.flatten().to_numpy()
    places[owner] = np.tile(np.arange(size, dtype=np.int32), int(dense.sum()))
    keep = ~owner | (flat != 0)
    rows = np.repeat(np.arange(len(counts)), counts)[keep]
    return SparseValues(np.bincount(rows, minlength=len(counts)).astype(np.int64), places[keep], flat[keep], size)
