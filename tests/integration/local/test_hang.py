"""Workers that are alive: one that sends heartbeats and never comes to the collective, one that cannot send them."""

from pathlib import Path

import pytest

from spark_elastic.errors import UserFunctionError
from spark_elastic.membership.timeline import WorkerLeft


def train_and_hang(folder):
    import torch

    import spark_elastic.torch as hvd

    hvd.init()
    model = torch.nn.Linear(4, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)
    hung = Path(folder, "hung")

    @hvd.elastic.run
    def loop(state):
        while state.step < 40:
            if state.step == 20 and hvd.rank() == 1 and not hung.exists():
                hung.touch()
                while True:
                    pass
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            state.step += 1
            state.check_host_updates()
        return state.step, model.weight.tolist()

    return loop(state)


def test_a_worker_that_spins_is_removed_after_the_stall_timeout(start_job, tmp_path):
    job = start_job(
        train_and_hang, (str(tmp_path),), num_proc=3, min_num_proc=2, stall_timeout=2.0, preimport=("torch",)
    )
    results = job.result(120)
    assert {step for step, _ in results} == {40}
    assert len({str(weights) for _, weights in results}) == 1
    left = next(record for record in job.timeline() if isinstance(record, WorkerLeft))
    assert "waited for it in a collective" in left.why


def use_sets_in_a_cycle():
    import torch

    import spark_elastic.torch as hvd

    hvd.init()
    rank = hvd.rank()
    sets = [hvd.add_process_set(ranks) for ranks in ([0, 1], [1, 2], [0, 2])]
    own = [sets[rank], sets[rank - 1]]
    try:
        handles = [hvd.allreduce_async(torch.ones(1), op=hvd.Sum, process_set=each) for each in own]
        return [hvd.synchronize(handle).item() for handle in handles]
    except hvd.HorovodInternalError as error:
        raise RuntimeError(str(error)) from None


def test_ranks_that_wait_at_first_uses_of_different_sets_are_told_what_to_do(start_job):
    job = start_job(use_sets_in_a_cycle, num_proc=3, stall_timeout=3.0, preimport=("torch",))
    with pytest.raises(UserFunctionError, match=r"first use of the process set of ranks \[\d, \d\].*in one order"):
        job.result(120)
