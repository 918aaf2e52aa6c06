"""On real GPUs: NCCL for gradients, and what is left when a worker is lost. `pytest -m gpu tests/gpu`.

One GPU is enough for the first part; the second needs two. Without any, all of it is skipped.
"""

from __future__ import annotations

import os
import signal
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import spark_elastic
import spark_elastic.torch as hvd
from spark_elastic.collective.gpu.nccl import NcclReductions, member_device
from spark_elastic.collective.process import process
from spark_elastic.errors import HorovodInternalError

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="torch sees no CUDA device here")]
needs_two = pytest.mark.skipif(GPUS < 2, reason=f"needs 2 GPUs, and torch sees {GPUS}")

STEPS = 30


def alone(check_alive=lambda: None, report_stall=lambda begins: None):
    owner = SimpleNamespace(rank=0, size=1, check_alive=check_alive, report_stall=report_stall)
    made = NcclReductions(owner, dist.HashStore)
    made.connect(torch.device("cuda", 0))
    return made


def test_a_gpu_has_a_name_of_its_own_and_nccl_can_be_used():
    described = member_device(torch.device("cuda", 0))
    assert described.uuid
    assert described.why == ""


def test_a_communicator_of_one_reduces_is_aborted_and_made_anew():
    for _ in range(3):
        communicator = alone()
        tensor = torch.arange(1 << 20, dtype=torch.float32, device="cuda")
        communicator.wait(communicator.allreduce(tensor, dist.ReduceOp.SUM))
        assert tensor[:3].tolist() == [0.0, 1.0, 2.0]
        communicator.cut()


def test_a_cut_ends_the_wait_for_a_gpu_that_does_not_get_ready():
    state: dict[str, str] = {}
    stalled = threading.Event()

    def check_alive():
        if "why" in state:
            raise HorovodInternalError(state["why"])

    communicator = alone(check_alive, lambda begins: stalled.set())  # has loaded NCCL's kernels while the GPU was idle
    torch.cuda._sleep(20_000_000_000)  # in front of the reduction, on the same stream: about ten seconds
    work = communicator.allreduce(torch.ones(4, device="cuda"), dist.ReduceOp.SUM)

    def cut():
        stalled.wait(30)
        state["why"] = "a worker was lost"
        communicator.cut()

    cutting = threading.Thread(target=cut)
    cutting.start()
    with pytest.raises(HorovodInternalError, match="a worker was lost"):
        communicator.wait(work)
    cutting.join()
    torch.cuda.synchronize()


def train(dies_at):
    """Kills rank 1 of the first world at that step. Runs in a worker, with what this file imports."""
    hvd.init()
    device = hvd.device()
    first_rank = hvd.rank()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer, step=0)
    applied = []

    @hvd.elastic.run
    def loop(state):
        while state.step < STEPS:
            generator = torch.Generator().manual_seed(state.step)
            x = torch.randn(32, 64, generator=generator).to(device)
            optimizer.zero_grad()
            (model(x) - x.sum(dim=1, keepdim=True)).square().mean().backward()
            if first_rank == 1 and state.step == dies_at and not applied[dies_at:]:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            applied.append(state.step)
            state.step += 1
            state.commit()

    loop(state)
    group = process.group()
    return {
        "device": str(device),
        "size": hvd.size(),
        "nccl": group is not None and group.nccl.used,
        "why": "" if group is None else group.nccl.reason,
        "applied": applied,
        "model": [round(float(p.double().sum()), 5) for p in model.parameters()],
    }


def run(workers, *, dies_at=None, **options):
    return spark_elastic.run(
        train, (dies_at,), num_proc=workers, min_num_proc=1, launcher=spark_elastic.LocalLauncher(), **options
    )


def test_workers_that_share_a_gpu_reduce_through_the_hosts_memory():
    results = run(2, device="cuda", env={"CUDA_VISIBLE_DEVICES": "0"})
    for result in results:
        assert result["device"] == "cuda:0"
        assert not result["nccl"]
        assert "share one GPU" in result["why"]
    assert results[0]["model"] == results[1]["model"]


def test_a_worker_with_a_gpu_of_its_own_that_is_alone_trains_on_it():
    (result,) = run(1, device="cuda", env={"CUDA_VISIBLE_DEVICES": "0"})
    assert result["device"] == "cuda:0"
    assert result["applied"] == list(range(STEPS))


@needs_two
def test_workers_with_a_gpu_each_reduce_by_nccl_and_get_equal_models():
    results = run(GPUS)
    assert all(result["nccl"] for result in results), results[0]["why"]
    assert len({result["device"] for result in results}) == GPUS
    assert all(result["model"] == results[0]["model"] for result in results)


@needs_two
def test_a_worker_that_is_killed_costs_the_others_no_step():
    results = run(GPUS, dies_at=10)
    assert all(result["applied"] == sorted(set(result["applied"])) for result in results)
    assert list(range(STEPS)) in [result["applied"] for result in results]
    assert all(result["model"] == results[0]["model"] for result in results)
