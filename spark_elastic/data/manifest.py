"""The format of a dataset: the layout of its records, its shards, and the manifest that commits it.

A row is a record of fixed size with tensors at fixed offsets, so a batch is one gather of records, and each of its
tensors is a view into it. The manifest is written last; a file that it does not list is not a part of the dataset.
Readers may assume of the shards of a split:

- Their order is fixed, and with it the number of every row: those of the first shard come first.
- A file starts with its first record and contains only records. References into the sidecar count from the start of
  the shard's own sidecar.
- No shard is empty.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from dataclasses import field as dataclass_field
from enum import Enum
from typing import Any

import numpy as np

from spark_elastic.errors import DatasetError

# --- JSON documents that contain their checksum, so that a changed one is detected ------------------

CHECKSUM = "checksum"  # the field with the CRC-32 of all others, as `json.dumps` writes them with sorted keys


def seal(document: Mapping[str, Any]) -> bytes:
    """Encode a document of plain values as JSON, with its checksum as the last field."""
    plain = json.loads(json.dumps(dict(document)))  # with tuples and keys as they will be read
    return json.dumps({**plain, CHECKSUM: _checksum(plain)}, indent=1).encode()


def unseal(text: bytes) -> dict[str, Any]:
    """Decode a document of `seal`, without its checksum. Raise ValueError if it is not what was written."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ValueError(f"its JSON is a {type(document).__name__}, not an object")
    expected = document.pop(CHECKSUM, None)
    try:
        found = _checksum(document)
    except RecursionError as error:
        raise ValueError(f"its fields are nested too deep: {error}") from error
    if found != expected:
        raise ValueError(f"its fields have the checksum {found}, and {CHECKSUM} says {expected!r:.40}")
    return document


def _checksum(document: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(document, sort_keys=True, separators=(",", ":")).encode())


# --- the layout of a record -------------------------------------------------------------------------

LAYOUT_VERSION = 1
_NUMBER = re.compile(r"[<>|=]?[a-z]+[0-9]{0,2}")  # plain types: of other texts np.dtype would make records
_REFERENCE = np.dtype([("start", "<i8"), ("length", "<i8")])  # to the bytes of a value in the shard's sidecar


class Kind(str, Enum):
    """How a field's value is stored."""

    DENSE = "dense"  # in the record: `shape` values of `dtype`
    BYTES = "bytes"  # in the sidecar. Batches have a list of `bytes`.
    STRING = "string"  # in the sidecar, as UTF-8. Batches have a list of `str`.
    ARRAY = "array"  # in the sidecar, values of `dtype`. Batches have a list of one-dimensional arrays.
    SPARSE = "sparse"  # in the sidecar: int32 indices, then as many values. Batches have an array `[rows, *shape]`.


