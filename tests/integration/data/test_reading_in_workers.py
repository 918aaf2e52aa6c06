"""Readers in several processes have shares of the same global batches, and one cache on the host's disk."""

from __future__ import annotations

import multiprocessing
import os
import signal
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest

import spark_elastic
from spark_elastic.data import Dataset, pack
from spark_elastic.data.order.windows import WindowSettings
from spark_elastic.data.remote_cache import disk_bytes
from tests.unit.data.test_remote_cache import cached_bytes, remote

ROWS = 200_000
LANES = WindowSettings(16, 256, 900)


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


def read(folder, cache, limit, epoch, kill_at=None):
    """Check the rows of an epoch and return the sum of all labels, or kill this process in the middle."""
    _, dataset = remote(folder)
    total = 0
    options = {"batch_size": 1000, "order": "lanes", "lanes": LANES, "cache_dir": cache, "cache_bytes": limit}
    with dataset.reader(**options) as reader:
        for number, batch in enumerate(reader.epoch(epoch)):
            assert (batch["check"] == 3 * batch["label"]).all(), "wrong bytes"
            assert not batch["pad"].any()
            total += int(batch["label"].sum())
            if number == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
    return total


def test_processes_share_a_cache_at_its_limit_and_a_kill_leaves_it_usable(dataset, tmp_path):
    cache, limit = tmp_path / "cache", sum(disk_bytes(shard.nbytes) for shard in dataset.manifest.shards)
    spawn = multiprocessing.get_context("spawn")  # as workers are: nothing is inherited
    killed = spawn.Process(target=read, args=(tmp_path / "set", cache, limit, 9, 50))
    killed.start()
    cache.mkdir(exist_ok=True)
    (cache / f"{0:032x}.partial").write_bytes(bytes(1 << 20))  # of a process that was killed as it fetched
    with ProcessPoolExecutor(2, mp_context=spawn) as pool:
        sums = list(pool.map(read, *zip(*[(tmp_path / "set", cache, limit, epoch) for epoch in (0, 1)], strict=True)))
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    assert sums == [ROWS * (ROWS - 1) // 2] * 2
    assert read(tmp_path / "set", cache, limit, 2) == sums[0]
    assert cached_bytes(cache) <= limit
