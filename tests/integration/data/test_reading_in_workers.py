"""Readers in several processes have shares of the same global batches, and one cache on the host's disk."""

from __future__ import annotations

import numpy as np
import pytest

import spark_elastic
from spark_elastic.data import Dataset, pack

pytestmark = pytest.mark.nightly

ROWS = 200_000


@pytest.fixture
def dataset(tmp_path) -> Dataset:
    values = {"label": np.arange(ROWS), "check": np.arange(ROWS) * 3, "pad": np.zeros((ROWS, 28), np.float32)}
    return pack(values, tmp_path / "set", shards=2)


def test_workers_share_an_epoch_and_resume_it(dataset):
    def work(where):
        import spark_elastic.torch as hvd
        from spark_elastic.data import Dataset, TorchBatches

        hvd.init()
        reader = Dataset.open(where).reader(batch_size=1000, order="lanes", rank=hvd.rank(), size=hvd.size())
        batches = TorchBatches(reader, epoch=2, position=150_000)
        rows = [row for batch in batches for row in batch["label"].tolist()]
        reader.close()
        return rows, batches.state_dict()

    done = spark_elastic.run(work, (dataset.store.url,), num_proc=2, launcher=spark_elastic.LocalLauncher(), verbose=0)
    with dataset.reader(batch_size=1000, order="lanes") as reader:
        expected = [row for batch in reader.epoch(2, 150_000) for row in batch["label"].tolist()]
    assert sorted(done[0][0] + done[1][0]) == sorted(expected)
    assert abs(len(done[0][0]) - len(done[1][0])) <= 150  # each batch in halves, but for a row or two
    assert done[0][1] == {"epoch": 3, "position": 0}