@dataclass(frozen=True, slots=True)
class TensorField:
    """One tensor of a row."""

    name: str  # its name in batches
    columns: tuple[str, ...]  # the columns of the DataFrame that are joined, in this order
    dtype: str  # a dtype of numpy, little-endian ("<f4")
    shape: tuple[int, ...]  # shape of one row's value; () for a scalar. Not used for BYTES, STRING and ARRAY
    offset: int = 0  # bytes from the start of the record
    kind: Kind = Kind.DENSE

    @property
    def record_type(self) -> np.dtype[Any]:
        """The numpy dtype of the field's part of the record."""
        return np.dtype((self.dtype, self.shape)) if self.kind is Kind.DENSE else _REFERENCE


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of a record."""

    fields: tuple[TensorField, ...]
    stride: int  # the record's size in bytes, a multiple of 8

    @classmethod
    def of(cls, fields: Iterable[TensorField]) -> Layout:
        """Place fields at aligned offsets, in the order given. Raise ValueError unless their names are different."""
        placed: list[TensorField] = []
        end = 0
        for field in fields:
            alignment = np.dtype(field.dtype).itemsize if field.kind is Kind.DENSE else 8
            start = -(-end // alignment) * alignment
            placed.append(replace(field, offset=start))
            end = start + field.record_type.itemsize
        names = [field.name for field in placed]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"a layout needs one or more fields with different names, not {names}")
        return cls(tuple(placed), max(8, -(-end // 8) * 8))

    @property
    def dtype(self) -> np.dtype[Any]:
        """The record as a numpy structured dtype of `stride` bytes."""
        return self.record_of([field.record_type for field in self.fields])

    def record_of(self, formats: list[np.dtype[Any]]) -> np.dtype[Any]:
        """Return the record as a numpy structured dtype, with another format of each field."""
        names, offsets = [field.name for field in self.fields], [field.offset for field in self.fields]
        return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": self.stride})

    def to_json(self) -> dict[str, Any]:
        return {
            "version": LAYOUT_VERSION,
            "stride": self.stride,
            "fields": [{**asdict(field), "kind": field.kind.value} for field in self.fields],
        }

    @classmethod
    def from_json(cls, document: Any) -> Layout:
        """Decode a layout. Raise ValueError, with the wrong field's name, if it is invalid or of another version."""
        if not isinstance(document, Mapping):
            raise ValueError(f"layout is a {type(document).__name__}, not an object")
        if document.get("version") != LAYOUT_VERSION:
            raise ValueError(f"layout version is {document.get('version')!r:.40}; this package reads {LAYOUT_VERSION}")
        entries = typed(document, "fields", list, "layout.")
        placed = tuple(tensor_field(entry, f"layout.fields[{number}]") for number, entry in enumerate(entries))
        layout = cls(placed, whole_number(document.get("stride"), "layout.stride"))
        try:
            expected = cls.of(placed)
            assert expected.dtype.itemsize == expected.stride
        except (ValueError, OverflowError) as error:
            raise ValueError(f"layout.fields: no record can be made of them: {error}") from error
        if layout != expected:
            raise ValueError("layout: offsets or stride do not follow from the fields")
        return layout


def tensor_field(entry: Any, where: str) -> TensorField:
    """Decode the description of a tensor. Raise ValueError, with `where` and the wrong field, if it is invalid."""
    if not isinstance(entry, Mapping):
        raise ValueError(f"{where} is {entry!r:.40}, not an object")
    for name, expected in (("name", str), ("dtype", str), ("shape", list), ("kind", str)):
        typed(entry, name, expected, f"{where}.")
    columns = names_in(entry, "columns", f"{where}.")
    shape = tuple(whole_number(size, f"{where}.shape") for size in entry["shape"])
    try:
        dtype = np.dtype(entry["dtype"]) if _NUMBER.fullmatch(entry["dtype"]) else None
    except TypeError:
        dtype = None
    if dtype is None or dtype.kind not in "biuf":
        raise ValueError(f"{where}.dtype is {entry['dtype']!r:.40}, not a numeric dtype")
    try:
        kind = Kind(entry["kind"])
    except ValueError as error:
        known = ", ".join(each.value for each in Kind)
        raise ValueError(f"{where}.kind is {entry['kind']!r:.40}, not one of {known}") from error
    offset = whole_number(entry.get("offset"), f"{where}.offset")
    return TensorField(entry["name"], columns, dtype.str, shape, offset, kind)


def whole_number(value: Any, where: str) -> int:
    """Return an integer of at least 0. Raise ValueError, which calls it `where`, if it is something else."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{where} is {value!r:.40}, not an integer of at least 0")
    return value


def typed(document: Mapping[str, Any], name: str, kind: type, where: str = "") -> Any:
    """Return a field of `document`. Raise ValueError, which calls it `where` and `name`, if it is of another type."""
    value = document.get(name)
    if not isinstance(value, kind):
        raise ValueError(f"{where}{name} is {value!r:.40}, not of {kind.__name__}")
    return value


def names_in(document: Mapping[str, Any], name: str, where: str = "") -> tuple[str, ...]:
    """Return a field of `document` that is a list of names. Raise ValueError as `typed` does."""
    found = typed(document, name, list, where)
    if not all(isinstance(each, str) for each in found):
        raise ValueError(f"{where}{name} is {found!r:.80}, not a list of names")
    return tuple(found)


# --- the manifest -----------------------------------------------------------------------------------

MANIFEST_NAME = "manifest.json"
FORMAT = "spark_elastic.data"
FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of packed records."""

    file: str  # its path, relative to the manifest
    rows: int  # the number of records
    nbytes: int  # its size: rows × stride
    crc32: int
    # The file with the values of variable length, relative to the manifest. None: there is none.
    sidecar: str | None = None
    sidecar_nbytes: int = 0
    sidecar_crc32: int = 0


