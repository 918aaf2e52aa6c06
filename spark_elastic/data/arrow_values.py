"""Arrow columns as numpy arrays, without copies where possible, and the faults that are found in their rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from spark_elastic.data.columns import Column
from spark_elastic.errors import DataError

_MAX_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Fault:
    """A kind of value in one column that cannot be stored. Tasks find faults; the driver raises one error for all.

    Attributes:
        column: The column.
        rows: The number of rows that have it.
        row: The first of them, counted within its partition.
        found: The value found, in words.
        expected: The value expected, in words.
        remedy: A remedy, in words.
        partition: The partition of the first row.
        setting: The argument of `materialize` that the remedy changes.
        missing: The value is null, NaN or infinity.
    """

    column: str
    rows: int
    row: int
    found: str
    expected: str
    remedy: str = ""
    partition: int = 0
    setting: str = ""
    missing: bool = False


class RowsRefused(Exception):
    """A batch cannot be stored; raised by the encoder with all faults of the batch."""

    def __init__(self, *faults: Fault) -> None:
        super().__init__(faults)
        self.faults = faults


def error_of(faults: Iterable[Fault], rows_seen: int) -> DataError:
    """Return one error for all faults. rows_seen counts the rows that all tasks read until each of them stopped."""
    first: dict[tuple[str, str], Fault] = {}
    counts: Counter[tuple[str, str]] = Counter()
    for fault in sorted(faults, key=lambda fault: (fault.partition, fault.row)):
        about = (fault.column, fault.expected)
        first.setdefault(about, fault)
        counts[about] += fault.rows
    lines = []
    for about, fault in first.items():
        lines.append(
            f"column {fault.column!r}: {counts[about]:,} of {rows_seen:,} rows read have {fault.found} (the first is "
            f"row {fault.row:,} of partition {fault.partition}); expected {fault.expected}"
            + (f". {fault.remedy}" if fault.remedy else "")
        )
    more = f"\n... and {len(lines) - _MAX_SHOWN} more" if len(lines) > _MAX_SHOWN else ""
    shown = next(iter(first.values()))
    return DataError(
        "\n".join(lines[:_MAX_SHOWN]) + more,
        column=shown.column,
        rows=counts[shown.column, shown.expected],
        found=shown.found,
        expected=shown.expected,
        settings=sorted({fault.setting for fault in first.values() if fault.setting}),
    )


_FILL = "Fill or drop them: df.na.fill, df.na.drop"


@dataclass(frozen=True, slots=True)
class Values:
    """The values of a column for some rows, end to end.

    Attributes:
        flat: All values, one axis.
        lengths: The number of values of each row. None: all rows have `width`, which is not 0.
        width: The number of values of every row, if `lengths` is None.
        inner: For nested arrays, the shape of each of the `lengths` elements.
    """

    flat: npt.NDArray[Any]
    lengths: npt.NDArray[np.int64] | None
    width: int = 0
    inner: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SparseValues:
    """Vectors of one size as compressed sparse rows.

    Attributes:
        counts: The number of stored values of each row.
        indices: The index of each stored value, of all rows end to end.
        flat: The stored values of all rows end to end.
        size: The size of the vectors.
    """

    counts: npt.NDArray[np.int64]
    indices: npt.NDArray[np.int32]
    flat: npt.NDArray[Any]
    size: int


def values_of(column: Column, array: Any, first_row: int) -> Values | SparseValues:
    """Return the values of a column. first_row is the number of the batch's first row, for messages.

    Raises:
        RowsRefused: The column has nulls, or inner arrays of different lengths.
    """
    if array.null_count:
        empty = np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))
        raise RowsRefused(
            Fault(
                column.name, len(empty), first_row + int(empty[0]), "null", "a value in every row", _FILL, missing=True
            )
        )
    if column.source == "scalar":
        return Values(_numbers(array), None, 1)
    if column.source == "vector":
        return _vectors(column, array, first_row)
    if column.source == "list":
        return _lists(column, array, column.depth, first_row)
    ends, data = _bytes(array)
    return _ragged(data[ends[0] : ends[-1]], np.diff(ends))


def missing_rows(array: Any, allow_nan: bool) -> npt.NDArray[np.bool_]:
    """Return which rows have a null, or a non-finite value unless allow_nan; arrays and vectors are searched too."""
    from pyarrow import compute, types

    missing: npt.NDArray[np.bool_] = array.is_null().to_numpy(zero_copy_only=False).copy()
    if types.is_struct(array.type):  # a vector: (type, size, indices, values)
        array = array.flatten()[3]
    if types.is_list(array.type) or types.is_large_list(array.type):
        lengths = compute.fill_null(compute.list_value_length(array), 0).to_numpy()
        inner = missing_rows(array.flatten(), allow_nan)
        missing[np.repeat(np.arange(len(missing)), lengths)[inner]] = True
    elif types.is_floating(array.type) and not allow_nan:
        missing |= ~np.isfinite(compute.fill_null(array, 0).to_numpy())
    return missing


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
        places = np.flatnonzero(child.is_null().to_numpy(zero_copy_only=False))
        rows = np.unique(np.searchsorted(np.cumsum(lengths), places, side="right"))
        raise RowsRefused(
            Fault(
                column.name,
                len(rows),
                first_row + int(rows[0]),
                "null within the array",
                "a value in every element",
                "Fill them: F.transform(column, lambda x: F.coalesce(x, F.lit(0)))",
                missing=True,
            )
        )
    if depth == 1:
        return _ragged(_numbers(child), lengths)
    below = _lists(column, child, depth - 1, 0)
    if below.lengths is not None:
        different = np.flatnonzero(below.lengths != below.lengths[0])
        rows = np.unique(np.searchsorted(np.cumsum(lengths), different, side="right"))
        raise RowsRefused(
            Fault(
                column.name,
                len(rows),
                first_row + int(rows[0]),
                f"inner arrays of {int(below.lengths[different[0]])}",
                f"inner arrays of {int(below.lengths[0])} as in the first",
                "Pad them, or flatten the column",
            )
        )
    return _ragged(below.flat, lengths, (below.width, *below.inner))


def _bytes(array: Any) -> tuple[npt.NDArray[Any], npt.NDArray[np.uint8]]:
    """Return the offsets of a binary or string array, shape (rows + 1,), and its data."""
    from pyarrow import types

    wide = types.is_large_binary(array.type) or types.is_large_string(array.type)
    _, offsets, data = array.buffers()
    ends = np.frombuffer(offsets, np.int64 if wide else np.int32)[array.offset : array.offset + len(array) + 1]
    return ends, np.frombuffer(data if data is not None else b"", np.uint8)


def _vectors(column: Column, array: Any, first_row: int) -> Values | SparseValues:
    """Return the values of a vector column: structs (type, size, indices, values).

    Dense vectors are of type 1, and have neither size nor indices.
    """
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
