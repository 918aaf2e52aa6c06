"""Worlds of one to three workers on one GPU: reductions by NCCL, kills, joins, stalls, and the memory they leave.

`make gpu-check`, or `pytest -m gpu tests/gpu`; on CPUs, without NCCL, with SPARK_ELASTIC_GPU_CHECK=cpu.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import spark_elastic
import spark_elastic.torch as hvd
from spark_elastic.collective.gpu.nccl import CudaRuntime
from tests.gpu import one_card
from tests.gpu.one_card import DEVICE, ON_GPU

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(ON_GPU and not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]
KILLS = int(os.environ.get("SPARK_ELASTIC_GPU_CHECK_KILLS", "30"))
STEPS = 30


def die(rank: int, step: int, *, victim: int, at: int, folder: str) -> None:
    """Kill this worker, once in a job."""
    if (rank, step) == (victim, at):
        try:
            os.close(os.open(Path(folder) / "died", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


def check(results: list[dict[str, Any]], size: int, reduced: bool = True) -> None:
    """Check what workers of one world return; `reduced`: gradients were reduced in that world."""
    assert all(result["size"] == size for result in results)
    assert all(result["weights"] == results[0]["weights"] for result in results)
    assert all(result["scale"] == results[0]["scale"] for result in results)
    assert all(result["device"].startswith(DEVICE) for result in results)
    assert all(result["nccl"] == (ON_GPU and size > 1) for result in results) or not reduced


def applied(folder: Path) -> list[list[int]]:
    return [[int(line[3]) for line in lines] for lines in one_card.steps_in(folder).values()]


def test_worlds_of_one_to_three_train_to_the_same_weights(tmp_path):
    weights = []
    for size in (1, 2, 3):
        folder = tmp_path / str(size)
        folder.mkdir()
        results = one_card.run(size, folder, STEPS)
        check(results, size)
        assert applied(folder) == [list(range(STEPS))] * size
        weights.append(results[0]["weights"])
    assert weights[1] == pytest.approx(weights[0], rel=1e-2, abs=1e-2)
    assert weights[2] == pytest.approx(weights[0], rel=1e-2, abs=1e-2)


@pytest.mark.parametrize(("where", "half"), [("at_step", False), ("in_backward", True)])
def test_a_kill_costs_the_others_no_step_and_a_newcomer_joins(where, half, tmp_path):
    kill = partial(die, victim=1, at=10, folder=str(tmp_path))
    results = one_card.run(3, tmp_path, STEPS, **{where: kill}, waits_for=3, half=half)
    check(results, 3)
    for steps in applied(tmp_path):
        once = [step for step in steps if step != STEPS - 1]  # the last is repeated while the newcomer starts
        assert once == sorted(set(once))
    assert set(range(STEPS)) in [set(steps) for steps in applied(tmp_path)]


def dawdle(rank: int, step: int) -> None:
    """Keep the others waiting in their reduction, on the GPU and then on the CPU."""
    if (rank, step) == (1, 5):
        if ON_GPU:
            torch.cuda._sleep(2_000_000_000)  # about a second
        time.sleep(1.0)


def test_a_slow_worker_keeps_the_others_waiting_and_nothing_breaks(tmp_path):
    check(one_card.run(3, tmp_path, STEPS, in_backward=dawdle), 3)
    rounds = {line[0] for lines in one_card.steps_in(tmp_path).values() for line in lines}
    assert rounds == {1.0}
    assert applied(tmp_path) == [list(range(STEPS))] * 3


def test_replicas_are_equal_after_random_kills(tmp_path):
    enough = tmp_path / "enough"
    job = spark_elastic.run_async(
        one_card.train, (str(tmp_path), 1_000_000), {"until": str(enough)}, **one_card.options(3)
    )
    try:
        kills = one_card.kill_at_random(tmp_path, KILLS, job, random.Random(5).choice, within_s=140)
        enough.touch()
        results = job.result(timeout=60)
    finally:
        job.cancel("the test is over")
    worlds = {line[0] for lines in one_card.steps_in(tmp_path).values() for line in lines}
    times = one_card.recoveries_ms(tmp_path, kills)
    print(f"{len(kills)} kills, {len(worlds)} worlds; kill to next step: {statistics.median(times):.0f} ms (median)")
    assert len(kills) >= min(KILLS, 10)
    check(results, results[0]["size"], reduced=False)  # a newcomer may join as the file appears
    seen = {step for steps in applied(tmp_path) for step in steps}
    assert seen == set(range(max(seen) + 1))


def connect_again(folder: str, worlds: int) -> list[int]:
    """Connect and abort communicators in a worker, and return the free memory of the GPU after each."""
    one_card.claim_a_gpu()
    hvd.init()
    device, runtime = hvd.device(), CudaRuntime()
    free = []
    for number in range(worlds):
        pg = runtime.connect(dist.FileStore(f"{folder}/{number}", hvd.size()), hvd.rank(), hvd.size(), device)
        runtime.reduce_once(pg, device)
        tensor = torch.ones(1 << 20, device=device)
        pg.allreduce([tensor], dist.AllreduceOptions()).wait()
        assert tensor[-1].item() == hvd.size()
        hvd.barrier()
        pg.abort()
        del pg, tensor
        hvd.barrier()
        free.append(torch.cuda.mem_get_info(device)[0])
    return free


@pytest.mark.skipif(not ON_GPU, reason="it is about a GPU's memory")
def test_twenty_worlds_leave_no_memory_behind(tmp_path):
    for free in spark_elastic.run(connect_again, (str(tmp_path), 20), **one_card.options(2)):
        assert free[4] - free[-1] < 64 << 20, free
