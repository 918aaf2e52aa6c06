"""A materialised dataset: a folder with packed shards, and the manifest that lists them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spark_elastic.data.catalog import delete_dataset, leased
from spark_elastic.data.layout import Layout
from spark_elastic.data.manifest import MANIFEST_NAME, Manifest, checksum_error
from spark_elastic.data.reader import BatchReader
from spark_elastic.data.store import Store
from spark_elastic.errors import DatasetError


@dataclass(frozen=True)
class Dataset:
    """Rows in packed shards, complete and unchanging. Can be pickled.

    Attributes:
        store: The dataset's own folder; the manifest's files are relative to it.
        manifest: The layout of the rows, and the shards of each split.
    """

    store: Store
    manifest: Manifest

    @classmethod
    def open(cls, where: str | Path | Store, storage_options: Mapping[str, Any] | None = None) -> Dataset:
        """Open the dataset in the folder `where`.

        Raises:
            DatasetError: The folder has no dataset, or one that is incomplete, damaged, or of an unknown format.
        """
        store = Store.create(where, storage_options)
        try:
            text = store.read_bytes(MANIFEST_NAME)
        except (FileNotFoundError, NotADirectoryError):
            raise DatasetError(
                f"{store.url} holds no {MANIFEST_NAME}: it is not a materialised dataset, or writing it did not end",
                url=store.url,
            ) from None
        try:
            dataset = cls(store, Manifest.loads(text))
        except ValueError as error:
            raise DatasetError(f"{store.url}/{MANIFEST_NAME}: {error}", url=store.url) from error
        dataset._check_files()
        return dataset

    @property
    def layout(self) -> Layout:
        return self.manifest.layout

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self.manifest.splits)

    def rows(self, split: str = "train") -> int:
        """Return the number of rows of a split."""
        return self.manifest.rows(split)

    def reader(self, split: str = "train", **options: Any) -> BatchReader:
        """Return a `BatchReader` of one split; it takes the `options`."""
        return BatchReader(self, split, **options)

    def lease(self) -> AbstractContextManager[None]:
        """Protect the dataset from clean-up, by this and other processes, while the block runs."""
        return leased(self.store)

    def verify(self) -> None:
        """Read every file and compare its checksum with the manifest.

        Raises:
            DatasetError: A file differs from what was written.
        """
        for shard in self.manifest.shards:
            for file, expected in ((shard.file, shard.crc32), (shard.sidecar, shard.sidecar_crc32)):
                if file is not None and (found := self.store.checksum(file)[1]) != expected:
                    raise checksum_error(self.store.url, file, found, expected)

    def delete(self) -> None:
        """Delete all files of the dataset."""
        delete_dataset(self.store)

    def _check_files(self) -> None:
        expected = {}
        for shard in self.manifest.shards:
            expected[shard.file] = shard.nbytes
            if shard.sidecar is not None:
                expected[shard.sidecar] = shard.sidecar_nbytes
        found = {}
        for folder in sorted({file.rpartition("/")[0] for file in expected}):  # one request a folder, not one a file
            found.update({entry.path: entry.nbytes for entry in self.store.list(folder) if not entry.is_dir})
        for file, nbytes in expected.items():
            if found.get(file) != nbytes:
                size = f"{found[file]} bytes" if file in found else "not there"
                raise DatasetError(
                    f"{self.store.url}: {file} is {size}, the manifest says {nbytes} bytes; the dataset is damaged, "
                    "delete it and write it again",
                    url=self.store.url,
                    file=file,
                )
