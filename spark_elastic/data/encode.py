"""Encode Arrow batches as blocks of records.

The first row decides the length of the arrays in each column. Those of all other rows must have the same length, unless
the column is padded or of variable length.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from spark_elastic.data.arrow_values import Fault, RowsRefused, SparseValues, Values, values_of
from spark_elastic.data.columns import Column, Tensor
from spark_elastic.data.manifest import Kind, Layout, TensorField
from spark_elastic.data.shards import Blob, Block, encode_sparse

SPARSE_FROM = 4096  # to gather smaller vectors, of up to 16 KB, costs less than to look them up in the sidecar
_SPARSE_BELOW = 0.25


class Encoder:
    """An encoder of the batches of one task, in their order."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self._tensors = tensors
        self.rows = 0  # encoded so far
        self.layout: Layout | None = None  # of the records; None before the first row
        self._flat = np.dtype([])
        self._buffer: npt.NDArray[Any] = np.zeros(0)
        self._lengths: dict[tuple[str, str], int] = {}
        self._inner: dict[tuple[str, str], tuple[int, ...]] = {}

    def encode(self, batch: Any) -> Block:
        """Encode a `RecordBatch` of one row or more, or raise RowsRefused. The block is valid until the next call."""
        faults: list[Fault] = []
        found: dict[tuple[str, str], Values | SparseValues] = {}
        first_row, self.rows = self.rows, self.rows + batch.num_rows
        for tensor in self._tensors:
            for column in tensor.columns:
                try:
                    values = values_of(column, batch.column(column.name), first_row)
                    found[tensor.name, column.name] = self._same_length(tensor, column, values, first_row)
                except RowsRefused as refused:
                    faults += refused.faults
        if faults:
            raise RowsRefused(*dict.fromkeys(faults))
        if self.layout is None:
            self._decide(found, batch.num_rows, first_row)
        assert self.layout is not None
        if len(self._buffer) < batch.num_rows or self._buffer.dtype != self._flat:
            self._buffer = np.zeros(batch.num_rows, self._flat)  # the gaps between fields stay zero
        records = self._buffer[: batch.num_rows]
        blobs = {}
        for tensor, field in zip(self._tensors, self.layout.fields, strict=True):
            try:
                parts = [(column, found[tensor.name, column.name]) for column in tensor.columns]
                if field.kind is Kind.DENSE:
                    self._fill(records[tensor.name], tensor, parts, first_row)
                else:
                    blobs[tensor.name] = _blob(tensor, field, *parts[0], first_row, len(records))
            except RowsRefused as refused:
                faults += refused.faults
        if faults:
            raise RowsRefused(*faults)
        return Block(records.view(self.layout.dtype), blobs)

    def _same_length(
        self, tensor: Tensor, column: Column, values: Values | SparseValues, first_row: int
    ) -> Values | SparseValues:
        """Return the values if all rows have the length of the first row, or at most `pad_to`."""
        if tensor.kind in (Kind.BYTES, Kind.STRING, Kind.ARRAY) or column.source == "scalar":
            return values
        key, rows = (tensor.name, column.name), self.rows - first_row
        if isinstance(values, SparseValues):
            lengths = np.full(rows, values.size)
        else:
            inner = self._inner.setdefault(key, values.inner)
            if inner != values.inner:
                found = f"inner arrays of shape {list(values.inner)}"
                expected_shape = f"inner arrays of shape {list(inner)} as in the first row"
                raise RowsRefused.at(np.arange(rows), first_row, column.name, found, expected_shape)
            lengths = values.lengths_of(rows)
        noun = "byte strings" if column.source == "binary" else "arrays"
        setting = "pad_to"
        if tensor.pad_to is not None:
            expected = self._lengths.setdefault(key, tensor.pad_to)
            wrong = np.flatnonzero(lengths > expected)
            wanted, remedy = f"arrays of {expected} at most (pad_to)", "Raise pad_to, or F.slice them"
        else:
            expected = self._lengths.setdefault(key, int(lengths[0]))
            wrong = np.flatnonzero(lengths != expected)
            wanted, remedy = f"{noun} of {expected} as in the first row", ""
            if column.source in ("list", "binary") and column.depth < 2:
                remedy = f"Store them padded (pad_to={{{tensor.name!r}: ...}}) or with their own lengths "
                remedy += f"(variable=[{tensor.name!r}])" + (", as files are" if column.source == "binary" else "")
        if expected == 0:
            wrong, wanted, remedy, setting = np.arange(rows), "at least one value", "", ""
        if len(wrong):
            found = f"{noun} of {int(lengths[wrong[0]])}"
            raise RowsRefused.at(wrong, first_row, column.name, found, wanted, remedy=remedy, setting=setting)
        return values

    def _decide(self, found: dict[tuple[str, str], Values | SparseValues], rows: int, first_row: int) -> None:
        fields = []
        for tensor in self._tensors:
            names = tuple(column.name for column in tensor.columns)
            kind = tensor.kind
            shape: tuple[int, ...] = ()
            if kind in (None, Kind.DENSE, Kind.SPARSE):
                only = tensor.columns[0]
                if len(names) == 1 and (only.source != "scalar" or not tensor.stacked):
                    key = (tensor.name, only.name)
                    shape = () if only.source == "scalar" else (self._lengths[key], *self._inner.get(key, ()))
                else:
                    shape = (sum(self._width(tensor, column) for column in tensor.columns),)
                if kind is None:
                    first, kind = found[tensor.name, only.name], Kind.DENSE
                    if isinstance(first, SparseValues) and first.size > SPARSE_FROM:
                        is_sparse = len(first.flat) < _SPARSE_BELOW * len(first.counts) * first.size
                        kind = Kind.SPARSE if is_sparse else Kind.DENSE
                if tensor.shape is not None:
                    if math.prod(tensor.shape) != math.prod(shape):
                        size = f"{math.prod(shape)} values"
                        wanted = f"{math.prod(tensor.shape)} for a shape of {list(tensor.shape)} (shapes=)"
                        raise RowsRefused.at(
                            np.arange(rows), first_row, ", ".join(names), size, wanted, setting="shapes"
                        )
                    shape = tensor.shape
            fields.append(TensorField(tensor.name, names, tensor.dtype, shape, kind=kind))
        self.layout = Layout.of(fields)
        # the same record with one-dimensional tensors, because values come one behind the other
        self._flat = self.layout.record_of(
            [
                np.dtype((field.dtype, (math.prod(field.shape),))) if field.kind is Kind.DENSE else field.record_type
                for field in self.layout.fields
            ]
        )

    def _width(self, tensor: Tensor, column: Column) -> int:
        """Return the number of values of a row of one column; 1 for a scalar, which has no length."""
        key = (tensor.name, column.name)
        return self._lengths.get(key, 1) * math.prod(self._inner.get(key, ()))

    def _fill(
        self, out: npt.NDArray[Any], tensor: Tensor, parts: list[tuple[Column, Values | SparseValues]], first_row: int
    ) -> None:
        """Write a tensor's values to `out`, a view of the records with shape (rows, values of a row)."""
        start = 0
        for column, values in parts:
            width = self._width(tensor, column)
            target = out[:, start : start + width]
            start += width
            if isinstance(values, SparseValues):
                rows = np.repeat(np.arange(len(out)), values.counts)
                target[...] = 0
                target[rows, values.indices] = _checked(tensor, column, values.flat, rows, first_row)
            elif values.lengths is not None or values.width < self._lengths.get((tensor.name, column.name), 0):
                lengths = values.lengths_of(len(out))
                rows = np.repeat(np.arange(len(out)), lengths)
                target[...] = 0
                target[np.arange(width) < lengths[:, None]] = _checked(tensor, column, values.flat, rows, first_row)
            else:
                target[...] = _checked(tensor, column, values.flat, None, first_row, width).reshape(len(out), width)