_SHARD_HAS = frozenset(each.name for each in fields(Shard))
_SHARD_NEEDS = frozenset(each.name for each in fields(Shard) if each.default is MISSING)
_FILE = re.compile(r"[^/\0][^\0]{0,500}")


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of a dataset."""

    layout: Layout
    # The shards of "train", and of "validation" if there is one. Their order does not depend on which task ended
    # first.
    splits: Mapping[str, tuple[Shard, ...]]
    key: str = ""  # identifies the settings with which the rows were written
    # Facts for people: settings, and when and by what the dataset was written.
    about: Mapping[str, Any] = dataclass_field(default_factory=dict)

    def rows(self, split: str) -> int:
        return sum(shard.rows for shard in self.splits[split])

    def nbytes(self, split: str) -> int:
        return sum(shard.nbytes + shard.sidecar_nbytes for shard in self.splits[split])

    @property
    def files(self) -> dict[str, tuple[int, int]]:
        """The size and the checksum of each file of the dataset, except the manifest."""
        found = {}
        for shard in (shard for shards in self.splits.values() for shard in shards):
            found[shard.file] = (shard.nbytes, shard.crc32)
            if shard.sidecar is not None:
                found[shard.sidecar] = (shard.sidecar_nbytes, shard.sidecar_crc32)
        return found

    def dumps(self) -> bytes:
        return seal(
            {
                "format": FORMAT,
                "version": FORMAT_VERSION,
                "key": self.key,
                "layout": self.layout.to_json(),
                "splits": {name: [asdict(shard) for shard in shards] for name, shards in self.splits.items()},
                "about": dict(self.about),
            }
        )

    @classmethod
    def loads(cls, text: bytes) -> Manifest:
        """Decode a manifest. Raise ValueError, with the wrong field, if it is changed or of another version."""
        document = unseal(text)
        if document.get("format") != FORMAT:
            raise ValueError(f"format is {document.get('format')!r:.40}: not a manifest of {FORMAT}")
        if document.get("version") != FORMAT_VERSION:
            raise ValueError(f"format version is {document.get('version')!r:.40}; this package reads {FORMAT_VERSION}")
        about = typed(document, "about", dict)
        if "settings" in about:
            typed(about, "settings", dict, "about.")
        layout = Layout.from_json(document.get("layout"))
        splits = {}
        for name in typed(document, "splits", dict):
            shards = typed(document["splits"], name, list, "splits.")
            splits[name] = tuple(
                _shard(shard, layout.stride, f"splits.{name}[{number}]") for number, shard in enumerate(shards)
            )
        return cls(layout, splits, typed(document, "key", str), about)


def checksum_error(url: str, file: str, found: int, expected: int) -> DatasetError:
    """Return the error for a file whose checksum differs from the one in the manifest."""
    return DatasetError(
        f"{url}/{file} has the checksum {found:08x}, the manifest says {expected:08x}; the dataset is damaged, delete "
        "it and write it again"
    )


def _shard(entry: Any, stride: int, where: str) -> Shard:
    if not isinstance(entry, dict) or not _SHARD_NEEDS <= entry.keys() <= _SHARD_HAS:
        raise ValueError(f"{where} is {entry!r:.80}, not a shard with {', '.join(sorted(_SHARD_NEEDS))}")
    for name in ("file", "sidecar") if entry.get("sidecar") is not None else ("file",):
        value = entry[name]
        if not isinstance(value, str) or not _FILE.fullmatch(value) or ".." in value.split("/"):
            raise ValueError(f"{where}.{name} is {value!r:.80}, not a file of this dataset")
    for name in ("rows", "nbytes", "crc32", "sidecar_nbytes", "sidecar_crc32"):
        whole_number(entry.get(name, 0), f"{where}.{name}")
    shard = Shard(**entry)
    if shard.nbytes != shard.rows * stride:
        raise ValueError(f"{where}.nbytes: {shard.file} has {shard.nbytes} bytes for {shard.rows} rows of {stride}")
    return shard
