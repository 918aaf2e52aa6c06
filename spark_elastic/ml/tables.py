"""pandas DataFrames and pyarrow Tables in the place of Spark's: their columns as Spark would send them, and back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from spark_elastic.data.columns import find_column
from spark_elastic.data.manifest import Kind, TensorField
from spark_elastic.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

_VECTOR = ("type", "size", "indices", "values")  # the fields of Spark's struct of a vector
_SPARK_NAMES = {
    "bool": "boolean",
    "int8": "byte",
    "int16": "short",
    "int32": "integer",
    "int64": "long",
    "float": "float",
    "double": "double",
    "string": "string",
    "large_string": "string",
    "binary": "binary",
    "large_binary": "binary",
    "date32[day]": "date",
}
_INSTEAD = {"uint8": "int16", "uint16": "int32", "uint32": "int64", "uint64": "int64", "halffloat": "float32"}
_INSTEAD |= {"string_view": "string", "binary_view": "binary", "date64[ms]": "date32", "null": "float64"}


@dataclass(frozen=True, slots=True)
class ColumnType:
    """The type of a column, with those members of a type of Spark's that `data.columns` asks for."""

    name: str
    words: str
    elementType: ColumnType | None = None
    scale: int = 0

    def typeName(self) -> str:
        return self.name

    def simpleString(self) -> str:
        return self.words


@dataclass(frozen=True, slots=True)
class Field:
    """A column, as a `StructField`."""

    name: str
    dataType: ColumnType


@dataclass(frozen=True, slots=True)
class Schema:
    """Columns, as a `StructType`."""

    fields: tuple[Field, ...]

    @property
    def names(self) -> list[str]:
        return [field.name for field in self.fields]


def is_table(data: Any) -> bool:
    """Return whether this is a pyarrow Table or RecordBatch, or a pandas DataFrame."""
    return _is_pandas(data) or (hasattr(data, "schema") and type(data).__module__.startswith("pyarrow"))


def _is_pandas(data: Any) -> bool:
    return any(f"{cls.__module__}.{cls.__name__}".startswith("pandas.") for cls in type(data).__mro__) and (
        hasattr(data, "columns") and hasattr(data, "iloc")
    )


def schema_of(data: Any) -> Schema:
    """Return the names of the columns; the types are those of `features`."""
    names = data.columns if _is_pandas(data) else data.schema.names
    return Schema(tuple(Field(str(name), ColumnType("", "")) for name in names))


def features(data: Any, inputs: Iterable[TensorField]) -> tuple[pa.RecordBatch, Schema]:
    """Return a model's input columns and schema. DataError: one is missing, or of a type that Spark lacks."""
    import pyarrow as pa

    names, arrays, fields = schema_of(data), {}, []
    for each in inputs:
        for name in each.columns:
            if name in arrays:
                continue
            find_column(names, name, "the model's input")
            array = _as_spark(name, _arrow(data, name), each)
            arrays[name] = array
            fields.append(Field(name, _column_type(array.type)))
    return pa.RecordBatch.from_arrays(list(arrays.values()), list(arrays)), Schema(tuple(fields))


def _arrow(data: Any, name: str) -> pa.Array:
    import pyarrow as pa

    if not _is_pandas(data):
        column = data.column(data.schema.get_field_index(name))
        return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    position = [str(each) for each in data.columns].index(name)
    values = data.iloc[:, position]
    try:
        if values.dtype == object:
            return _of_objects(list(values))
        if isinstance(values.dtype, np.dtype) and values.dtype.kind in "biuf":
            return pa.array(values.to_numpy(), from_pandas=False)  # NaN stays NaN
        made = pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, TypeError, ValueError) as error:
        why = str(error).partition("\n")[0]
        raise DataError(
            f"column {name!r}: its values of type {values.dtype} cannot be read: {why}; give numbers, lists or arrays "
            "of numbers, text, bytes or Spark's vectors, one kind in a column",
            column=name,
        ) from None
    return made.combine_chunks() if isinstance(made, pa.ChunkedArray) else made


def _of_objects(values: list[Any]) -> pa.Array:
    import pyarrow as pa

    first = next((each for each in values if each is not None), None)
    if hasattr(first, "toArray"):  # a vector of pyspark
        return _vectors(values)
    if isinstance(first, float) and math.isnan(first):  # pandas' null, if the others are no numbers
        others = [None if isinstance(each, float) and math.isnan(each) else each for each in values]
        if not all(isinstance(each, (int, float, np.number)) for each in others if each is not None):
            values = others
    nested = [each.tolist() if isinstance(each, np.ndarray) and each.ndim > 1 else each for each in values]
    return pa.array(nested, from_pandas=False)


