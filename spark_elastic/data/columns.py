"""Columns and the tensors made of them: everything that the DataFrame's schema alone can show to be wrong.

`materialize` resolves a `Request`; the estimators check their own settings with the same functions. No Spark job runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from spark_elastic.data.manifest import Kind
from spark_elastic.data.shards import SHARD_BYTES
from spark_elastic.errors import DataError, InvalidSettingsError, nearest

# Types, by the name that Spark's `typeName` gives them.
INTEGERS = frozenset({"byte", "short", "integer", "long"})
REALS = frozenset({"float", "double", "decimal", "boolean"})
TIMES = frozenset({"date", "timestamp", "timestamp_ntz"})
TEXTS = frozenset({"string", "char", "varchar"})
#: Spark's name of a type → the dtype that stores a value. Dates are days, other times microseconds since 1970 (UTC).
_ELEMENTS = {"byte": "<i1", "short": "<i2", "integer": "<i4", "long": "<i8", "float": "<f4", "double": "<f8"}
_ELEMENTS |= {"boolean": "|b1", "decimal": "<f8", **dict.fromkeys((*TIMES, "daytimeinterval"), "<i8")}
_INSTEAD = {
    "map": "take the values you need: df.withColumn(name, F.col(column)['key'])",
    "struct": "select its fields as columns: df.select('column.*')",
    "void": "give the column a type: F.col(column).cast('float')",
    "variant": "extract typed values: F.variant_get(column, path, 'double')",
    "yearmonthinterval": "cast it to a number of months: F.col(column).cast('int')",
    "interval": "cast it to a day-time interval",
}


def find_column(schema: Any, name: str, role: str = "column", *, case_sensitive: bool = True) -> Any:
    """Return the field of a column in a Spark schema. Raise DataError if there is no such column, or more than one.

    With `case_sensitive`, columns whose names differ only in case are different columns. `role` is the setting that
    names the column, for the error message.
    """
    alike = [f for f in schema.fields if f.name == name or (not case_sensitive and f.name.lower() == name.lower())]
    if len(alike) > 1:
        raise DataError(
            f"{role} {name!r} stands for {len(alike)} columns of the DataFrame, {[f.name for f in alike]}; rename all "
            "but one",
            column=name,
        )
    if not alike or alike[0].name != name:
        close = nearest(name, schema.names)
        hint = f"; did you mean {close!r}?" if close else ""
        columns = ", ".join(schema.names)
        raise DataError(f"{role} {name!r} is not a column of the DataFrame; it has {columns}{hint}", column=name)
    return alike[0]


def is_case_sensitive(df: Any) -> bool:
    """Return whether the session of a DataFrame takes names that differ only in case for different columns."""
    return str(df.sparkSession.conf.get("spark.sql.caseSensitive")).lower() == "true"


def element_type(spark_type: Any) -> str:
    """Return the name of a type; for arrays, however nested, that of their elements."""
    while spark_type.typeName() == "array":
        spark_type = spark_type.elementType
    return str(spark_type.typeName())


def check_travels(types: Mapping[str, Any]) -> None:
    """Raise DataError if Spark cannot send a column to Python. `types` are Spark's types of the columns, by name."""
    for name, kind in types.items():
        if reason := _stays_in_java(kind):
            raise DataError(
                f"column {name!r} is of type {kind.simpleString()}, and Spark cannot send {reason} to Python; leave it "
                f"out: df.drop({name!r}), or cast it to a string or a number",
                column=name,
            )


def _stays_in_java(spark_type: Any) -> str:
    """Return what of a type has no counterpart in Arrow; "" if all of it has one."""
    kind = spark_type.typeName()
    if kind in ("yearmonthinterval", "interval"):
        return "intervals of months"
    if kind == "array":
        return _stays_in_java(spark_type.elementType)
    if kind == "map":
        return _stays_in_java(spark_type.keyType) or _stays_in_java(spark_type.valueType)
    if kind == "struct":
        if len(set(spark_type.names)) < len(spark_type.names):
            return "structs with several fields of one name"
        return next(filter(None, (_stays_in_java(field.dataType) for field in spark_type.fields)), "")
    return ""


