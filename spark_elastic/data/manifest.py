"""The manifest of a materialised dataset. It is written last, which commits the dataset: other files do not count.

Readers may assume of the shards of a split:

- Their order is fixed, and with it the number of every row: those of the first shard come first.
- A file starts with its first record and contains only records. References into the sidecar count from the start of
  the shard's own sidecar.
- A writer (a task) makes a sequence of shards. Each of them except the last contains a multiple of
  `layout.rows_per_page_run` rows, so the next shard can be mapped right behind it. The last shard, for most writers
  their only one, may contain any number of rows: the next shard can be mapped at the next multiple of
  `rows_per_page_run` rows, and the gap contains no rows. So the row counts alone tell where shards can be mapped.
- No shard is empty.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any

from spark_elastic.data.layout import Layout
from spark_elastic.errors import DatasetError

# --- JSON documents that contain their checksum, so that a changed one is detected ------------------

CHECKSUM = "checksum"
"""The field with the CRC-32 of all others, as `json.dumps` writes them with sorted keys and no spaces."""


def seal(document: Mapping[str, Any]) -> bytes:
    """Encode a document of plain values as JSON, with its checksum as the last field."""
    plain = json.loads(json.dumps(dict(document)))  # with tuples and keys as they will be read
    return json.dumps({**plain, CHECKSUM: _checksum(plain)}, indent=1).encode()


def unseal(text: bytes, known: frozenset[str]) -> dict[str, Any]:
    """Decode a document of `seal`, and return it without its checksum.

    Documents without a checksum, of earlier versions, are accepted.

    Args:
        text: The document.
        known: The fields that it may have. An unknown field could be a checksum whose name was damaged.

    Raises:
        ValueError: It is not JSON, not an object, or not what was written.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ValueError(f"its JSON is a {type(document).__name__}, not an object")
    if CHECKSUM in document:
        expected = document.pop(CHECKSUM)
        found = _checksum(document)
        if found != expected:
            raise ValueError(f"its fields have the checksum {found}, and {CHECKSUM} says {expected!r:.40}")
    if unknown := sorted(document.keys() - known):
        raise ValueError(f"it has a field {unknown[0]!r:.40}, which this version of the package does not know")
    return document


def _checksum(document: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(document, sort_keys=True, separators=(",", ":")).encode())


# --- the manifest -----------------------------------------------------------------------------------

MANIFEST_NAME = "manifest.json"
FORMAT = "spark_elastic.data"
FORMAT_VERSION = 1
FOUND_AGAIN = "found_again"
"""The field of `Manifest.about` that says whether a later `materialize` can reuse the dataset."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of packed records.

    Attributes:
        file: Its path, relative to the manifest.
        rows: The number of records.
        nbytes: Its size: rows × stride.
        crc32: Its checksum.
        sidecar: The file with the values of variable length, relative to the manifest. None: there is none.
        sidecar_nbytes: The sidecar's size.
        sidecar_crc32: The sidecar's checksum.
    """

    file: str
    rows: int
    nbytes: int
    crc32: int
    sidecar: str | None = None
    sidecar_nbytes: int = 0
    sidecar_crc32: int = 0


_SHARD_HAS = frozenset(each.name for each in fields(Shard))
_SHARD_NEEDS = frozenset(each.name for each in fields(Shard) if each.default is MISSING)
_FIELDS = frozenset(("format", "version", "key", "layout", "splits", "about"))
_FILE = re.compile(r"[^/\0][^\0]*")


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of a dataset.

    Attributes:
        layout: The layout of the records.
        splits: The shards of "train", and of "validation" if there is one. Their order does not depend on which task
            ended first.
        key: Identifies the rows and settings, see `reuse`.
        about: Facts for people: settings, and when and by what the dataset was written.
    """

    layout: Layout
    splits: Mapping[str, tuple[Shard, ...]]
    key: str = ""
    about: Mapping[str, Any] = field(default_factory=dict)

    def rows(self, split: str) -> int:
        return sum(shard.rows for shard in self.splits[split])

    def nbytes(self, split: str) -> int:
        return sum(shard.nbytes + shard.sidecar_nbytes for shard in self.splits[split])

    @property
    def shards(self) -> list[Shard]:
        """The shards of all splits."""
        return [shard for shards in self.splits.values() for shard in shards]

    @property
    def files(self) -> set[str]:
        """The files of the dataset, except the manifest."""
        return {file for shard in self.shards for file in (shard.file, shard.sidecar) if file is not None}

    def dumps(self) -> bytes:
        document = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "key": self.key,
            "layout": self.layout.to_json(),
            "splits": {name: [asdict(shard) for shard in shards] for name, shards in self.splits.items()},
            "about": dict(self.about),
        }
        return seal(document)

    @classmethod
    def loads(cls, text: bytes) -> Manifest:
        """Decode a manifest.

        Raises:
            ValueError: It is not a manifest, incomplete, changed, or of another version; with the wrong field's name.
        """
        document = unseal(text, _FIELDS)
        if document.get("format") != FORMAT:
            raise ValueError(f"format is {document.get('format')!r:.40}: not a manifest of {FORMAT}")
        if document.get("version") != FORMAT_VERSION:
            raise ValueError(f"format version is {document.get('version')!r:.40}; this package reads {FORMAT_VERSION}")
        for name, kind in (("key", str), ("splits", dict), ("about", dict)):
            if not isinstance(document.get(name), kind):
                raise ValueError(f"{name} is {document.get(name)!r:.40}, not of {kind.__name__}")
        if not isinstance(document["about"].get("settings", {}), dict):
            raise ValueError(f"about.settings is {document['about']['settings']!r:.40}, not an object")
        layout = Layout.from_json(document.get("layout"))  # type: ignore[arg-type]
        splits = {}
        for name, shards in document["splits"].items():
            if not isinstance(shards, list):
                raise ValueError(f"splits.{name} is {shards!r:.40}, not a list")
            splits[name] = tuple(
                _shard(shard, layout.stride, f"splits.{name}[{number}]") for number, shard in enumerate(shards)
            )
        return cls(layout, splits, document["key"], document["about"])


def checksum_error(url: str, file: str, found: int, expected: int) -> DatasetError:
    """Return the error for a file whose checksum differs from the one in the manifest."""
    return DatasetError(
        f"{url}/{file} has the checksum {found:08x}, the manifest says {expected:08x}; the dataset is damaged, delete "
        "it and write it again",
        url=url,
        file=file,
    )


def _shard(entry: Any, stride: int, where: str) -> Shard:
    if not isinstance(entry, dict) or not _SHARD_NEEDS <= entry.keys() <= _SHARD_HAS:
        raise ValueError(f"{where} is {entry!r:.80}, not a shard with {', '.join(sorted(_SHARD_NEEDS))}")
    for name in ("file", "sidecar"):
        value = entry.get(name)
        if name == "sidecar" and value is None:
            continue
        if not isinstance(value, str) or not _FILE.fullmatch(value) or ".." in value.split("/"):
            raise ValueError(f"{where}.{name} is {value!r:.80}, not a file of this dataset")
    for name in ("rows", "nbytes", "crc32", "sidecar_nbytes", "sidecar_crc32"):
        value = entry.get(name, 0)
        if type(value) is not int or value < 0:
            raise ValueError(f"{where}.{name} is {value!r:.40}, not an integer of at least 0")
    shard = Shard(**entry)
    if shard.nbytes != shard.rows * stride:
        raise ValueError(f"{where}.nbytes: {shard.file} has {shard.nbytes} bytes for {shard.rows} rows of {stride}")
    return shard
