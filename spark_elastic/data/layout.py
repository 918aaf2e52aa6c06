"""The layout of a stored row: tensors of one dtype each, at fixed offsets in a record of fixed size.

So a batch is one gather of records, and each of its tensors is a view into it.

Files of records can be mapped into memory one behind the other: each file of a writer, except its last one, contains a
multiple of `Layout.rows_per_page_run` rows, which is a whole number of pages. `manifest` lists what readers may assume.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

import numpy as np

LAYOUT_VERSION = 1
PAGE = 4096
"""Bytes. Machines with larger pages read the same files, without mapping them side by side."""
_NUMBER = re.compile(r"[<>|=]?[a-z]+[0-9]{0,2}")
"""numpy's names of plain types. From other texts np.dtype would make records, or allocate memory."""
_REFERENCE = np.dtype([("start", "<i8"), ("length", "<i8")])
"""The part of a record that refers to a value of variable length: its bytes in the shard's sidecar."""


class Kind(str, Enum):
    """How a field's value is stored."""

    DENSE = "dense"
    """In the record: `shape` values of `dtype`."""
    BYTES = "bytes"
    """In the sidecar. Batches have a list of `bytes`."""
    STRING = "string"
    """In the sidecar, as UTF-8. Batches have a list of `str`."""
    ARRAY = "array"
    """In the sidecar, values of `dtype`. Batches have a list of one-dimensional arrays."""
    SPARSE = "sparse"
    """In the sidecar: int32 indices, then as many values of `dtype`. Batches have a dense array `[rows, *shape]`."""


@dataclass(frozen=True, slots=True)
class TensorField:
    """One tensor of a row.

    Attributes:
        name: Its name in batches.
        columns: The columns of the DataFrame that are joined, in this order.
        dtype: A dtype of numpy, little-endian ("<f4").
        shape: Of one row's value; () for a scalar. Not used for BYTES, STRING and ARRAY.
        offset: Bytes from the start of the record.
        kind: How the value is stored.
    """

    name: str
    columns: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    offset: int = 0
    kind: Kind = Kind.DENSE

    @property
    def nbytes(self) -> int:
        """The field's size in the record."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize if self.kind is Kind.DENSE else _REFERENCE.itemsize

    @property
    def record_type(self) -> Any:
        """The numpy dtype spec of the field's part of the record."""
        return (self.dtype, self.shape) if self.kind is Kind.DENSE else _REFERENCE

    @property
    def alignment(self) -> int:
        return np.dtype(self.dtype).itemsize if self.kind is Kind.DENSE else 8


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of a record.

    Attributes:
        fields: The tensors.
        stride: The record's size in bytes, a multiple of 8.
    """

    fields: tuple[TensorField, ...]
    stride: int

    @classmethod
    def of(cls, fields: Iterable[TensorField]) -> Layout:
        """Place fields at aligned offsets, in the order given.

        Raises:
            ValueError: There is no field, or two have the same name.
        """
        placed: list[TensorField] = []
        end = 0
        for field in fields:
            start = -(-end // field.alignment) * field.alignment
            placed.append(TensorField(field.name, field.columns, field.dtype, field.shape, start, field.kind))
            end = start + field.nbytes
        names = [field.name for field in placed]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"a layout needs one or more fields with different names, not {names}")
        return cls(tuple(placed), max(8, -(-end // 8) * 8))

    @property
    def dtype(self) -> np.dtype[Any]:
        """The record as a numpy structured dtype of `stride` bytes."""
        return np.dtype(
            {
                "names": [field.name for field in self.fields],
                "formats": [field.record_type for field in self.fields],
                "offsets": [field.offset for field in self.fields],
                "itemsize": self.stride,
            }
        )

    @property
    def rows_per_page_run(self) -> int:
        """The smallest number of rows whose records fill whole pages."""
        return PAGE // math.gcd(self.stride, PAGE)

    @property
    def has_sidecar(self) -> bool:
        return any(field.kind is not Kind.DENSE for field in self.fields)

    def __getitem__(self, name: str) -> TensorField:
        for field in self.fields:
            if field.name == name:
                return field
        raise KeyError(name)

    def to_json(self) -> dict[str, Any]:
        return {
            "version": LAYOUT_VERSION,
            "stride": self.stride,
            "fields": [{**asdict(field), "kind": field.kind.value} for field in self.fields],
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Layout:
        """Decode a layout.

        Raises:
            ValueError: Another version wrote it, or it is invalid; with the name of the wrong field.
        """
        if not isinstance(document, Mapping):
            raise ValueError(f"layout is a {type(document).__name__}, not an object")
        if document.get("version") != LAYOUT_VERSION:
            raise ValueError(f"layout version is {document.get('version')!r:.40}; this package reads {LAYOUT_VERSION}")
        fields = document.get("fields")
        if not isinstance(fields, list):
            raise ValueError(f"layout.fields is {fields!r:.40}, not a list")
        placed = tuple(_field(entry, f"layout.fields[{number}]") for number, entry in enumerate(fields))
        layout = cls(placed, _number(document.get("stride"), "layout.stride"))
        try:
            expected = cls.of(placed)
        except ValueError as error:
            raise ValueError(f"layout.fields: {error}") from error
        if layout != expected:
            raise ValueError("layout: offsets or stride do not follow from the fields")
        try:
            assert layout.dtype.itemsize == layout.stride
        except (ValueError, OverflowError) as error:
            raise ValueError(f"layout.fields: numpy cannot make a record of them: {error}") from error
        return layout


def _field(entry: Any, where: str) -> TensorField:
    if not isinstance(entry, Mapping):
        raise ValueError(f"{where} is {entry!r:.40}, not an object")
    for name, wanted in (("name", str), ("columns", list), ("dtype", str), ("shape", list), ("kind", str)):
        if not isinstance(entry.get(name), wanted):
            raise ValueError(f"{where}.{name} is {entry.get(name)!r:.40}, not of {wanted.__name__}")
    if not all(isinstance(column, str) for column in entry["columns"]):
        raise ValueError(f"{where}.columns is {entry['columns']!r:.80}, not a list of names")
    shape = tuple(_number(size, f"{where}.shape") for size in entry["shape"])
    try:
        dtype = np.dtype(entry["dtype"]) if _NUMBER.fullmatch(entry["dtype"]) else None
    except TypeError:
        dtype = None
    if dtype is None or dtype.kind not in "biuf":
        raise ValueError(f"{where}.dtype is {entry['dtype']!r:.40}, not a numeric dtype")
    try:
        kind = Kind(entry["kind"])
    except ValueError as error:
        raise ValueError(f"{where}.kind: {error}") from error
    offset = _number(entry.get("offset"), f"{where}.offset")
    return TensorField(entry["name"], tuple(entry["columns"]), dtype.str, shape, offset, kind)


def _number(value: Any, where: str) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{where} is {value!r:.40}, not an integer of at least 0")
    return value