def _is_lossless(source: np.dtype[Any], target: np.dtype[Any]) -> bool:
    """Return whether `target` can represent every value of `source`. Floats are always checked for NaN and infinity."""
    if source.kind == "f":
        return False
    if source.kind in "iu" and target.kind == "f":
        return 8 * source.itemsize <= np.finfo(target).nmant
    return np.can_cast(source, target)


def _rounded(values: npt.NDArray[Any], stored: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return which integers were rounded when stored as floats. Decimals come as float64 values."""
    exact = 2 << np.finfo(stored.dtype).nmant  # floats represent all integers up to this
    if values.dtype.kind == "f":
        # the decimal's own value is not known any more: 2**53 + 1 has become 2**53
        changed: npt.NDArray[np.bool_] = (np.abs(values) >= 2**53) | (stored.astype(np.float64) != values)
        return changed
    if not len(values) or (int(values.max()) <= exact and int(values.min()) >= -exact):
        return np.zeros(len(values), bool)
    wrong: npt.NDArray[np.bool_] = np.abs(stored.astype(np.float64)) >= 2.0**63  # exceeds int64
    wrong[~wrong] = stored[~wrong].astype(np.int64) != values[~wrong]
    return wrong


def _checked(
    tensor: Tensor,
    column: Column,
    flat: npt.NDArray[Any],
    rows: npt.NDArray[Any] | None,
    first_row: int,
    width: int = 1,
) -> npt.NDArray[Any]:
    """Convert values to the tensor's dtype, or raise RowsRefused. `rows`: of each value; None: `width` values a row."""
    dtype = np.dtype(tensor.dtype)
    if _is_lossless(flat.dtype, dtype):
        return flat.astype(dtype, copy=False)
    setting = "dtypes"
    with np.errstate(over="ignore", invalid="ignore"):
        stored = flat.astype(dtype, copy=False)
        is_float = dtype.kind == flat.dtype.kind == "f" and not column.whole
        if is_float and ((tensor.allow_nan and rows is None) or np.isfinite(stored).all()):
            return stored
        if flat.dtype.kind == "f" and not tensor.allow_nan and not np.isfinite(flat).all():
            wrong, found = ~np.isfinite(flat), "NaN or infinity"
            expected, remedy = "finite numbers", "Clean them, or allow them with allow_nan="
            setting = "allow_nan"
        elif dtype.kind == "f" and (column.whole or flat.dtype.kind in "iu"):
            wrong, found = _rounded(flat, stored), "integers"
            expected = f"what {dtype.name} holds exactly: all integers up to {2 << np.finfo(dtype).nmant:,}"
            remedy = (
                "Keep them integers with dtypes=, apart from columns with fractions; or cast the column to double if "
                "they may be rounded"
            )
        elif dtype.kind == "f":
            wrong, found = np.isfinite(flat) & ~np.isfinite(stored), "numbers too large"
            expected, remedy = f"what {dtype.name} can hold", "Choose a wider type with dtypes="
        else:
            wrong, found = stored != flat, "numbers"
            expected, remedy = f"what {dtype.name} can hold", "Choose another type with dtypes="
            if column.whole and not wrong.any():
                wrong, found = np.abs(flat) >= 2**53, "integers"
                expected = "decimals below 2**53, as Spark sends them as doubles"
                remedy = "Cast the column to bigint"
    places = np.flatnonzero(wrong)
    if not len(places):
        return stored
    missing = setting == "allow_nan"
    found = found if missing else f"{found} such as {flat[places[0]]}"
    owners = rows[places] if rows is not None else places // width
    raise RowsRefused.at(
        owners, first_row, column.name, found, expected, remedy=remedy, setting=setting, missing=missing
    )


def _blob(
    tensor: Tensor, field: TensorField, column: Column, values: Values | SparseValues, first_row: int, rows: int
) -> Blob:
    if field.kind is Kind.SPARSE:
        if isinstance(values, Values):
            matrix = values.flat.reshape(-1, values.width)
            owners, places = np.nonzero(matrix)
            counts = np.bincount(owners, minlength=len(matrix)).astype(np.int64)
            values = SparseValues(counts, places.astype(np.int32), matrix[owners, places], values.width)
        flat = _checked(tensor, column, values.flat, np.repeat(np.arange(rows), values.counts), first_row)
        return encode_sparse(values.counts, values.indices, flat)
    assert isinstance(values, Values)
    lengths = values.lengths_of(rows)
    if field.kind is not Kind.ARRAY:
        return Blob(values.flat, lengths)
    flat = _checked(tensor, column, values.flat, np.repeat(np.arange(rows), lengths), first_row)
    return Blob(np.ascontiguousarray(flat).view(np.uint8), lengths * flat.dtype.itemsize)
