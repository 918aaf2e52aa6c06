"""Which columns make which tensors: what was asked for, held against the DataFrame's schema. No Spark job runs here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spark_elastic.data.layout import Kind
from spark_elastic.errors import DataError, InvalidSettingsError, nearest

_ELEMENTS = {
    "byte": "<i1",
    "short": "<i2",
    "integer": "<i4",
    "long": "<i8",
    "float": "<f4",
    "double": "<f8",
    "boolean": "|b1",
    "decimal": "<f8",
    "date": "<i8",
    "timestamp": "<i8",
    "timestamp_ntz": "<i8",
    "daytimeinterval": "<i8",
}
"""Spark's name of a type → what one value is stored as. Dates are days, the others microseconds since 1970 (UTC)."""
_INSTEAD = {
    "map": "take the values you need: df.withColumn(name, F.col(column)['key'])",
    "struct": "select its fields as columns: df.select('column.*')",
    "void": "give the column a type: F.col(column).cast('float')",
    "variant": "extract typed values: F.variant_get(column, path, 'double')",
    "yearmonthinterval": "cast it to a number of months: F.col(column).cast('int')",
    "interval": "cast it to a day-time interval",
}


@dataclass(frozen=True, slots=True)
class Column:
    """A column as the tasks see it. source: "scalar", "list", "vector", "binary" or "string".

    dtype: of one element, before any cast. depth: how many arrays lie in one another, for "list". whole: its values are
    integers, although they come as float64: decimals without digits after the point.
    """

    name: str
    source: str
    dtype: str
    depth: int = 0
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor as it was asked for; what only rows can tell is left open.

    kind: None: DENSE or SPARSE, as the vectors are. stacked: a single scalar becomes [1] rather than a scalar.
    shape: None: as found. pad_to: None: all rows have to have one length.
    """

    name: str
    columns: tuple[Column, ...]
    dtype: str
    kind: Kind | None
    stacked: bool
    shape: tuple[int, ...] | None
    pad_to: int | None
    allow_nan: bool


@dataclass(frozen=True)
class Request:
    """What `materialize` was asked for, apart from where to. Everything that decides the stored bytes is in it."""

    tensors: Mapping[str, str | Sequence[str]]
    dtypes: Mapping[str, str]
    shapes: Mapping[str, Sequence[int]]
    pad_to: Mapping[str, int]
    variable: Sequence[str]
    sparse: Mapping[str, bool]
    allow_nan: bool | Sequence[str]
    validation: float | str | None
    seed: int
    shard_bytes: int
    pre_shuffle: str | None

    def check(self) -> None:
        """Raises: InvalidSettingsError: values that cannot be, whatever the DataFrame."""
        if not self.tensors or not all(self.tensors.values()):
            raise InvalidSettingsError(f"each tensor needs a column at least, not {dict(self.tensors)}")
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
                    raise InvalidSettingsError(f"{setting} names {name!r}, which is no tensor{_hint(name, names)}")
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
        """All columns that are read, each once."""
        named = [column for columns in self.tensors.values() for column in _names(columns)]
        return tuple(dict.fromkeys(named + ([self.validation] if isinstance(self.validation, str) else [])))

    def to_json(self) -> dict[str, Any]:
        """For the key, and to say later how a set was made."""
        return {
            "tensors": {
                name: columns if isinstance(columns, str) else list(columns) for name, columns in self.tensors.items()
            },
            "dtypes": {name: np.dtype(dtype).str for name, dtype in self.dtypes.items()},
            "shapes": {name: list(shape) for name, shape in self.shapes.items()},
            "pad_to": dict(self.pad_to),
            "variable": sorted(self.variable),
            "sparse": dict(self.sparse),
            "allow_nan": self.allow_nan if isinstance(self.allow_nan, bool) else sorted(self.allow_nan),
            "validation": self.validation,
            "seed": self.seed,
            "shard_bytes": self.shard_bytes,
            "pre_shuffle": self.pre_shuffle,
        }

    def resolve(self, schema: Any, case_sensitive: bool = False) -> tuple[Tensor, ...]:
        """The tensors, with the types of their columns.

        case_sensitive: whether Spark tells columns apart that differ in case alone.

        Raises: DataError: columns that are missing, there twice, or of types that cannot be stored so.
        """
        types = {field.name: field.dataType for field in schema.fields}
        for column in self.columns:
            if column not in types:
                raise DataError(
                    f"there is no column {column!r}{_hint(column, list(types))}; the columns are {list(types)}",
                    column=column,
                )
            alike = [name for name in schema.names if _same(name, column, case_sensitive)]
            if len(alike) > 1:
                raise DataError(
                    f"column {column!r} is not unique, there are {alike}; rename all but one", column=column
                )
        if isinstance(self.validation, str) and types[self.validation].typeName() != "boolean":
            found = types[self.validation].simpleString()
            raise DataError(
                f"validation column {self.validation!r} must be boolean, not {found}", column=self.validation
            )
        return tuple(
            self._tensor(name, [_column(column, types[column]) for column in _names(columns)], isinstance(columns, str))
            for name, columns in self.tensors.items()
        )

    def _tensor(self, name: str, columns: Sequence[Column], alone: bool) -> Tensor:
        first = columns[0]
        asked = self.dtypes.get(name)
        natural = np.result_type(*(np.dtype(column.dtype) for column in columns))
        dtype = _dtype(name, asked) if asked is not None else natural.newbyteorder("<").str
        allow = self.allow_nan if isinstance(self.allow_nan, bool) else name in self.allow_nan
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
                raise InvalidSettingsError(f"tensor {name!r} is of variable length: no dtype, shape or pad_to applies")
        elif first.source == "vector":
            kind = None
            if name in self.sparse:
                kind = Kind.SPARSE if self.sparse[name] else Kind.DENSE
            if len(columns) > 1:
                kind = Kind.DENSE if kind is None else kind
        elif name in self.sparse:
            raise InvalidSettingsError(f"sparse names {name!r}, whose column {first.name!r} is not a vector")
        if len(columns) > 1:
            others = [column for column in columns if column.source == "string"]
            if kind is not Kind.DENSE or others:
                odd = (others or columns)[0].name
                raise DataError(
                    f"tensor {name!r}: column {odd!r} is of variable length or sparse and needs a tensor of its own",
                    column=odd,
                )
        if kind is Kind.SPARSE and np.dtype(dtype).str not in ("<f4", "<f8"):
            raise InvalidSettingsError(f"tensor {name!r} is sparse and so float32 or float64, not {dtype}")
        if name in self.pad_to and (len(columns) > 1 or first.source not in ("list", "binary") or first.depth > 1):
            raise InvalidSettingsError(f"pad_to is for one array or binary column, which tensor {name!r} is not")
        return Tensor(name, tuple(columns), dtype, kind, not alone, shape, self.pad_to.get(name), allow)


def _same(name: str, other: str, case_sensitive: bool) -> bool:
    return name == other or (not case_sensitive and name.lower() == other.lower())


def _names(columns: str | Sequence[str]) -> list[str]:
    return [columns] if isinstance(columns, str) else list(columns)


def _dtype(name: str, asked: str) -> str:
    try:
        dtype = np.dtype(asked)
    except TypeError:
        raise InvalidSettingsError(f"dtypes of {name!r}: numpy knows no {asked!r}") from None
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise InvalidSettingsError(f"dtypes of {name!r}: {asked!r} is not a number of at most 8 bytes")
    return dtype.newbyteorder("<").str


def _column(name: str, spark_type: Any) -> Column:
    element, depth = spark_type, 0
    while element.typeName() == "array":
        element, depth = element.elementType, depth + 1
    kind = element.typeName()
    if depth == 0:
        if kind == "vectorudt":
            return Column(name, "vector", "<f8")
        if kind == "binary":
            return Column(name, "binary", "|u1")
        if kind in ("string", "char", "varchar"):
            return Column(name, "string", "|u1")
    if kind in _ELEMENTS:
        whole = kind == "decimal" and element.scale == 0
        return Column(name, "list" if depth else "scalar", _ELEMENTS[kind], depth, whole)
    if depth and kind in ("string", "binary", "vectorudt"):
        instead = "turn the elements into numbers, or explode them into columns"
    else:
        instead = _INSTEAD.get(kind, "cast it to a number, an array of numbers, a vector, binary or string")
    raise DataError(
        f"column {name!r} is of type {spark_type.simpleString()}, which cannot be stored; {instead}", column=name
    )


def cast_of(spark_type: Any) -> str | None:
    """What Spark has to cast a column to before it is sent to Python: decimals, which Arrow keeps as such, to double.

    Returns: Spark's name of the type; None: nothing to do.
    """
    if spark_type.typeName() == "decimal":
        return "double"
    if spark_type.typeName() == "array" and (inner := cast_of(spark_type.elementType)) is not None:
        return f"array<{inner}>"
    return None


def _hint(name: str, known: Iterable[str]) -> str:
    found = nearest(name, list(known))
    return f"; did you mean {found!r}?" if found else ""