def _vectors(values: Sequence[Any]) -> pa.Array:
    """Return vectors of pyspark as Spark's structs."""
    import pyarrow as pa

    rows: list[dict[str, Any] | None] = []
    for each in values:
        if each is None:
            rows.append(None)
        elif hasattr(each, "indices"):
            rows.append(dict(zip(_VECTOR, (0, int(each.size), list(each.indices), list(each.values)), strict=True)))
        else:
            rows.append(dict(zip(_VECTOR, (1, None, None, list(each.toArray())), strict=True)))
    kinds = (pa.int8(), pa.int32(), pa.list_(pa.int32()), pa.list_(pa.float64()))
    return pa.array(rows, pa.struct(list(zip(_VECTOR, kinds, strict=True))))


def _as_spark(name: str, array: pa.Array, field: TensorField) -> pa.Array:
    """Return the values in a type that Spark would send."""
    import pyarrow as pa

    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if pa.types.is_null(array.type) and field.kind in (Kind.STRING, Kind.BYTES):
        return array.cast(pa.string() if field.kind is Kind.STRING else pa.binary())
    wanted = _sent_as(array.type)
    try:
        return array if wanted == array.type else array.cast(wanted, safe=not _has_times(wanted))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(
            f"column {name!r} is of type {array.type} and cannot be read as {wanted}: {error}; cast it", column=name
        ) from None


def _sent_as(kind: pa.DataType) -> pa.DataType:
    import pyarrow as pa

    types = pa.types
    if types.is_dictionary(kind):
        return _sent_as(kind.value_type)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return pa.list_(_sent_as(kind.value_type))
    if types.is_timestamp(kind):
        return pa.timestamp("us", kind.tz)
    if types.is_duration(kind):
        return pa.duration("us")
    if types.is_fixed_size_binary(kind):
        return pa.binary()
    instead = _INSTEAD.get(str(kind))
    return kind if instead is None else getattr(pa, instead)()


def _has_times(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_timestamp(kind) or pa.types.is_duration(kind))  # Spark cuts nanoseconds off, too


def _column_type(kind: pa.DataType) -> ColumnType:
    """Return the type by Spark's name; that of Arrow for a type that Spark cannot send, which `columns` refuses."""
    import pyarrow as pa

    words, types = str(kind), pa.types
    if types.is_list(kind):
        return ColumnType("array", words, _column_type(kind.value_type))
    if types.is_struct(kind):
        fields = tuple(kind.field(number).name for number in range(kind.num_fields))
        return ColumnType("vectorudt" if fields == _VECTOR else "struct", words)
    if types.is_decimal(kind):
        return ColumnType("decimal", words, scale=kind.scale)
    if types.is_timestamp(kind):
        return ColumnType("timestamp" if kind.tz else "timestamp_ntz", words)
    if types.is_duration(kind):
        return ColumnType("daytimeinterval", words)
    return ColumnType(_SPARK_NAMES.get(words, words), words)


def in_kind(data: Any, names: Sequence[str], arrays: Sequence[pa.Array], kept: npt.NDArray[np.bool_]) -> Any:
    """Return columns as a DataFrame of pandas, with the index of `data`, or as a Table, as `data` is."""
    import pyarrow as pa

    if not _is_pandas(data):
        return pa.table(dict(zip(names, arrays, strict=True)))
    import pandas as pd

    return pd.DataFrame(
        {name: _pandas_values(array) for name, array in zip(names, arrays, strict=True)},
        index=data.index if kept.all() else data.index[kept],
    )


def _pandas_values(array: pa.Array) -> Any:
    import pyarrow as pa

    if not pa.types.is_list(array.type):
        return array.to_numpy(zero_copy_only=False)
    if not pa.types.is_list(array.type.value_type):
        return _objects(array.to_pandas())
    element = array.type
    while pa.types.is_list(element):
        element = element.value_type
    dtype = element.to_pandas_dtype()
    return _objects([None if row is None else np.array(row, dtype) for row in array.to_pylist()])


def _objects(rows: Any) -> npt.NDArray[Any]:
    """Return an array with an array in each row."""
    made = np.empty(len(rows), object)
    for position, row in enumerate(rows):
        made[position] = row
    return made
