"""The state of a training: no copies of its tensors, and what a lost worker does within the optimizer's step."""

from __future__ import annotations

import pytest
import torch

import spark_elastic.torch as hvd
from spark_elastic.errors import HorovodInternalError, UsageError
from spark_elastic.ml.torch.training import assemble
from tests.unit.ml.torch.trainings import make_net, make_set, make_training


class StepThatLosesAWorker(torch.optim.SGD):
    """An optimizer with a collective in its second step, which fails."""

    steps = 0

    def step(self, closure=None):
        super().step(closure)
        self.steps += 1
        if self.steps == 2:
            raise HorovodInternalError("a collective failed: a peer is gone")


@pytest.fixture(autouse=True)
def world_of_one():
    hvd.init()
    yield
    hvd.shutdown()


def test_training_keeps_no_copies_of_model_and_optimizer(tmp_path):
    make_set(tmp_path / "set")
    trainer = assemble(make_training(tmp_path / "set", tmp_path / "store"))
    trainer.run()
    for handler in trainer.state._handlers.by_name.values():
        assert handler._copies == []
    assert all(param.grad is None for param in trainer.engine.model.parameters())


def test_collective_that_fails_within_the_optimizers_step_ends_the_training(tmp_path):
    make_set(tmp_path / "set")
    net = make_net()
    optimizer = StepThatLosesAWorker(net.parameters(), lr=0.1)
    trainer = assemble(make_training(tmp_path / "set", tmp_path / "store", model=net, optimizer=optimizer))
    with pytest.raises(UsageError, match="must not call collectives in its step"):
        trainer.run()
