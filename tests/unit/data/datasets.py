"""Small datasets whose rows contain their own numbers."""

import zlib

import numpy as np

from spark_elastic.data.dataset import Dataset
from spark_elastic.data.manifest import MANIFEST_NAME, Layout, Manifest, Shard, TensorField
from spark_elastic.data.store import Store

LAYOUT = Layout.of([TensorField("features", ("f",), "<f4", (3,)), TensorField("label", ("l",), "<i8", ())])


def numbered(where, shard_rows, layout=LAYOUT):
    """Write a dataset whose shards have these numbers of rows, also such as no writer makes.

    "label" is 0, 1, ... in the order of the files, and "features" is 1, 2 and 3 times the label.
    """
    store = Store.create(where)
    shards, first = [], 0
    for number, rows in enumerate(shard_rows):
        records = np.zeros(rows, layout.dtype)
        records["label"] = np.arange(first, first + rows)
        records["features"] = records["label"][:, None] * [1, 2, 3]
        store.write_bytes(f"{number}.rows", records.tobytes())
        shards.append(Shard(f"{number}.rows", rows, records.nbytes, zlib.crc32(records.tobytes())))
        first += rows
    manifest = Manifest(layout, {"train": tuple(shards)})
    store.write_bytes(MANIFEST_NAME, manifest.dumps())
    return Dataset(store, manifest)


def labels(batches):
    return [batch["label"].tolist() for batch in batches]


def field_of(dataset, name):
    """Return the field of a tensor in the layout of a dataset."""
    (found,) = [field for field in dataset.layout.fields if field.name == name]
    return found