@dataclass(frozen=True, slots=True)
class Column:
    """A column as the tasks that write it see it."""

    name: str
    source: str  # "scalar", "list", "vector", "binary" or "string"
    dtype: str  # dtype of one element, before any cast
    depth: int = 0  # the nesting of arrays, for "list"
    whole: bool = False  # its values are integers although they come as float64: decimals of scale 0


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as it was requested; properties that depend on the rows are None."""

    name: str  # its name in batches
    columns: tuple[Column, ...]  # the columns, joined in this order
    dtype: str  # what it is stored as
    kind: Kind | None  # how it is stored. None: DENSE or SPARSE, decided by the first vectors
    stacked: bool  # a single scalar column becomes shape [1] rather than a scalar
    shape: tuple[int, ...] | None  # shape of one row's value. None: as found
    pad_to: int | None  # the length that shorter arrays are padded to. None: all rows must have one length
    allow_nan: bool  # NaN and infinity may be stored


@dataclass(frozen=True)
class Request:
    """The arguments of `materialize` that decide the stored bytes."""

    tensors: Mapping[str, str | Sequence[str]]
    dtypes: Mapping[str, str] = field(default_factory=dict)
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    pad_to: Mapping[str, int] = field(default_factory=dict)
    variable: Sequence[str] = ()
    sparse: Mapping[str, bool] = field(default_factory=dict)
    allow_nan: bool | Sequence[str] = False
    validation: float | str | None = None
    seed: int = 0
    shard_bytes: int = SHARD_BYTES
    pre_shuffle: str | None = None
    missing: str | float = "error"  # rows with a missing value are refused, left out ("skip"), or get this number
    filled: Sequence[str] = ()  # the tensors that get the number

    def __post_init__(self) -> None:
        for name in ("tensors", "dtypes", "shapes", "pad_to", "sparse"):
            object.__setattr__(self, name, dict(getattr(self, name) or {}))
        object.__setattr__(self, "variable", tuple(self.variable or ()))
        if not isinstance(self.allow_nan, bool):
            object.__setattr__(self, "allow_nan", tuple(self.allow_nan))

    def check(self) -> None:
        """Raise InvalidSettingsError for a value that is impossible with any DataFrame."""
        if not self.tensors or not all(self.tensors.values()):
            raise InvalidSettingsError(f"each tensor needs at least one column, not {dict(self.tensors)}")
        names = list(self.tensors)
        for setting, given in {
            "dtypes": self.dtypes,
            "shapes": self.shapes,
            "pad_to": self.pad_to,
            "variable": self.variable,
            "sparse": self.sparse,
            "allow_nan": [] if isinstance(self.allow_nan, bool) else self.allow_nan,
        }.items():
            for name in given:
                if name not in names:
                    close = nearest(name, names)
                    hint = f"did you mean {close!r}?" if close else f"the tensors are {', '.join(names)}"
                    raise InvalidSettingsError(f"{setting} names {name!r}, which is not a tensor; {hint}")
        for name, length in self.pad_to.items():
            if length < 1:
                raise InvalidSettingsError(f"pad_to of {name!r} must be at least 1, not {length}")
        fraction = self.validation
        if isinstance(fraction, bool) or not (fraction is None or isinstance(fraction, str) or 0 < fraction < 1):
            raise InvalidSettingsError(
                f"validation must be a fraction between 0 and 1, or a boolean column, not {fraction!r}"
            )
        if self.shard_bytes < 1 << 12:
            raise InvalidSettingsError(f"shard_bytes must be at least 4096, not {self.shard_bytes}")
        if self.pre_shuffle not in (None, "spark"):
            raise InvalidSettingsError(f"pre_shuffle must be None or 'spark', not {self.pre_shuffle!r}")

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns that are read, without duplicates."""
        named = [column for columns in self.tensors.values() for column in _names(columns)]
        return tuple(dict.fromkeys(named + ([self.validation] if isinstance(self.validation, str) else [])))

    def to_json(self) -> dict[str, Any]:
        """Return plain values, for the dataset's key and for the settings in its manifest."""
        settings = asdict(self)
        if self.missing == "error":  # as in datasets that were written before these settings came
            del settings["missing"], settings["filled"]
        return {
            **settings,
            "tensors": {
                name: columns if isinstance(columns, str) else list(columns) for name, columns in self.tensors.items()
            },
            "dtypes": {name: np.dtype(dtype).str for name, dtype in self.dtypes.items()},
            "shapes": {name: list(shape) for name, shape in self.shapes.items()},
            "variable": sorted(self.variable),
            "allow_nan": self.allow_nan if isinstance(self.allow_nan, bool) else sorted(self.allow_nan),
        }

    def resolve(self, schema: Any, case_sensitive: bool = False) -> tuple[Tensor, ...]:
        """Return the tensors. Raise DataError if a column is missing, ambiguous, or of a type that cannot be stored."""
        types = {name: find_column(schema, name, case_sensitive=case_sensitive).dataType for name in self.columns}
        name = self.validation
        if isinstance(name, str) and types[name].typeName() != "boolean":
            raise DataError(
                f"validation column {name!r} is {types[name].simpleString()}; it must be boolean, true for the rows to "
                f"set aside: df.withColumn({name!r}, F.col({name!r}) > 0), for example",
                column=name,
            )
        return tuple(
            self._tensor(name, [_column(column, types[column]) for column in _names(columns)])
            for name, columns in self.tensors.items()
        )

    def _tensor(self, name: str, columns: Sequence[Column]) -> Tensor:
        first = columns[0]
        asked = self.dtypes.get(name)
        natural = np.result_type(*(np.dtype(column.dtype) for column in columns))
        try:
            dtype = natural if asked is None else np.dtype(asked)
        except TypeError:
            raise InvalidSettingsError(f"dtypes of {name!r}: {asked!r} is not a dtype of numpy") from None
        if dtype.kind not in "biuf" or dtype.itemsize > 8:
            raise InvalidSettingsError(f"dtypes of {name!r}: {asked!r} is not a number of at most 8 bytes")
        dtype = dtype.newbyteorder("<")
        shape = tuple(self.shapes[name]) if name in self.shapes else None
        kind: Kind | None = Kind.DENSE
        if first.source == "string" or name in self.variable:
            kind = {"string": Kind.STRING, "binary": Kind.BYTES, "list": Kind.ARRAY}.get(first.source)
            if kind is None or first.depth > 1:
                raise DataError(
                    f"tensor {name!r}: variable length is for binary, string and array columns, and {first.name!r} is "
                    f"a {first.source}",
                    column=first.name,
                )
            if shape is not None or name in self.pad_to or (asked is not None and kind is not Kind.ARRAY):
                raise InvalidSettingsError(
                    f"tensor {name!r} is of variable length; remove it from dtypes, shapes and pad_to"
                )
        elif first.source == "vector" and name in self.sparse:
            kind = Kind.SPARSE if self.sparse[name] else Kind.DENSE
        elif first.source == "vector":
            kind = Kind.DENSE if len(columns) > 1 else None
        elif name in self.sparse:
            raise InvalidSettingsError(
                f"the setting sparse lists {name!r}, but column {first.name!r} is not a vector; remove it from sparse"
            )
        if len(columns) > 1:
            others = [column for column in columns if column.source == "string"]
            if kind is not Kind.DENSE or others:
                odd = (others or columns)[0].name
                raise DataError(
                    f"tensor {name!r}: column {odd!r} is of variable length or sparse; give it a tensor of its own",
                    column=odd,
                )
        if kind is Kind.SPARSE and dtype.str not in ("<f4", "<f8"):
            raise InvalidSettingsError(f"tensor {name!r} is sparse, which needs float32 or float64, not {dtype.str}")
        if name in self.pad_to and (len(columns) > 1 or first.source not in ("list", "binary") or first.depth > 1):
            raise InvalidSettingsError(
                f"pad_to is for tensors of one array or binary column, and {name!r} is not one of them"
            )
        stacked = not isinstance(self.tensors[name], str)
        allow = self.allow_nan if isinstance(self.allow_nan, bool) else name in self.allow_nan
        return Tensor(name, tuple(columns), dtype.str, kind, stacked, shape, self.pad_to.get(name), allow)


