"""The reader as a torch dataset: tensors, the state in two integers, worlds that change."""

from itertools import islice

import numpy as np
import pytest
import torch
import torch.utils.data

from spark_elastic.data.dataset import pack
from spark_elastic.data.torch_dataset import TorchBatches
from spark_elastic.errors import InvalidSettingsError
from tests.unit.data.datasets import numbered


def test_batches_are_tensors_of_the_stored_types(tmp_path):
    dataset = pack({"x": np.eye(6, dtype=np.float32), "y": np.arange(6), "text": list("abcdef")}, tmp_path)
    with dataset.reader(batch_size=4) as reader:
        batches = TorchBatches(reader)
        (first, second) = torch.utils.data.DataLoader(batches, batch_size=None)
    assert (first["x"].dtype, first["x"].shape, second["y"].dtype) == (torch.float32, (4, 6), torch.int64)
    assert (first["x"].argmax(1) == first["y"]).all()
    assert [ord(letter) - 97 for letter in second["text"]] == second["y"].tolist()


def test_it_resumes_from_its_state_in_any_world(tmp_path):
    dataset = numbered(tmp_path, [1000])

    def read(batches):
        return [set(item["label"].tolist()) for item in batches]

    with dataset.reader(batch_size=64) as reader:
        batches = TorchBatches(reader)
        expected = [read(batches), read(batches)]
        assert batches.state_dict() == {"epoch": 2, "position": 0}
    with dataset.reader(batch_size=64) as reader:
        batches = TorchBatches(reader, epoch=1)
        seen = [set(item["label"].tolist()) for item in islice(batches, 3)]
        assert batches.batch.stop == batches.position
        state = batches.state_dict()
    parts = []
    for rank in (1, 0):
        with dataset.reader(batch_size=64) as reader:
            batches = TorchBatches(reader)
            batches.load_state_dict(state)
            batches.set_world(rank, 2)
            parts.append(read(batches))
    assert seen[: state["position"] // 64] + [a | b for a, b in zip(*parts, strict=True)] == expected[1]


def test_worker_processes_are_refused(tmp_path):
    with numbered(tmp_path, [10]).reader(batch_size=4) as reader:
        loader = torch.utils.data.DataLoader(TorchBatches(reader), batch_size=None, num_workers=1)
        with pytest.raises(InvalidSettingsError, match="num_workers=0"):
            next(iter(loader))
