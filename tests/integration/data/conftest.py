"""One local cluster for all tests of a module, and access to the stored rows of a dataset."""

import numpy as np
import pytest

from spark_elastic.data.catalog import delete_temporary
from spark_elastic.data.store import Store
from tests.integration.clusters import local


@pytest.fixture(scope="module")
def spark():
    with local(2, spark_sql_shuffle_partitions="3") as cluster:
        cluster.sc.setLogLevel("OFF")  # tasks fail here on purpose
        yield cluster.spark


@pytest.fixture
def store(tmp_path):
    yield Store.create(tmp_path / "store")
    delete_temporary()


class Rows:
    """The rows of one split in the order of the files."""

    def __init__(self, dataset, split="train"):
        self.records = []
        self.values = {field.name: [] for field in dataset.layout.fields if field.kind.value != "dense"}
        for shard in dataset.manifest.splits[split]:
            records = np.frombuffer(dataset.store.read_bytes(shard.file), dataset.layout.dtype)
            assert len(records) == shard.rows > 0
            self.records.append(records)
            for name, values in self.values.items():
                side = dataset.store.read_bytes(shard.sidecar)
                values += [side[row["start"] : row["start"] + row["length"]] for row in records[name]]
        self.records = np.concatenate(self.records)

    def __getitem__(self, name):
        """Return an array [rows, ...] for a dense field, a list of bytes for others."""
        return self.values.get(name, self.records[name])
