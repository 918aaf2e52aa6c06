"""Columns of an Arrow batch as the tensors that a model was trained on, by the encoder that wrote them then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from spark_elastic.data.arrow_values import missing_rows
from spark_elastic.data.columns import Request, Tensor
from spark_elastic.data.encode import Encoder
from spark_elastic.data.faults import Fault, RowsRefused, error_of
from spark_elastic.data.layout import Kind, TensorField
from spark_elastic.data.shards import SHARD_BYTES, Blob
from spark_elastic.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

HANDLE_INVALID = "handle_invalid='skip' leaves such rows out of the result, 'keep' gives them null predictions"
_VARIABLE = (Kind.BYTES, Kind.ARRAY, Kind.STRING)


def tensors_for(
    schema: Any, inputs: Sequence[TensorField], pad_to: Mapping[str, int], allow_nan: bool | Sequence[str] = False
) -> tuple[Tensor, ...]:
    """How the columns of a DataFrame with this schema become these inputs.

    allow_nan: as when the rows that the model was trained on were written.
    Raises: DataError: a column is missing, or of a type that cannot be one.
    """
    types = {field.name: field.dataType.typeName() for field in schema.fields}
    for field in inputs:
        for name in field.columns:
            if (types[name] in ("string", "char", "varchar")) != (field.kind is Kind.STRING):
                was = "text" if field.kind is Kind.STRING else f"values of {field.dtype}"
                raise DataError(
                    f"column {name!r} is of type {types[name]}, and the model was trained on {was}; cast it",
                    column=name,
                )
    request = Request(
        tensors={field.name: _columns(field) for field in inputs},
        dtypes={field.name: field.dtype for field in inputs if field.kind not in (Kind.BYTES, Kind.STRING)},
        shapes={field.name: field.shape for field in inputs if field.kind not in _VARIABLE and field.shape},
        pad_to={name: length for name, length in pad_to.items() if name in {field.name for field in inputs}},
        variable=tuple(field.name for field in inputs if field.kind in (Kind.BYTES, Kind.ARRAY)),
        sparse={field.name: False for field in inputs if field.kind is Kind.SPARSE},
        allow_nan=allow_nan if isinstance(allow_nan, bool) else [f.name for f in inputs if f.name in allow_nan],
        validation=None,
        seed=0,
        shard_bytes=SHARD_BYTES,
        pre_shuffle=None,
    )
    return request.resolve(schema)


class FeatureReader:
    """Reads the batches of one partition, in their order."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self._names = list(dict.fromkeys(column.name for tensor in tensors for column in tensor.columns))
        self._no_nan = {column.name for tensor in tensors if not tensor.allow_nan for column in tensor.columns}
        self._encoder = Encoder(tensors)

    def __call__(self, batch: pa.RecordBatch) -> dict[str, Any]:
        """By name: an array [rows, ...], or a list with an entry for each row. Valid until the next call.

        batch: with a row at least.
        Raises: DataError: nulls, or other lengths than in training; with the column's name and the numbers.
        """
        import pyarrow as pa

        columns = [_plain(self._column(batch, name)) for name in self._names]
        try:
            block = self._encoder.encode(pa.RecordBatch.from_arrays(columns, self._names))
        except RowsRefused as refused:
            raise error_of(map(_as_of_transform, refused.faults), self._encoder.rows) from None
        assert self._encoder.layout is not None
        return {
            field.name: np.ascontiguousarray(block.records[field.name])
            if field.kind is Kind.DENSE
            else _values(block.blobs[field.name], field)
            for field in self._encoder.layout.fields
        }

    def missing(self, batch: pa.RecordBatch) -> npt.NDArray[np.bool_]:
        """Which rows have a null, or NaN or infinity where the model was not trained on such."""
        found = np.zeros(batch.num_rows, bool)
        for name in self._names:
            found |= missing_rows(self._column(batch, name), allow_nan=name not in self._no_nan)
        return found

    @staticmethod
    def _column(batch: pa.RecordBatch, name: str) -> Any:
        # the batch may have columns of the same name that are none of ours
        return batch.column(batch.schema.get_field_index(name))


def _as_of_transform(fault: Fault) -> Fault:
    """With what can be done about it here, where no setting of writing helps."""
    remedy = HANDLE_INVALID if fault.missing else "" if fault.setting else fault.remedy
    return replace(fault, remedy=remedy, setting="")


def _columns(field: TensorField) -> str | list[str]:
    alone = field.kind is not Kind.DENSE or field.shape == ()
    return field.columns[0] if alone else list(field.columns)


def _plain(column: Any) -> Any:
    """Decimals as doubles; when rows are written, Spark casts them before they get here."""
    import pyarrow as pa

    kind, depth = column.type, 0
    while pa.types.is_list(kind):
        kind, depth = kind.value_type, depth + 1
    if not pa.types.is_decimal(kind):
        return column
    kind = pa.float64()
    for _ in range(depth):
        kind = pa.list_(kind)
    return column.cast(kind)


def _values(blob: Blob, field: TensorField) -> list[Any]:
    ends = np.cumsum(blob.lengths)
    values = [blob.data[end - length : end] for end, length in zip(ends, blob.lengths, strict=True)]
    if field.kind is Kind.ARRAY:
        return [value.view(field.dtype) for value in values]
    return [bytes(value).decode() if field.kind is Kind.STRING else bytes(value) for value in values]
