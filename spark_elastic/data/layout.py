"""What one stored row looks like: tensors of one dtype each, at fixed offsets in a record of fixed size.

A batch is then one gather of records, and each of its tensors is a view into it.

Files of records are cut so that they can be mapped into memory one behind the other: all but the last file of a writer
hold a multiple of `Layout.rows_per_page_run` rows, which is a whole number of pages. See `manifest` for what a reader
may take for granted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

import numpy as np

LAYOUT_VERSION = 1
PAGE = 4096
"""Bytes. Machines whose pages are larger read the same files, without mapping them side by side."""
_REFERENCE = np.dtype([("start", "<i8"), ("length", "<i8")])
"""What a record holds in place of a value of variable length: bytes in the shard's sidecar."""


class Kind(str, Enum):
    """How a field's value is stored."""

    DENSE = "dense"
    """In the record itself: `shape` values of `dtype`."""
    BYTES = "bytes"
    """In the sidecar, as it is. Batches hold a list of `bytes`."""
    STRING = "string"
    """In the sidecar, UTF-8. Batches hold a list of `str`."""
    ARRAY = "array"
    """In the sidecar, values of `dtype`. Batches hold a list of arrays of one axis each."""
    SPARSE = "sparse"
    """In the sidecar: int32 indices, then as many values of `dtype`. Batches hold a dense array `[rows, *shape]`."""


@dataclass(frozen=True, slots=True)
class TensorField:
    """One tensor of a row.

    name: what batches call it. columns: of the DataFrame, concatenated in this order. dtype: numpy's, little-endian
    ("<f4"). shape: of one row's value; () is a scalar; meaningless for BYTES, STRING and ARRAY. offset: bytes from the
    start of the record.
    """

    name: str
    columns: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    offset: int = 0
    kind: Kind = Kind.DENSE

    @property
    def nbytes(self) -> int:
        """Bytes that the field takes in the record."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize if self.kind is Kind.DENSE else _REFERENCE.itemsize

    @property
    def record_type(self) -> Any:
        """What numpy calls the field's part of the record."""
        return (self.dtype, self.shape) if self.kind is Kind.DENSE else _REFERENCE

    @property
    def alignment(self) -> int:
        return np.dtype(self.dtype).itemsize if self.kind is Kind.DENSE else 8


@dataclass(frozen=True, slots=True)
class Layout:
    """The record. stride: its size in bytes, a multiple of 8."""

    fields: tuple[TensorField, ...]
    stride: int

    @classmethod
    def of(cls, fields: Iterable[TensorField]) -> Layout:
        """With offsets that align each field, in the order given.

        Raises: ValueError: two fields have one name, or there is none.
        """
        placed: list[TensorField] = []
        end = 0
        for field in fields:
            start = -(-end // field.alignment) * field.alignment
            placed.append(TensorField(field.name, field.columns, field.dtype, field.shape, start, field.kind))
            end = start + field.nbytes
        names = [field.name for field in placed]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"a layout needs fields with different names, not {names}")
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
        """The fewest rows whose records fill whole pages."""
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
        """Raises: ValueError: written by another version, or no layout."""
        if document.get("version") != LAYOUT_VERSION:
            raise ValueError(f"layout version {document.get('version')!r}; this is version {LAYOUT_VERSION}")
        try:
            fields = tuple(
                TensorField(
                    str(entry["name"]),
                    tuple(map(str, entry["columns"])),
                    np.dtype(entry["dtype"]).str,
                    tuple(map(int, entry["shape"])),
                    int(entry["offset"]),
                    Kind(entry["kind"]),
                )
                for entry in document["fields"]
            )
            layout = cls(fields, int(document["stride"]))
            if layout != cls.of(fields):
                raise ValueError("offsets or stride are not those of this version")
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a layout: {error!r}") from error
        return layout
