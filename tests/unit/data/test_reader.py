"""Batches of a materialised set: every row once, the same global batches in every world."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_elastic.data.layout import Layout, TensorField
from spark_elastic.data.manifest import Manifest, Shard
from spark_elastic.data.reader import BatchReader


def tiny_set(folder, shard_rows):
    layout = Layout.of([TensorField("features", ("f",), "<f4", (3,)), TensorField("label", ("l",), "<i8", ())])
    shards, first = [], 0
    for number, rows in enumerate(shard_rows):
        records = np.zeros(rows, layout.dtype)
        records["label"] = np.arange(first, first + rows)
        records["features"] = np.arange(first, first + rows)[:, None] * [1, 2, 3]
        records.tofile(folder / f"{number}.rows")
        shards.append(Shard(f"{number}.rows", rows, records.nbytes, 0))
        first += rows
    store = SimpleNamespace(local_path=lambda file: folder / file)
    return SimpleNamespace(store=store, layout=layout, manifest=Manifest(layout, {"train": tuple(shards)}))


@settings(max_examples=30)
@given(shard_rows=st.lists(st.integers(0, 20), max_size=4), size=st.integers(1, 6), batch=st.integers(1, 25))
def test_each_row_comes_once_and_global_batches_are_those_of_one_rank(tmp_path_factory, shard_rows, size, batch):
    dataset = tiny_set(tmp_path_factory.mktemp("set"), shard_rows)
    alone = [set(b["label"].tolist()) for b in BatchReader(dataset, batch_size=batch).epoch(0)]
    ranks = [BatchReader(dataset, batch_size=batch, rank=rank, size=size).epoch(0) for rank in range(size)]
    together = []
    for parts in zip(*ranks, strict=True):
        labels = np.concatenate([part["label"] for part in parts])
        assert len(set(labels.tolist())) == len(labels) == parts[0].global_rows == sum(part.rows for part in parts)
        for part in parts:
            assert (part["features"] == part["label"][:, None] * np.float32([1, 2, 3])).all()
        together.append(set(labels.tolist()))
    assert together == alone
    assert sorted(row for rows in alone for row in rows) == list(range(sum(shard_rows)))
