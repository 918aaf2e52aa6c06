"""Arrow columns as numpy arrays, without copies where that is possible. Nulls are refused here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from spark_elastic.data.columns import Column
from spark_elastic.errors import DataError

# What is wrong with rows: found by tasks, put together by the driver into one error.

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind of trouble in one column.

    rows: how many rows have it. row: the first of them, counted in its partition. found, expected, remedy: for people.
    setting: the argument of `materialize` that the remedy changes. missing: the rows have null, NaN or infinity.
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
    """Raised by the encoder for a batch that cannot be stored."""

    def __init__(self, *faults: Fault) -> None:
        super().__init__(faults)
        self.faults = faults


def error_of(faults: Iterable[Fault], rows_seen: int) -> DataError:
    """One error for all of them. rows_seen: by all tasks, up to where each stopped."""
    first: dict[tuple[str, str], Fault] = {}
    counts: dict[tuple[str, str], int] = {}
    for fault in sorted(faults, key=lambda fault: (fault.partition, fault.row)):
        about = (fault.column, fault.expected)
        first.setdefault(about, fault)
        counts[about] = counts.get(about, 0) + fault.rows
    lines = []
    for about, fault in first.items():
        lines.append(
            f"column {fault.column!r}: {counts[about]:,} of {rows_seen:,} rows looked at hold {fault.found} (the first "
            f"is row {fault.row:,} of partition {fault.partition}); expected {fault.expected}"
            + (f". {fault.remedy}" if fault.remedy else "")
        )
    more = f"\n... and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    shown = next(iter(first.values()))
    return DataError(
        "\n".join(lines[:_SHOWN]) + more,
        column=shown.column,
        rows=counts[shown.column, shown.expected],
        found=shown.found,
        expected=shown.expected,
        settings=sorted({fault.setting for fault in first.values() if fault.setting}),
    )


_FILL = "Fill or drop them: df.na.fill, df.na.drop"


@dataclass(frozen=True, slots=True)
class Values:
    """A column's values for some rows, end to end.

    flat: one axis. lengths: how many each row has, int64, shape (rows,); None: all have `width`, which is not 0.
    inner: of nested arrays, the shape of what a row has `lengths` of.
    """

    flat: npt.NDArray[Any]
    lengths: npt.NDArray[np.int64] | None
    width: int = 0
    inner: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SparseValues:
    """Vectors of one size as compressed rows: counts int64 [rows]; indices int32 and flat, of all rows end to end."""

    counts: npt.NDArray[np.int64]
    indices: npt.NDArray[np.int32]
    flat: npt.NDArray[Any]
    size: int


def values_of(column: Column, array: Any, first_row: int) -> Values | SparseValues:
    """first_row: the number of the batch's first row, for messages. Raises: RowsRefused."""
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
    """Which rows of a column have no value to compute with: null, NaN or infinity, in an array or vector as well.

    allow_nan: NaN and infinity are values.
    """
    from pyarrow import compute, types

    missing: npt.NDArray[np.bool_] = array.is_null().to_numpy(zero_copy_only=False).copy()
    if types.is_struct(array.type):  # a vector: (type, size, indices, values), of which a dense one lacks some
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
    """A primitive Arrow array without nulls. Dates and times become int64."""
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
    """Offsets, shape (rows + 1,), and the data that they point into."""
    from pyarrow import types

    wide = types.is_large_binary(array.type) or types.is_large_string(array.type)
    _, offsets, data = array.buffers()
    ends = np.frombuffer(offsets, np.int64 if wide else np.int32)[array.offset : array.offset + len(array) + 1]
    return ends, np.frombuffer(data if data is not None else b"", np.uint8)


def _vectors(column: Column, array: Any, first_row: int) -> Values | SparseValues:
    """Spark sends (type, size, indices, values); type 1 is dense, and has neither size nor indices."""
    import pyarrow.compute as pc

    kinds, sizes, indices, values = array.flatten()
    dense = kinds.to_numpy() == 1
    counts = np.diff(values.offsets.to_numpy()).astype(np.int64)
    flat = values.flatten().to_numpy()
    if dense.all():
        return _ragged(flat, counts)
    lengths = np.where(dense, counts, pc.fill_null(sizes, 0).to_numpy())
    if (lengths != lengths[0]).any():  # the encoder says which row differs from the first of all
        return Values(flat, lengths.astype(np.int64))
    size = int(lengths[0])
    if not dense.any():
        return SparseValues(counts, indices.flatten().to_numpy(), flat, size)
    # Both kinds, as a VectorAssembler leaves them: a dense row's indices are all of them.
    owner = np.repeat(dense, counts)
    places = np.empty(len(flat), np.int32)
    places[~owner] = indices.flatten().to_numpy()
    places[owner] = np.tile(np.arange(size, dtype=np.int32), int(dense.sum()))
    keep = ~owner | (flat != 0)
    rows = np.repeat(np.arange(len(counts)), counts)[keep]
    return SparseValues(np.bincount(rows, minlength=len(counts)).astype(np.int64), places[keep], flat[keep], size)
