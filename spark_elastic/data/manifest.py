"""The manifest of a materialised set: written last, so it is the commit. Only the files that it lists count.

What a reader may take for granted of the shards of a split:

- Their order is fixed, and with it the number of every row: those of the first shard come first.
- A file starts with its first record and holds nothing but records; references into the sidecar count from the start
  of that shard's own sidecar.
- A writer (a task) leaves a run of shards. All but the last of a run hold a multiple of `layout.rows_per_page_run`
  rows, so the next one of the run can be mapped right behind it. The last of a run, the only one for most, may hold any
  number of rows: what follows can be mapped at the next multiple of `rows_per_page_run` rows, and the records of the
  gap are no rows. Where a run ends cannot be seen, and need not be: a row count that is no such multiple ends one.
- No shard is empty.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from spark_elastic.data.layout import Layout

MANIFEST_NAME = "manifest.json"
FORMAT = "spark_elastic.data"
FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of packed records.

    file: relative to the manifest. nbytes: rows × stride. crc32: of the file. sidecar: the file with the values of
    variable length, relative to the manifest; None: there are none.
    """

    file: str
    rows: int
    nbytes: int
    crc32: int
    sidecar: str | None = None
    sidecar_nbytes: int = 0
    sidecar_crc32: int = 0


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a set consists of.

    splits: the shards of "train", and of "validation" if rows were set aside; in an order that does not depend on
    which task ended first. key: what the content is addressed by, see `reuse`. about: free facts for people.
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
        """Of all splits."""
        return [shard for shards in self.splits.values() for shard in shards]

    @property
    def files(self) -> set[str]:
        """All that belong to the set, besides the manifest itself."""
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
        return json.dumps(document, indent=1).encode()

    @classmethod
    def loads(cls, text: bytes) -> Manifest:
        """Raises: ValueError: not a manifest, cut off, or of another version."""
        try:
            document = json.loads(text)
        except ValueError as error:
            raise ValueError(f"not JSON: {error}") from error
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise ValueError("not a manifest of spark_elastic.data")
        if document.get("version") != FORMAT_VERSION:
            raise ValueError(f"format version {document.get('version')!r}; this is version {FORMAT_VERSION}")
        try:
            layout = Layout.from_json(document["layout"])
            splits = {
                str(name): tuple(Shard(**shard) for shard in shards) for name, shards in document["splits"].items()
            }
            manifest = cls(layout, splits, str(document["key"]), document["about"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a manifest: {error!r}") from error
        for name, shards in splits.items():
            for shard in shards:
                for file in (shard.file, shard.sidecar or "-"):
                    if not isinstance(file, str) or file.startswith("/") or ".." in file.split("/"):
                        raise ValueError(f"{name}: {file!r} is not a file of this set")
                numbers = (shard.rows, shard.nbytes, shard.crc32, shard.sidecar_nbytes, shard.sidecar_crc32)
                if not all(isinstance(number, int) and number >= 0 for number in numbers):
                    raise ValueError(f"{name}: {shard.file} has sizes of {numbers}")
                if shard.nbytes != shard.rows * layout.stride:
                    raise ValueError(f"{name}: {shard.file} has {shard.nbytes} bytes for {shard.rows} rows")
        return manifest
