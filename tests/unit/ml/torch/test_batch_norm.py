"""Batch normalisation of a single row, which can be a worker's share of a batch."""

from __future__ import annotations

import pytest
import torch

from spark_elastic.ml.torch.batch_norm import single_row_norm
from tests.unit.ml.torch.trainings import ROWS, alone, make_net, make_training


def test_single_row_is_normalised_by_the_unchanged_running_statistics():
    net = make_net(norm=True)
    row = torch.ones(1, 6, dtype=torch.float64)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with single_row_norm(net, rows=1):
        output = net(row)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert net[1].training
    assert torch.equal(output, net.eval()(row))


def test_single_row_with_many_values_per_channel_is_normalised_by_them():
    net = torch.nn.BatchNorm2d(3)
    image = torch.randn(1, 3, 4, 4)
    expected = torch.nn.BatchNorm2d(3)(image)
    with single_row_norm(net, rows=1):
        assert torch.equal(net(image), expected)
    assert net.num_batches_tracked == 1


def test_the_model_is_as_it_was_after_an_error():
    net = make_net(norm=True)
    with pytest.raises(RuntimeError), single_row_norm(net, rows=1):
        net(torch.ones(1, 6, dtype=torch.float64)).reshape(7)
    assert net[1].training
    assert not net[1]._forward_pre_hooks


def test_a_last_batch_of_one_row_is_trained_on(data, tmp_path):
    net = make_net(norm=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    result = alone(make_training(data, tmp_path, model=net, optimizer=optimizer, batch_size=ROWS - 1, epochs=1))
    assert result["steps"] == 2
    assert result["history"][0]["rows"] == ROWS
