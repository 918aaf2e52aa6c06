"""Ranks that make unequal steps: told which rank has left and which waits, and not tried again for ever."""

import pytest

from spark_elastic.errors import UnequalStepsError

pytestmark = pytest.mark.nightly

STALL_S = 3.0


def train(steps):
    """Make as many steps as the rank is given."""
    import torch

    import spark_elastic.torch as hvd

    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    for _ in range(steps[hvd.rank()]):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()


def test_rank_that_leaves_early_twice_fails_the_job_by_name(start_job):
    settings = {"num_proc": 2, "stall_timeout": STALL_S, "heartbeat_timeout": STALL_S}
    job = start_job(train, ({0: 4, 1: 5},), preimport=("torch",), **settings)
    with pytest.raises(UnequalStepsError) as raised:
        job.result(180)  # two worlds of two processes, also on a busy machine
    assert (raised.value.left, raised.value.waiting, raised.value.step) == ((0,), (1,), None)
    assert sum("has left" in str(each) or "has returned" in str(each) for each in job.changes()) >= 1