@dataclass(frozen=True)
class Query:
    """A DataFrame, and the tensors to store of its rows."""

    df: Any
    request: Request
    tensors: tuple[Tensor, ...]

    @classmethod
    def checked(cls, df: Any, request: Request) -> Query:
        """Resolve a request; raise `InvalidSettingsError` or `DataError` if its tensors cannot be stored."""
        request.check()
        if df.isStreaming:
            raise DataError("a streaming DataFrame cannot be materialised, as it has no end; write it to a table first")
        return cls(df, request, request.resolve(df.schema, is_case_sensitive(df)))


def _names(columns: str | Sequence[str]) -> list[str]:
    return [columns] if isinstance(columns, str) else list(columns)


def _column(name: str, spark_type: Any) -> Column:
    outer, kind = spark_type.typeName(), element_type(spark_type)
    if outer == "vectorudt":
        return Column(name, "vector", "<f8")
    if outer == "binary" or outer in TEXTS:
        return Column(name, "binary" if outer == "binary" else "string", "|u1")
    if kind in _ELEMENTS:
        element, depth = spark_type, 0
        while element.typeName() == "array":
            element, depth = element.elementType, depth + 1
        whole = kind == "decimal" and element.scale == 0
        return Column(name, "list" if depth else "scalar", _ELEMENTS[kind], depth, whole)
    if outer == "array" and kind in ("string", "binary", "vectorudt"):
        instead = "turn the elements into numbers, or explode them into columns"
    else:
        instead = _INSTEAD.get(kind, "cast it to a number, an array of numbers, a vector, binary or string")
    raise DataError(
        f"column {name!r} is of type {spark_type.simpleString()}, which cannot be stored; {instead}", column=name
    )


def cast_of(spark_type: Any) -> str | None:
    """Return the type to which Spark casts a column for Python: double for decimals. None: no cast is needed."""
    if spark_type.typeName() == "decimal":
        return "double"
    if spark_type.typeName() == "array" and (inner := cast_of(spark_type.elementType)) is not None:
        return f"array<{inner}>"
    return None
