"""Which columns become which tensors, told from the schema alone, before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spark_elastic.errors import DataError, InvalidSettingsError, nearest

WEIGHT = "sample_weight"
_INTEGERS = frozenset({"byte", "tinyint", "short", "smallint", "int", "integer", "long", "bigint"})
_REALS = frozenset({"float", "double", "decimal", "boolean"})
_TIMES = frozenset({"date", "timestamp", "timestamp_ntz"})
_OPAQUE = frozenset({"string", "binary", "char", "varchar"})
FLOAT, INTEGER = "<f4", "<i8"


@dataclass(frozen=True)
class Tensors:
    """What `materialize` is asked for. columns: name of the tensor -> its columns; dtypes and shapes where known."""

    columns: Mapping[str, tuple[str, ...]]
    dtypes: Mapping[str, str] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def __or__(self, other: Tensors) -> Tensors:
        return Tensors(
            {**self.columns, **other.columns}, {**self.dtypes, **other.dtypes}, {**self.shapes, **other.shapes}
        )


def features(schema: Any, feature_cols: Sequence[Any], input_shapes: Sequence[Sequence[int]] | None) -> Tensors:
    """The inputs "features_0", "features_1", ... of the model.

    schema: a Spark StructType.
    Raises:
        DataError: a column is missing or of a type that no tensor can be made of.
        InvalidSettingsError: other than one shape for each input.
    """
    groups = [[name] for name in feature_cols] if _each_by_itself(schema, feature_cols) else [list(feature_cols)]
    if any(isinstance(each, (list, tuple)) for each in feature_cols):
        groups = [list(each) for each in feature_cols]
    if input_shapes is not None and len(input_shapes) != len(groups):
        raise InvalidSettingsError(
            f"{len(input_shapes)} input_shapes for {len(groups)} inputs ({_listed(groups)}); give one for each"
        )
    made = Tensors({})
    for index, group in enumerate(groups):
        shape = None if input_shapes is None else tuple(input_shapes[index])
        made |= _tensor(schema, f"features_{index}", group, shape, "feature_cols")
    return made


def labels(
    schema: Any,
    label_cols: Sequence[str],
    label_shapes: Sequence[Sequence[int]] | None,
    dtypes: Sequence[str | None] = (),
) -> Tensors:
    """The labels "label_0", "label_1", ...

    dtypes: of each label, where the loss says it; otherwise integers stay, and the rest becomes float32.
    Raises: as for `features`.
    """
    if label_shapes is not None and len(label_shapes) != len(label_cols):
        raise InvalidSettingsError(f"{len(label_shapes)} label_shapes for {len(label_cols)} label_cols")
    made = Tensors({})
    for index, name in enumerate(label_cols):
        shape = None if label_shapes is None else tuple(label_shapes[index])
        one = _tensor(schema, f"label_{index}", [name], shape, "label_cols", alone_is_scalar=True)
        if index < len(dtypes) and dtypes[index] is not None and one.dtypes:
            one = Tensors(one.columns, {f"label_{index}": str(dtypes[index])}, one.shapes)
        made |= one
    return made


def weight(schema: Any, name: str) -> Tensors:
    """Raises: DataError: the column is missing or no number."""
    if _kind(_column(schema, name, "sample_weight_col").dataType) not in _INTEGERS | _REALS:
        raise DataError(f"sample_weight_col {name!r} is {_type_name(schema, name)}; weights must be numbers")
    return Tensors({WEIGHT: (name,)}, {WEIGHT: FLOAT}, {WEIGHT: ()})


def check_validation(schema: Any, name: str) -> None:
    """Raises: DataError: the column is missing or not boolean."""
    if _kind(_column(schema, name, "validation").dataType) != "boolean":
        raise DataError(
            f"validation column {name!r} is {_type_name(schema, name)}; it must be boolean, true for the rows to set "
            f"aside: df.withColumn({name!r}, F.col({name!r}) > 0), for example"
        )


def _each_by_itself(schema: Any, feature_cols: Sequence[Any]) -> bool:
    flat = [name for name in feature_cols if isinstance(name, str)]
    kinds = [_kind(_column(schema, name, "feature_cols").dataType) for name in flat]
    return any(kind in ("array", "vector") or kind in _OPAQUE for kind in kinds)


def _tensor(
    schema: Any,
    tensor: str,
    names: Sequence[str],
    shape: tuple[int, ...] | None,
    setting: str,
    alone_is_scalar: bool = False,
) -> Tensors:
    columns = {tensor: tuple(names)}
    types = [_column(schema, name, setting).dataType for name in names]
    kinds = [_kind(each) for each in types]
    for name, kind, spark_type in zip(names, kinds, types, strict=True):
        inner = _kind(spark_type.elementType) if kind == "array" else kind
        if kind == "array" and inner == "array":
            raise DataError(
                f"{setting} {name!r} is {spark_type.simpleString()}; arrays of arrays have to be made flat "
                f"(F.flatten), and input_shapes says what they were"
            )
        if inner not in _INTEGERS | _REALS | _TIMES | _OPAQUE | {"vector"}:
            raise DataError(
                f"{setting} {name!r} is {spark_type.simpleString()}; numbers, booleans, dates, arrays of numbers, "
                "vectors, strings and binary can be used. Cast it, or take its parts apart with df.select"
            )
    if any(kind in _OPAQUE for kind in kinds):
        if len(names) > 1:
            raise DataError(f"{setting} {list(names)}: strings and binary cannot be joined with other columns")
        return Tensors(columns)
    dtype = FLOAT
    if len(names) == 1:
        inner = _kind(types[0].elementType) if kinds[0] == "array" else kinds[0]
        dtype = INTEGER if inner in _INTEGERS | _TIMES else FLOAT
    shapes: dict[str, tuple[int, ...]] = {}
    if shape is not None:
        shapes[tensor] = shape
    elif not any(kind in ("array", "vector") for kind in kinds):
        alone = len(names) == 1 and (alone_is_scalar or dtype == INTEGER)
        shapes[tensor] = () if alone else (len(names),)
    return Tensors(columns, {tensor: dtype}, shapes)


def _column(schema: Any, name: str, setting: str) -> Any:
    found = [column for column in schema.fields if column.name == name]
    if len(found) == 1:
        return found[0]
    if found:
        raise DataError(f"{setting} {name!r} stands for {len(found)} columns of the DataFrame; rename all but one")
    close = nearest(name, schema.names)
    hint = f"did you mean {close!r}?" if close else f"it has {', '.join(schema.names)}"
    raise DataError(f"{setting} {name!r} is not a column of the DataFrame; {hint}")


def _kind(spark_type: Any) -> str:
    if type(spark_type).__name__ == "VectorUDT":
        return "vector"
    return str(spark_type.typeName())


def _type_name(schema: Any, name: str) -> str:
    return str(schema[name].dataType.simpleString())


def _listed(groups: Sequence[Sequence[str]]) -> str:
    return ", ".join("+".join(group) for group in groups)
