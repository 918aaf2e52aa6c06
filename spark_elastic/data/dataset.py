"""A dataset: a folder with packed shards, and the manifest that lists them; `pack` writes one from arrays in memory."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spark_elastic.data.catalog import delete_dataset, leased
from spark_elastic.data.manifest import MANIFEST_NAME, Kind, Layout, Manifest, Shard, TensorField, checksum_error
from spark_elastic.data.reader import BatchReader
from spark_elastic.data.shards import SHARD_BYTES, Blob, Block, ShardWriter, encode_sparse
from spark_elastic.data.store import Store
from spark_elastic.errors import DataError, DatasetError


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
                f"{store.url} holds no {MANIFEST_NAME}: it is not a materialised dataset, or writing it did not end"
            ) from None
        try:
            dataset = cls(store, Manifest.loads(text))
        except ValueError as error:
            raise DatasetError(f"{store.url}/{MANIFEST_NAME}: {error}") from error
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
        """Read every file. Raise DatasetError if its checksum differs from the one in the manifest."""
        for file, (_, expected) in self.manifest.files.items():
            if (found := self.store.checksum(file)[1]) != expected:
                raise checksum_error(self.store.url, file, found, expected)

    def delete(self) -> None:
        """Delete all files of the dataset."""
        delete_dataset(self.store)

    def _check_files(self) -> None:
        expected, found = self.manifest.files, {}
        for folder in sorted({file.rpartition("/")[0] for file in expected}):  # one request a folder, not one a file
            found.update({entry.path: entry.nbytes for entry in self.store.list(folder) if not entry.is_dir})
        for file, (nbytes, _) in expected.items():
            if found.get(file) != nbytes:
                size = f"{found[file]} bytes" if file in found else "not there"
                raise DatasetError(
                    f"{self.store.url}: {file} is {size}, the manifest says {nbytes} bytes; the dataset is damaged, "
                    "delete it and write it again"
                )


# --- datasets from arrays in memory -----------------------------------------------------------------

TensorValues = npt.ArrayLike | Sequence[bytes] | Sequence[str] | Sequence[npt.NDArray[Any]]


def pack(
    tensors: Mapping[str, TensorValues],
    where: str | Path | Store,
    *,
    validation: Mapping[str, TensorValues] | None = None,
    sparse: Sequence[str] = (),
    shards: int = 1,
    shard_bytes: int = SHARD_BYTES,
    storage_options: Mapping[str, Any] | None = None,
) -> Dataset:
    """Write a dataset to the folder `where`.

    Args:
        tensors: By name, arrays whose first axis is the rows, all of the same length. For values of variable length, a
            list of `bytes`, of `str`, or of one-dimensional arrays of one dtype.
        where: The folder.
        validation: The same tensors with the rows of the split "validation".
        sparse: Names of arrays, [rows, width] of float32 or float64, of which only non-zero values are stored.
        shards: The number of files that the rows are divided into, evenly.
        shard_bytes: The size at which a file ends and another begins.
        storage_options: Options of fsspec's filesystem, as of `Store.create`.

    Raises:
        DataError: Tensors have different lengths, no rows, or values that cannot be stored.
        DatasetError: The folder contains a dataset already.
    """
    store = Store.create(where, storage_options)
    if store.exists(MANIFEST_NAME):
        raise DatasetError(f"{store.url} holds a dataset already; delete it, or choose another folder")
    splits = {"train": tensors, **({"validation": validation} if validation is not None else {})}
    layout: Layout | None = None
    written: dict[str, tuple[Shard, ...]] = {}
    run = uuid.uuid4().hex[:12]
    for split, values in splits.items():
        found, block = _block(split, values, sparse)
        layout = layout or found
        if found != layout:
            pairs = [(a, b) for a, b in zip(layout.fields, found.fields, strict=False) if a != b]
            others = [f"{a.name}: {a.dtype}{list(a.shape)}, not {b.name}: {b.dtype}{list(b.shape)}" for a, b in pairs]
            count = f"{len(layout.fields)} and {len(found.fields)} tensors"
            raise DataError(f"validation has other tensors than train: {'; '.join(others) or count}")
        made: list[Shard] = []
        for part in range(shards):
            start, stop = (len(block) * edge // shards for edge in (part, part + 1))
            writer = ShardWriter(store, f"{run}/{split}-{part:05d}", layout, shard_bytes, durable=True)
            writer.write(block[start:stop])
            made += writer.close()
        written[split] = tuple(made)
    assert layout is not None
    manifest = Manifest(layout, written)
    store.write_bytes(MANIFEST_NAME, manifest.dumps())
    return Dataset(store, manifest)


def _block(split: str, tensors: Mapping[str, TensorValues], sparse: Sequence[str]) -> tuple[Layout, Block]:
    rows = {name: len(values) for name, values in tensors.items()}  # type: ignore[arg-type]
    if len(set(rows.values())) != 1 or not next(iter(rows.values())):
        raise DataError(f"{split}: all tensors must have the same non-zero number of rows; got {rows}")
    fields, dense, blobs = [], {}, {}
    for name, values in tensors.items():
        if isinstance(values, list | tuple) and isinstance(values[0], bytes | str | np.ndarray):
            kind, dtype, blobs[name] = _encode_list(name, values)
            fields.append(TensorField(name, (name,), dtype, (), kind=kind))
            continue
        array = np.asarray(values)
        if array.dtype.kind not in "biuf":
            raise DataError(f"tensor {name!r}: values of {array.dtype} cannot be stored")
        kind = Kind.SPARSE if name in sparse else Kind.DENSE
        fields.append(TensorField(name, (name,), array.dtype.newbyteorder("<").str, array.shape[1:], kind=kind))
        if kind is Kind.DENSE:
            dense[name] = array
            continue
        if array.ndim != 2 or array.dtype.itemsize not in (4, 8):
            raise DataError(
                "a sparse tensor must have two axes and float32 or float64 values, not "
                f"{array.ndim} axes of {array.dtype}"
            )
        owners, places = np.nonzero(array)
        counts = np.bincount(owners, minlength=len(array))
        blobs[name] = encode_sparse(counts, places.astype(np.int32), array[owners, places])
    layout = Layout.of(fields)
    records = np.zeros(next(iter(rows.values())), layout.dtype)
    for name, array in dense.items():
        records[name] = array
    return layout, Block(records, blobs)


def _encode_list(name: str, values: Sequence[Any]) -> tuple[Kind, str, Blob]:
    first = values[0]
    if any(type(value) is not type(first) for value in values):
        types = sorted({type(value).__name__ for value in values})
        raise DataError(f"tensor {name!r}: a list must have values of one type, not {types}")
    if isinstance(first, np.ndarray):
        if any(value.ndim != 1 or value.dtype != first.dtype for value in values):
            raise DataError(f"tensor {name!r}: arrays of variable length must have one axis and one dtype")
        dtype = first.dtype.newbyteorder("<")
        encoded = [np.ascontiguousarray(value, dtype).tobytes() for value in values]
        return Kind.ARRAY, dtype.str, _blob(encoded)
    if isinstance(first, str):
        return Kind.STRING, "|u1", _blob([value.encode() for value in values])
    return Kind.BYTES, "|u1", _blob(values)


def _blob(values: Sequence[bytes]) -> Blob:
    return Blob(np.frombuffer(b"".join(values), np.uint8), np.array([len(value) for value in values], np.int64))
